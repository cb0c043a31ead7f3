"""What the families of encoder-decoder models have in common."""

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lrpe_fairseq.encodings import options_of_encodings
from lrpe_fairseq.experiments.runner.training import TrainingRun

HALVES = ("encoder", "decoder")
OF_HALVES = (
    "attention-normalizer",
    "fidelity",
    "score-decay",
    "learned-pos",
    *(name.replace("_", "-") for name in options_of_encodings()),
)
"""Options of tables that encoder and decoder have each."""
KEYS = {
    f"{half}-{name}": f"model.{half}.{name.replace('-', '_')}"
    for half in HALVES
    for name in OF_HALVES
}
"""An option of one half -> fairseq's configuration."""


@dataclass(frozen=True)
class EncoderDecoderRun(TrainingRun, ABC):
    """One ``lrpe_transformer`` with the same attention type and encoding in both halves.

    A table names an option of one half as ``encoder-fidelity``, and of both halves as ``fidelity``.
    """

    option_keys: ClassVar[Mapping[str, str]] = KEYS

    @classmethod
    def overrides_of(cls, option: str, value: Any) -> tuple[str, ...]:
        """Return ``section.key=value`` for an option, for both halves if each of them has it."""
        names = [f"{half}-{option}" for half in HALVES] if option in OF_HALVES else [option]
        return tuple(cls.override(name, value) for name in names)

    def encoding_choices(self) -> dict[str, str]:
        """Return attention and encoding of both halves."""
        choices = {
            "attention_type": self.attention_type,
            "position_encoding": self.position_encoding,
            "encoding_seed": str(self.seed),
        }
        return {f"model.{half}.{key}": value for half in HALVES for key, value in choices.items()}
