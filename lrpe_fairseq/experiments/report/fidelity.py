"""The measured part of ``docs/fidelity.md``: the effect of the authors' departures."""

from pathlib import Path

from lrpe_fairseq.experiments.records.layout import load_table
from lrpe_fairseq.experiments.records.runs import read_runs
from lrpe_fairseq.experiments.report import claims, markdown
from lrpe_fairseq.experiments.report.sheet import sheets

PAGE = "docs/fidelity.md"


def pages(root: Path) -> dict[str, str]:
    """Return the page with its finding regenerated."""
    text = (root / PAGE).read_text(encoding="utf-8")
    return {PAGE: markdown.between(text, "measured", measured(root))}


def measured(root: Path) -> str:
    """Return the finding of the table ``fidelity`` at every scale with runs."""
    table = load_table(root / "configs" / "tables" / "fidelity.yaml")
    found = sheets(root, table, read_runs(root / "results" / "runs"))
    lines = [f"- {sheet.place}: {claims.finding(sheet)}" for sheet in found]
    return "\n".join(lines) or f"{markdown.NOT_MEASURED.capitalize()}."
