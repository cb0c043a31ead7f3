"""The table of ``docs/denominators.md``, from ``results/bench/<device>/denominators*.json``."""

from pathlib import Path
from typing import Any

from lrpe_fairseq.encodings import ENCODINGS, build_encoding
from lrpe_fairseq.experiments.records.files import ROOT
from lrpe_fairseq.experiments.report import markdown
from lrpe_fairseq.experiments.report.markdown import NOT_MEASURED
from lrpe_fairseq.experiments.report.speed import DEVICES, figures, measured_on

PAGE = "docs/denominators.md"
RANDOM, TRAINED = "denominators", "denominators-trained"
Measured = dict[str, dict[str, Any]]


def pages(root: Path) -> dict[str, str]:
    """Return the page with its table regenerated."""
    text = (root / PAGE).read_text(encoding="utf-8")
    return {PAGE: markdown.between(text, "denominators", section(root))}


def section(root: Path = ROOT) -> str:
    """Return the table of every measured device, with trained models if measured."""
    parts = [_device(root, device) for device in DEVICES if figures(RANDOM, device, root)]
    return "\n\n".join(parts) or f"{NOT_MEASURED.capitalize()}."


def _device(root: Path, device: str) -> str:
    random, trained = (figures(name, device, root) for name in (RANDOM, TRAINED))
    parts = [table(_by(random), _by(trained) if trained else None), measured_on(random)]
    if trained:
        parts.append(f"Trained models: {measured_on(trained)}")
    return "\n\n".join(parts)


def table(random: Measured, trained: Measured | None) -> str:
    """Return a row per encoding that supports linear attention."""
    head = ["encoding", "denominators under eps", "smallest share"]
    head += ["trained: under eps"] if trained is not None else []
    rows = []
    for name in filter(serves_linear, ENCODINGS):
        cells = [_share(random.get(name)), _smallest(random.get(name))]
        if trained is not None:
            cells.append(_share(trained.get(name)))
        rows.append([f"`{name}`", *cells])
    return markdown.table(head, rows, numbers=True)


def serves_linear(name: str) -> bool:
    """True if the encoding supports linear attention."""
    return build_encoding(name, head_dim=64, num_heads=8, causal=True).serves_linear


def _by(measurement: dict[str, Any]) -> Measured:
    return {row["encoding"]: row for row in measurement["rows"]}


def _share(row: dict[str, Any] | None) -> str:
    """Return the share of denominators raised by the clamp, in percent."""
    if row is None:
        return NOT_MEASURED
    share = row["under_eps"]
    return "< 0.01%" if 0 < share < 5e-5 else f"{share:.2%}"


def _smallest(row: dict[str, Any] | None) -> str:
    return NOT_MEASURED if row is None else f"{row['smallest_share']:.2f}"
