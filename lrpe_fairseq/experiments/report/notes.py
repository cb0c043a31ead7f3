"""Resolve ``[[reference]]`` in the texts of a table to numbers from runs and papers."""

import re

from lrpe_fairseq.experiments.records.notes import REFERENCE, Option, Order, parse
from lrpe_fairseq.experiments.report import cells
from lrpe_fairseq.experiments.report.claims import stated_order
from lrpe_fairseq.experiments.report.markdown import NOT_RUN, fixed, plain_number
from lrpe_fairseq.experiments.report.sheet import Sheet


def render(sheet: Sheet, text: str) -> str:
    """Return ``text`` with its references resolved. Raises: ValueError if one has no value."""
    return REFERENCE.sub(lambda found: _resolved(sheet, found), text)


def _resolved(sheet: Sheet, found: re.Match[str]) -> str:
    reference = parse(found[1])
    if isinstance(reference, Option):
        return plain_number(sheet.option(reference.name, reference.scale, reference.column))
    if isinstance(reference, Order):
        return stated_order(sheet, reference.first, reference.others, reference.column)
    row, column = sheet.table.row(reference.row), sheet.table.column(reference.column)
    if reference.published:
        return sheet.printed(row, column)
    values = sheet.ours(row, column)
    return fixed(cells.mean(values), column.decimals) if values else NOT_RUN
