"""Write RoBERTa as a checkpoint of ``lrpe_roberta``: ``experiments import_roberta``."""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lrpe_fairseq.encodings.core.options import flag_of
from lrpe_fairseq.experiments.data.pieces import GPT2_FOLDER, SHA256
from lrpe_fairseq.experiments.records.console import UserError, command

CHECKPOINT, DICTIONARY = "checkpoint.pt", "bin/dict.txt"


@command("import_roberta")
def main(arguments: Sequence[str] | None = None) -> None:
    """Write checkpoint, dictionary and tokenizer to a new folder, and print it."""
    try:
        from lrpe_fairseq.hf import roberta
    except ModuleNotFoundError as error:
        raise UserError(str(error)) from None
    options = _parse(arguments)
    if options.folder.exists():
        raise UserError(f"{options.folder} exists: name a new folder")
    imported = roberta.roberta(options.source)
    symbols = _symbols(options, imported)
    words = len(imported.weights[f"{roberta.ENCODER}embed_tokens.weight"])
    if words != (wanted := len(symbols) + roberta.SPECIALS + 1):
        raise UserError(
            f"the model has {words} symbols, and its dictionary with <mask> has {wanted}: pass "
            "--dictionary with the dict.txt of the model"
        )
    state = _state(options.folder, imported)
    (options.folder / "bin").mkdir(parents=True)
    lines = "".join(f"{symbol} {len(symbols) - i}\n" for i, symbol in enumerate(symbols))
    (options.folder / DICTIONARY).write_text(lines, encoding="utf-8")
    _write_tokenizer(options.folder / GPT2_FOLDER, imported)
    torch.save(state, options.folder / CHECKPOINT)
    print(f"written to {options.folder}")
    if imported.tokenizer is None:
        files = f"{options.folder / GPT2_FOLDER}/{{{','.join(SHA256)}}}"
        print(f"without a tokenizer: copy GPT-2's files to {files} before you prepare data")


def _write_tokenizer(folder: Path, imported: Any) -> None:
    """Write the files of GPT-2's BPE, as a corpus has them that was prepared with --level gpt2."""
    if imported.tokenizer is not None:
        folder.mkdir()
        for name, text in imported.tokenizer.files().items():
            (folder / name).write_text(text, encoding="utf-8")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lrpe_fairseq.experiments import_roberta",
        description="Write RoBERTa as a checkpoint of lrpe_roberta, its dictionary and its "
        "tokenizer.",
    )
    add = parser.add_argument
    add("source", type=Path, help="folder of Hugging Face, or checkpoint of fairseq's roberta")
    add("folder", type=Path, help="a new folder")
    add("--dictionary", type=Path, help="dict.txt of fairseq (default: from the tokenizer)")
    return parser.parse_args(arguments)


def _symbols(options: argparse.Namespace, imported: Any) -> list[str]:
    """Return the symbols of the dictionary. Raises: UserError if nothing has them."""
    if options.dictionary is not None:
        return _read(options.dictionary)
    if imported.tokenizer is None:
        raise UserError(
            f"{options.source} has no tokenizer: pass --dictionary with the dict.txt of the model"
        )
    return imported.tokenizer.symbols


def _read(dictionary: Path) -> list[str]:
    """Return the symbols of a dictionary of fairseq."""
    if not dictionary.is_file():
        raise UserError(f"{dictionary} does not exist")
    lines = dictionary.read_text(encoding="utf-8").splitlines()
    return [line.rsplit(" ", 1)[0] for line in lines]


def _flag(name: str, value: Any) -> str:
    """Return an option of the command line; flags have no value."""
    if isinstance(value, bool):
        return flag_of(name) if value else ""
    return f"{flag_of(name)} {value}"


def _state(folder: Path, imported: Any) -> dict[str, Any]:
    """Return a checkpoint after 0 updates, with the options of a training by fairseq-train."""
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from omegaconf import OmegaConf

    import lrpe_fairseq.models

    own = [_flag(name, value) for name, value in imported.options.items()]
    plugin = shlex.quote(str(Path(lrpe_fairseq.__file__).parent))
    words = [
        f"{shlex.quote(str((folder / 'bin').absolute()))} --user-dir {plugin} --task masked_lm",
        f"--arch lrpe_roberta --criterion masked_lm --optimizer adam --lr 1e-5 {' '.join(own)}",
        f"--tokens-per-sample {imported.options['max_positions']}",
    ]
    parser = options.get_training_parser()
    given = options.parse_args_and_arch(parser, shlex.split(" ".join(words)))
    config = convert_namespace_to_omegaconf(given)
    history = {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}}
    return {
        "args": None,
        "cfg": OmegaConf.to_container(config, resolve=True, enum_to_str=True),
        "model": imported.weights,
        "optimizer_history": [{**history, "num_updates": 0}],
        "extra_state": {"train_iterator": {"epoch": 1}},
    }
