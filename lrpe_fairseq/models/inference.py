"""Support for fairseq's inference options ``--retain-dropout`` and ``--retain-dropout-modules``."""

from collections.abc import Iterable
from typing import Any

from fairseq.modules import FairseqDropout
from torch import nn

from lrpe_fairseq.errors import ChoiceError
from lrpe_fairseq.models.options import one_sentence_errors

DROPOUT_MODULES = {
    "TransformerEncoder": "embeddings of the encoder",
    "TransformerEncoderLayer": "residual branches and activations of its layers",
    "TransformerDecoder": "embeddings of the decoder",
    "TransformerDecoderLayer": "residual branches and activations of its layers",
    "MultiheadAttention": "weights of softmax attention, self and cross",
}
"""Names that ``--retain-dropout-modules`` accepts, and the dropout that each of them keeps."""


class RetainedDropout:
    """Mixin for models: ``--retain-dropout-modules`` accepts the names of fairseq's own modules.

    fairseq compares these names with class names and ignores unknown ones. Here the name of a stock
    class, with or without its suffix ``Base``, selects the class that replaces it, and an unknown
    name is refused.
    """

    def make_generation_fast_(
        self, retain_dropout_modules: Iterable[str] | None = None, **keywords: Any
    ) -> None:
        """Called by fairseq before inference."""
        if retain_dropout_modules is not None:
            with one_sentence_errors():
                names = [known_dropout_module(name) for name in retain_dropout_modules]
            keywords["retain_dropout_modules"] = names
        super().make_generation_fast_(**keywords)


def known_dropout_module(name: str) -> str:
    """Return the key of ``DROPOUT_MODULES`` for ``name``.

    Raises: ChoiceError if there is none.
    """
    known = name.removesuffix("Base")
    if known not in DROPOUT_MODULES:
        raise ChoiceError(
            f"unknown module {name!r} of --retain-dropout-modules; choose from "
            + ", ".join(DROPOUT_MODULES)
        )
    return known


def name_dropout(module: nn.Module, name: str) -> None:
    """Set the name by which ``--retain-dropout-modules`` finds the dropout of ``module``."""
    for child in module.children():
        if isinstance(child, FairseqDropout):
            child.module_name = name
