"""Write a checkpoint of fairseq as a folder that transformers loads."""

import shutil
from pathlib import Path

from transformers import GenerationConfig

from lrpe_fairseq.errors import ChoiceError
from lrpe_fairseq.hf.card import Run, card
from lrpe_fairseq.hf.checkpoint import Checkpoint
from lrpe_fairseq.hf.config import LRPEConfig
from lrpe_fairseq.hf.model import LRPEForCausalLM, LRPEForMaskedLM
from lrpe_fairseq.hf.tokenizers import (
    BOS,
    EOS,
    SPECIALS,
    Source,
    build_tokenizer,
    find_source,
)

NO_TOKENIZER = "none"


def export(
    checkpoint: Path | str,
    folder: Path | str,
    *,
    data: Path | str | None = None,
    tokenizer: str = "auto",
    run: Run | None = None,
    license_name: str = "mit",
) -> None:
    """Write a checkpoint of ``lrpe_lm`` or ``lrpe_roberta`` to a new folder.

    ``AutoModelForCausalLM.from_pretrained(folder)``, or ``AutoModelForMaskedLM``, then gives a
    model with the same logits. The folder has the configuration, weights in float32, a fast
    tokenizer, a model card and a module for ``trust_remote_code``.

    Args:
        checkpoint: a file of fairseq-train.
        folder: new or empty. It appears when all of its files are written.
        data: folder of the training data; None: the one that the checkpoint names.
        tokenizer: a key of ``tokenizers.KINDS``; "auto" to find out, "none" for no tokenizer.
        run: a run file, whose results the model card shows.
        license_name: of the weights, by Hugging Face's name.
    Raises: ValueError, one sentence, for a checkpoint, data or a folder that do not fit.
    """
    loaded, target = Checkpoint(Path(checkpoint)), Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ChoiceError(f"{target} exists and is not empty: name a new folder")
    source = _source(loaded, data, tokenizer)
    config = loaded.config(_boundary(loaded, source))
    kind = LRPEForCausalLM if loaded.causal else LRPEForMaskedLM
    model = kind(config)
    model.load_state_dict(loaded.weights())
    if loaded.causal:
        model.generation_config = _generation(config)
    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        model.save_pretrained(part)
        if source is not None:
            begin = BOS if loaded.begins_with_bos else EOS
            own = build_tokenizer(
                source, config.vocab_size, kind=tokenizer, masked=not loaded.causal, begin=begin
            )
            own.save_pretrained(part)
        text = card(target.name, loaded, model, run, license_name)
        (part / "README.md").write_text(text, encoding="utf-8")
        part.replace(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _source(loaded: Checkpoint, data: Path | str | None, tokenizer: str) -> Source | None:
    """Return dictionary and tokenizer of the training data; None without a tokenizer."""
    if tokenizer == NO_TOKENIZER:
        return None
    named = str(loaded.task.get("data") or "") if data is None else str(data)
    return find_source(Path(named.split(":")[0]))


def _boundary(loaded: Checkpoint, source: Source | None) -> int | None:
    """Return the index of the symbol of ``--document-boundary``, or None without one."""
    symbol = loaded.model.get("document_boundary")
    known = SPECIALS if source is None else source.symbols
    if symbol is not None and symbol not in known:
        raise ChoiceError(
            f"the dictionary of the model's document boundary {symbol!r} is needed: pass --data "
            "with the folder of its training data"
        )
    return None if symbol is None else known.index(symbol)


def _generation(config: LRPEConfig) -> GenerationConfig:
    """Return the defaults of ``generate``. fairseq's generator never selects <pad> either."""
    return GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        suppress_tokens=[config.pad_token_id],
    )
