"""What a page shows of the contrasts that were written down before their runs."""

from lrpe_fairseq.experiments.records.tables import ANY
from lrpe_fairseq.experiments.report import markdown, measurements
from lrpe_fairseq.experiments.report.results import Results
from lrpe_fairseq.experiments.report.sheets import Sheet

HEAD = ["column", "method", "against", "verdict"]


def section(results: Results, sheet: Sheet) -> str:
    """Return the contrasts of a sheet as a Markdown table; empty without any.

    Contrasts whose rows were not both trained are counted below it.
    """
    lines, missing = [], 0
    for one in measurements.contrasts(results.root):
        if (one.table, one.scale) != (sheet.table.name, sheet.scale):
            continue
        view = results.view(sheet, one.column)
        if not {one.a, one.b} <= set(view.rows):
            missing += 1
            continue
        found = view.versus(one.a, one.b)
        kind, title = view.column.attention, view.column.title
        column = title if kind == ANY else f"{kind}, {title}"
        lines.append([column, f"`{view.names[one.a]}`", f"`{view.names[one.b]}`", found])
    if not lines:
        return ""
    more = f"\n\nNot trained yet: {missing} more." if missing else ""
    return markdown.table(HEAD, lines) + more
