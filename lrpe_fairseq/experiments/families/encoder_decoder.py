"""What the families of encoder-decoder models have in common."""

from abc import ABC
from dataclasses import dataclass
from typing import Any

from lrpe_fairseq.experiments.records.layout import HALVES, PARTS
from lrpe_fairseq.experiments.runner.training import TrainingRun

CROSS = "model.cross.position_encoding"


@dataclass(frozen=True)
class EncoderDecoderRun(TrainingRun, ABC):
    """One ``lrpe_transformer`` with the same attention type and encoding in encoder and decoder.

    Cross-attention is stock unless a table sets ``model.cross.position_encoding``. A table names an
    option of one part as ``model.encoder.fidelity``, and of all parts as ``model.*.fidelity``.
    """

    @classmethod
    def overrides_of(cls, option: str, value: Any) -> tuple[str, ...]:
        """Return ``section.key=value`` for an option, for every part that has it."""
        parts = HALVES if option.endswith("learned_pos") else PARTS
        names = [option.replace("*", part) for part in parts] if "*" in option else [option]
        return tuple(cls.override(name, value) for name in names)

    def encoding_choices(self) -> dict[str, str]:
        """Return attention and encoding of both halves, and the seed of all encodings."""
        encoded = any(override.startswith(f"{CROSS}=") for override in self.overrides)
        choices = {
            "attention_type": self.attention_type,
            "position_encoding": self.position_encoding,
            "encoding_seed": str(self.seed),
        }
        found = {f"model.{half}.{key}": value for half in HALVES for key, value in choices.items()}
        return found | ({"model.cross.encoding_seed": str(self.seed)} if encoded else {})
