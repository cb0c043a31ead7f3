"""Which runs float16 cannot train: their denominator is often close to zero."""

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf

from lrpe_fairseq import patterns
from lrpe_fairseq.encodings import EncodingOptions, build_encoding
from lrpe_fairseq.experiments.runner.training import TrainingRun

PARTS = ("encoder", "decoder", "cross")


def divides_by_almost_zero(run: TrainingRun) -> bool:
    """True if a layer has linear attention, normalizer rotated and such an encoding.

    See ``Encoding.denominator_vanishes``: quotients are then as large as 10^6, and their gradients
    overflow float16 at any scale of the loss.
    """
    model = OmegaConf.to_container(run.settings().model, resolve=False)
    return any(map(_divides, _parts(model)))


def _parts(model: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the options of attention of a model, or of each part of a translation model."""
    if "attention_type" in model:
        yield model
    for name in PARTS:
        own = model.get(name)
        if isinstance(own, dict):
            yield own


def _divides(options: Mapping[str, Any]) -> bool:
    kinds = patterns.values(str(options.get("attention_type", "linear")))
    normalizers = patterns.values(str(options.get("attention_normalizer", "rotated")))
    if "linear" not in kinds or "rotated" not in normalizers:
        return False
    names = patterns.values(str(options.get("position_encoding", "none")))
    on_grid = EncodingOptions(grid_width=int(options.get("grid_width") or 1))
    encodings = (build_encoding(n, 64, 1, causal=True, options=on_grid) for n in names)
    return any(encoding.denominator_vanishes for encoding in encodings)
