"""RoBERTa of Hugging Face or of fairseq as weights and options of ``lrpe_roberta``.

Their attention is softmax attention without a relative encoding, and positions are learned.
"""

import json
import warnings
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PretrainedConfig, RobertaForMaskedLM, RobertaTokenizerFast

from lrpe_fairseq import safe_loading
from lrpe_fairseq.attention.projected import split_in_projections
from lrpe_fairseq.dictionaries import SPECIALS
from lrpe_fairseq.errors import ChoiceError

ENCODER = "encoder.sentence_encoder."
HEAD = "encoder.lm_head."
IN_EMBEDDINGS = {
    "word_embeddings.": "embed_tokens.",
    "position_embeddings.": "embed_positions.",
    "LayerNorm.": "layernorm_embedding.",
}
IN_LAYER = {
    "attention.self.query.": "self_attn.q_proj.",
    "attention.self.key.": "self_attn.k_proj.",
    "attention.self.value.": "self_attn.v_proj.",
    "attention.output.dense.": "self_attn.out_proj.",
    "attention.output.LayerNorm.": "self_attn_layer_norm.",
    "intermediate.dense.": "fc1.",
    "output.dense.": "fc2.",
    "output.LayerNorm.": "final_layer_norm.",
}
"""Names of Hugging Face -> names of fairseq."""
EPS = 1e-5
"""Of fairseq's LayerNorm."""
PAD = 1
"""Index of <pad> in fairseq."""
KINDS = ("roberta", "xlm-roberta", "camembert")
"""Model types of Hugging Face whose models are RoBERTa."""
OF_FAIRSEQ = {
    "encoder_learned_pos": True,
    "encoder_normalize_before": False,
    "layernorm_embedding": True,
    "no_scale_embedding": True,
    "no_token_positional_embeddings": False,
}
"""Options of fairseq's roberta with the values that an import represents: the defaults."""


class Pieces(NamedTuple):
    """A byte-level BPE in GPT-2's format.

    symbols: of fairseq's dictionary, by index, without the four that fairseq adds and ``<mask>``.
    numbers: piece -> its number in GPT-2's encoder. merges: pairs of pieces, in order.
    """

    symbols: list[str]
    numbers: dict[str, int]
    merges: list[tuple[str, str]]

    def files(self) -> dict[str, str]:
        """Return the texts of ``encoder.json`` and ``vocab.bpe``, which fairseq reads, by name."""
        lines = ["#version: 0.2", *map(" ".join, self.merges)]
        return {
            "encoder.json": json.dumps(self.numbers),
            "vocab.bpe": "".join(f"{line}\n" for line in lines),
        }


class Imported(NamedTuple):
    """A model. options: of ``lrpe_roberta``, by name. weights: by fairseq's names, float32.

    tokenizer: None if the source has none.
    """

    options: dict[str, Any]
    weights: dict[str, Tensor]
    tokenizer: Pieces | None = None


def roberta(source: Path | str) -> Imported:
    """Read RoBERTa from a folder of Hugging Face, or from a checkpoint of fairseq.

    Raises: ValueError, one sentence, for another model or for one that ``lrpe_roberta`` does not
        represent.
    """
    path = Path(source)
    if path.is_dir():
        return of_hugging_face(_loaded(path), pieces_of(path))
    return of_fairseq(path)


def _loaded(folder: Path) -> RobertaForMaskedLM:
    """Load a model of Hugging Face. Raises: ChoiceError for a folder without all of its weights."""
    kind = PretrainedConfig.get_config_dict(folder)[0].get("model_type", KINDS[0])
    if kind not in KINDS:
        raise ChoiceError(
            f"{folder} has a model of type {kind}: name a folder with one of type "
            f"{', '.join(KINDS)}"
        )
    model, found = RobertaForMaskedLM.from_pretrained(folder, output_loading_info=True)
    missing = sorted(found["missing_keys"])
    encoder = [name for name in missing if not name.startswith("lm_head.")]
    if encoder:
        raise ChoiceError(f"{folder} has no weight {encoder[0]}: name a folder with a whole model")
    if missing:
        warnings.warn(f"{folder} has no head for masked tokens: its head is random", stacklevel=2)
    return model


def of_hugging_face(model: RobertaForMaskedLM, tokenizer: Pieces | None = None) -> Imported:
    """Return a ``RobertaForMaskedLM`` with fairseq's names.

    The one row of token types is added to the positions.
    Raises: ChoiceError for a model that ``lrpe_roberta`` does not represent.
    """
    config = model.config
    _refuse(_reasons(config))
    state = {name: tensor.float() for name, tensor in model.state_dict().items()}
    types = state.pop("roberta.embeddings.token_type_embeddings.weight")
    weights = {}
    for old, tensor in state.items():
        new = _renamed(old)
        if new:
            weights[new] = tensor
    positions = f"{ENCODER}embed_positions.weight"
    weights[positions] = weights[positions] + types[0]  # not in place: they are the model's
    options = _options(weights, config.num_attention_heads)
    if config.tie_word_embeddings:
        weights[f"{HEAD}weight"] = weights[f"{ENCODER}embed_tokens.weight"]
    else:
        options["untie_weights_roberta"] = True
    return Imported(options, weights, tokenizer)


def _reasons(config: PretrainedConfig) -> list[str]:
    """Return everything in the configuration of a model that ``lrpe_roberta`` does not have."""
    reasons = []
    if config.hidden_act != "gelu":
        reasons.append(f"the activation {config.hidden_act}")
    if config.layer_norm_eps != EPS:
        reasons.append(f"layer_norm_eps {config.layer_norm_eps:g}")
    if config.type_vocab_size != 1:
        reasons.append(f"{config.type_vocab_size} types of tokens")
    if config.pad_token_id != PAD:
        reasons.append(f"pad_token_id {config.pad_token_id}")
    if getattr(config, "is_decoder", False):
        reasons.append("causal attention (is_decoder)")
    kind = getattr(config, "position_embedding_type", None) or "absolute"
    if kind != "absolute":
        reasons.append(f"position_embedding_type {kind}")
    return reasons


def _refuse(reasons: list[str]) -> None:
    """Raise ChoiceError that names all reasons, if there are any."""
    if reasons:
        raise ChoiceError(f"lrpe_roberta does not represent {' and '.join(reasons)} of this model")


def _renamed(name: str) -> str:
    """Return fairseq's name of a tensor; empty for one that is no weight of the model."""
    start, _, rest = name.partition(".")
    if start == "lm_head":
        if rest.startswith(("dense.", "layer_norm.")):
            return HEAD + rest
        # the bias of lm_head itself is tied to that of the decoder, or not used
        return HEAD + rest.removeprefix("decoder.") if rest.startswith("decoder.") else ""
    if rest.startswith("embeddings."):
        return _begun(IN_EMBEDDINGS, rest.removeprefix("embeddings."), ENCODER)
    if not rest.startswith("encoder.layer."):
        return ""  # the pooler
    layer, _, part = rest.removeprefix("encoder.layer.").partition(".")
    return _begun(IN_LAYER, part, f"{ENCODER}layers.{layer}.")


def _begun(names: Mapping[str, str], part: str, before: str) -> str:
    """Return a name whose beginning is renamed, after ``before``; empty if it has none of these."""
    for old, new in names.items():
        if part.startswith(old):
            return before + new + part.removeprefix(old)
    return ""


def of_fairseq(path: Path) -> Imported:
    """Return a checkpoint of fairseq's ``roberta``, of any age.

    Raises: ChoiceError for another checkpoint, and for options that an import does not represent.
    """
    state = safe_loading.load_any(path)
    stored = state["cfg"]["model"] if state.get("cfg") else state.get("args")
    options = stored if isinstance(stored, dict) else vars(stored or Namespace())
    weights = {_of_today(name): tensor for name, tensor in state["model"].items()}
    split_in_projections(weights)
    weights = {
        name: tensor.float()
        for name, tensor in weights.items()
        if name.startswith((ENCODER, HEAD)) and not name.endswith("version")
    }
    heads = options.get("encoder_attention_heads")
    given = {name: options.get(name, usual) for name, usual in OF_FAIRSEQ.items()}
    other = [f"{name} {value}" for name, value in given.items() if value != OF_FAIRSEQ[name]]
    needed = list(IN_EMBEDDINGS.values())
    if other:
        needed = needed[:1]
    whole = all(f"{ENCODER}{name}weight" in weights for name in needed)
    if not whole or heads is None or "position_encoding" in options:  # the last is ours
        raise ChoiceError(f"{path} is no checkpoint of fairseq's roberta: name one")
    _refuse(other)
    found = _options(weights, int(heads))
    found["activation_fn"] = options.get("activation_fn", "gelu")
    found["untie_weights_roberta"] = bool(options.get("untie_weights_roberta", False))
    return Imported(found, weights)


def _of_today(name: str) -> str:
    """Return the present name of a tensor in fairseq's checkpoints from before 2020."""
    if name.startswith("decoder."):
        name = name.replace("decoder.", "encoder.", 1)
    return name.replace(".emb_layer_norm.", ".layernorm_embedding.")


def _options(weights: Mapping[str, Tensor], heads: int) -> dict[str, Any]:
    """Return the options of ``lrpe_roberta`` with these weights."""
    embedding = weights[f"{ENCODER}embed_tokens.weight"]
    layers = {name.split(".")[3] for name in weights if name.startswith(f"{ENCODER}layers.")}
    positions = len(weights[f"{ENCODER}embed_positions.weight"]) - 2  # after <s> and <pad>
    return {
        "attention_type": "softmax",
        "position_encoding": "none",
        "encoder_layers": len(layers),
        "encoder_embed_dim": embedding.shape[1],
        "encoder_ffn_embed_dim": len(weights[f"{ENCODER}layers.0.fc1.weight"]),
        "encoder_attention_heads": heads,
        "max_positions": positions,
    }


# --- the tokenizer -----------------------------------------------------------------------------


def pieces_of(folder: Path) -> Pieces | None:
    """Return the pieces of a tokenizer of Hugging Face; None without a tokenizer.

    fairseq writes a piece as its number in GPT-2's encoder: 256 bytes, then the merges in order.
    """
    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        return None
    tokenizer = RobertaTokenizerFast.from_pretrained(folder)
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    pairs = [pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"]]
    merges = [(left, right) for left, right in pairs]
    names = [*_bytes(), *map("".join, merges), "<|endoftext|>"]
    numbers = {piece: number for number, piece in enumerate(names)}
    by_index = {index: piece for piece, index in tokenizer.get_vocab().items()}
    last = max(by_index)
    found = [str(numbers.get(by_index[i], by_index[i])) for i in range(SPECIALS, last + 1)]
    symbols = found[:-1] if found and found[-1] == "<mask>" else found
    return Pieces(symbols, numbers, merges)


def _bytes() -> list[str]:
    """Return GPT-2's letters for the 256 bytes, in the order of its encoder."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [*map(chr, printable), *(chr(256 + i) for i in range(len(others)))]
