"""Convert the attention of a pretrained model of transformers: ``experiments convert``."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lrpe_fairseq.experiments.records.console import UserError, command


@command("convert")
def main(arguments: Sequence[str] | None = None) -> None:
    """Convert a model, write it with its tokenizer, if any, to a new folder; print the folder."""
    try:
        from lrpe_fairseq.hf import convert
    except ModuleNotFoundError as error:
        raise UserError(str(error)) from None
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    options = _parse(arguments)
    if options.folder.exists():
        raise UserError(f"{options.folder} exists: name a new folder")
    if options.model.count("/") > 1 and not Path(options.model).exists():  # no name of the Hub
        raise UserError(f"{options.model} does not exist: name a folder of transformers")
    given = {"gguf_file": options.gguf} if options.gguf else {}
    # Before the model is written: a tokenizer that does not load leaves no folder behind.
    tokenizer = None
    if options.gguf or _has_tokenizer(options.model):
        tokenizer = AutoTokenizer.from_pretrained(options.model, **given)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=options.dtype, **given)
    changes: dict[str, Any] = dict(options.option)
    for name in ("attention_type", "position_encoding"):
        if getattr(options, name) is not None:
            changes[name] = getattr(options, name)
    convert(model, layers=options.layers, **changes)
    model.save_pretrained(options.folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(options.folder)
    print(f"written to {options.folder}{'' if tokenizer else ', without a tokenizer'}")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lrpe_fairseq.experiments convert",
        description="Replace the attention of a pretrained model of transformers. Without options "
        "the model computes what it did before.",
    )
    add = parser.add_argument
    add("model", help="folder or name of a causal language model of transformers")
    add("folder", type=Path, help="a new folder")
    add("--attention-type", help="linear or softmax (default: softmax)")
    add("--position-encoding", help="name of an encoding (default: that of the model)")
    add("--layers", type=_layers, help="numbers of layers, separated by commas (default: all)")
    add(
        "--option",
        type=_option,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="of attention or of the encoding, such as fox_bias=8.0; may be repeated",
    )
    add("--dtype", default="float32", help="of the weights (default: float32)")
    add("--gguf", metavar="FILE", help="a GGUF file in the folder of the model")
    return parser.parse_args(arguments)


def _has_tokenizer(model: str) -> bool:
    """True for a name of the Hub, and for a folder with a file of a tokenizer."""
    folder = Path(model)
    names = ("tokenizer*", "vocab*", "*.model")
    return not folder.is_dir() or any(any(folder.glob(name)) for name in names)


def _layers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"write numbers of layers, such as 0,2, not {text}"
        ) from None


def _option(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"write NAME=VALUE, not {text}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value
