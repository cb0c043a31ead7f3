"""What the families of encoder-decoder models have in common."""

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lrpe_fairseq.encodings import options_of_encodings
from lrpe_fairseq.experiments.records.layout import HALVES, PARTS
from lrpe_fairseq.experiments.runner.training import TrainingRun

CROSS = "model.cross.position_encoding"
OF_PARTS = (
    "attention-normalizer",
    "fidelity",
    "score-decay",
    *(name.replace("_", "-") for name in options_of_encodings()),
)
"""Options of tables that every part has."""
KEYS = {
    f"{part}-{name}": f"model.{part}.{name.replace('-', '_')}"
    for part in PARTS
    for name in ("attention-type", "position-encoding", *OF_PARTS)
}
"""An option of one part -> fairseq's configuration."""
LEARNED = {f"{half}-learned-pos": f"model.{half}.learned_pos" for half in HALVES}


@dataclass(frozen=True)
class EncoderDecoderRun(TrainingRun, ABC):
    """One ``lrpe_transformer`` with the same attention type and encoding in encoder and decoder.

    Cross-attention is stock unless a table sets ``cross-position-encoding``. A table names an
    option of one part as ``encoder-fidelity`` or ``cross-fidelity``, and of all as ``fidelity``.
    """

    option_keys: ClassVar[Mapping[str, str]] = {**KEYS, **LEARNED}

    @classmethod
    def overrides_of(cls, option: str, value: Any) -> tuple[str, ...]:
        """Return ``section.key=value`` for an option, for every part that has it."""
        parts = PARTS if option in OF_PARTS else HALVES if option == "learned-pos" else ()
        names = [f"{part}-{option}" for part in parts] or [option]
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
