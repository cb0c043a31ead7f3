"""The generated parts of ``docs/fidelity.md``: the authors' departures and their effect."""

from pathlib import Path

from lrpe_fairseq.encodings.fidelity import DEPARTURES
from lrpe_fairseq.experiments.report import frame, markdown
from lrpe_fairseq.experiments.report.pages import verdict

PAGE = "docs/fidelity.md"
HEAD = ("name", "the paper says", "the authors' code did", "ours does")


def pages(root: Path) -> dict[str, str]:
    """Return the page with its table and its finding regenerated."""
    text = (root / PAGE).read_text(encoding="utf-8")
    text = markdown.between(text, "departures", departures_table())
    return {PAGE: markdown.between(text, "measured", measured(root))}


def departures_table() -> str:
    """Return a table with one row per departure that ``--fidelity`` accepts."""
    rows = [(f"`{name}`", own.paper, own.code, own.ours) for name, own in DEPARTURES.items()]
    return markdown.table(HEAD, rows)


def measured(root: Path) -> str:
    """Return the finding of the table ``fidelity`` at every scale with runs."""
    results = frame.results(root)
    texts = [
        verdict(sheet.table, [results.view(sheet, column) for column in sheet.headlines])
        for sheet in results.sheets_of("fidelity")
    ]
    return "\n".join(texts) or f"{markdown.NOT_MEASURED.capitalize()}."
