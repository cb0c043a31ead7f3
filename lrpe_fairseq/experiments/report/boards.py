"""The matrix of docs/choosing.md: every measured method in one column, ranked with ties.

A board holds one aspect of ``configs/choosing.yaml`` under one attention type. It is a sheet with
one column whose rows are methods, so that the rules of :mod:`.claims` apply to it. A method is an
encoding with a normalizer; ``none`` with sinusoidal positions is a method of its own.
"""

import dataclasses
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lrpe_fairseq.encodings import ENCODINGS, canonical_name, encoding_class
from lrpe_fairseq.experiments.records.choices import Aspect, Choices, Source
from lrpe_fairseq.experiments.records.layout import ATTENTION, Column, Row, Table
from lrpe_fairseq.experiments.records.runs import Run
from lrpe_fairseq.experiments.report import cells, claims, speed
from lrpe_fairseq.experiments.report.cells import Group, Scores
from lrpe_fairseq.experiments.report.markdown import NOT_MEASURED, fixed
from lrpe_fairseq.experiments.report.sheet import Sheet

DEVICE = "cpu"
USUAL = "rotated"
SINUSOIDAL = "`none`, sinusoidal"
"""The baseline of every board: absolute positions only."""
VALUE = "value"
Boards = dict[tuple[str, str], Sheet]
"""By key of the aspect and attention type."""


def boards(root: Path, choices: Choices, found: Mapping[str, list[Sheet]]) -> Boards:
    """Return every board; those without runs are empty. found: the sheets of every table.

    Raises: ValueError if the sources of an aspect were not trained with one configuration.
    """
    return {
        (aspect.key, attention): board(root, aspect, attention, found)
        for aspect in choices.aspects
        for attention in ATTENTION
    }


def board(root: Path, aspect: Aspect, attention: str, found: Mapping[str, list[Sheet]]) -> Sheet:
    """Return one aspect under one attention type."""
    values = (
        _timed(root, aspect, attention) if aspect.benchmark else _measured(aspect, attention, found)
    )
    column = Column(VALUE, aspect.title, attention, VALUE, decimals=aspect.decimals)
    rows = [Row(label, label, [attention]) for label in sorted(values, key=_place)]
    table = Table(
        aspect.key, aspect.title, "", [], {"": ""}, SINUSOIDAL, aspect.better, [column], rows
    )
    return Sheet(root, table, Group("", "", {}), {(k, VALUE): v for k, v in values.items()})


def values(sheet: Sheet) -> dict[str, Scores]:
    """Return the values per seed of the methods of a board."""
    column = sheet.table.columns[0]
    return {row.label: sheet.ours(row, column) for row in sheet.table.rows}


def ranks(sheet: Sheet) -> dict[str, int]:
    """Return the rank of every method with several seeds: 1 + the number of methods ahead of it."""
    own = {label: scores for label, scores in values(sheet).items() if len(scores) > 1}
    better = sheet.table.better
    return {
        label: 1 + sum(claims.ahead(other, scores, better) for other in own.values())
        for label, scores in own.items()
    }


def cell(sheet: Sheet, label: str) -> str:
    """Return rank and mean, the mean in parentheses with one seed, or ``not measured``."""
    scores = values(sheet).get(label)
    if not scores:
        return NOT_MEASURED
    column, rank = sheet.table.columns[0], ranks(sheet).get(label)
    shown = fixed(cells.mean(scores), column.decimals)
    if rank is None:
        return f"({shown})"
    return f"**{rank}** · {shown}" if rank == 1 else f"{rank} · {shown}"


def methods(found: Boards, attention: str) -> list[str]:
    """Return every method that a board of this attention type has, in the order of ENCODINGS."""
    own = [sheet for (_, kind), sheet in found.items() if kind == attention]
    return sorted({row.label for sheet in own for row in sheet.table.rows}, key=_place)


def unmeasured(found: Boards, attention: str) -> list[str]:
    """Return the names of the encodings that serve this attention type and that no board has."""
    served = [n for n in ENCODINGS if attention == "softmax" or encoding_class(n).serves_linear]
    known = {label.split("`")[1] for label in methods(found, attention)}
    return [name for name in served if public_name(name) not in known]


def public_name(encoding: str) -> str:
    """Return the first name of ENCODINGS for an encoding that has several.

    >>> public_name("lrpe-tmlr-type3"), public_name("gated:lrpe:householder:rotation-learned")
    ('lrpe-type4', 'gated:lrpe-type2')
    """
    canonical = canonical_name(encoding)
    if canonical.startswith("gated:"):
        return f"gated:{public_name(canonical.removeprefix('gated:'))}"
    return next((name for name in ENCODINGS if canonical_name(name) == canonical), canonical)


def method(encoding: str, options: Mapping[str, Any]) -> str:
    """Return the label of an encoding with the options of a cell.

    >>> method("rope", {"attention-normalizer": "layernorm"})
    '`rope`, layernorm'
    """
    normalizers = ("attention-normalizer", "encoder-attention-normalizer")
    normalizer = next((options[name] for name in normalizers if name in options), USUAL)
    parts = [f"`{public_name(encoding)}`"]
    if encoding == "none" and not options.get("no-token-positional-embeddings", False):
        parts = [SINUSOIDAL]
    return ", ".join([*parts, *([normalizer] if normalizer != USUAL else [])])


def _measured(
    aspect: Aspect, attention: str, found: Mapping[str, list[Sheet]]
) -> dict[str, Scores]:
    """Return the values of an aspect's columns; of several rows of a method the first counts."""
    known: dict[str, Scores] = {}
    places: dict[str, str] = {}
    configs = set()
    for source in aspect.sources:
        key = getattr(source, attention)
        for sheet in _sheets(source, found) if key else ():
            column = _column(aspect, sheet.table.column(key))
            configs.add(column.config or sheet.table.scales[source.scale])
            for label, scores, place in _rows(sheet, column):
                known.setdefault(label, scores)
                places.setdefault(label, place)
    if len(configs) > 1:
        raise ValueError(f"the sources of {aspect.key} have the configurations {sorted(configs)}")
    return _of_one_environment(known, places) if aspect.metric else known


def _sheets(source: Source, found: Mapping[str, list[Sheet]]) -> list[Sheet]:
    return [sheet for sheet in found[source.table] if sheet.group.scale == source.scale][:1]


def _column(aspect: Aspect, column: Column) -> Column:
    """Return the column, or the field ``metric`` of its runs."""
    if not aspect.metric:
        return column
    changed = {"key": f"{column.key} {aspect.metric}", "metric": aspect.metric}
    return dataclasses.replace(column, **changed, split="", protocol="", paper={})


def _rows(sheet: Sheet, column: Column) -> list[tuple[str, Scores, str]]:
    """Return method, values per seed and environment of every row with runs in a column."""
    table = sheet.table
    found = []
    for row in table.rows:
        if scores := sheet.ours(row, column):
            options = {**table.options, **row.overrides, **column.overrides}
            places = sorted({_environment(run) for run in sheet.runs_of(row, [column])})
            found.append((method(row.encoding, options), scores, "; ".join(places)))
    return found


def _environment(run: Run) -> str:
    return str([run["hardware"], run["versions"], run.get("kernels", {})])


def _of_one_environment(known: dict[str, Scores], places: dict[str, str]) -> dict[str, Scores]:
    """Merge the seeds of the methods that were not run where most methods have several seeds.

    Costs depend on the machine, so such a method has a value but no rank.
    """
    several = [places[label] for label, scores in known.items() if len(scores) > 1]
    most = statistics.mode(sorted(several)) if several else ""
    return {
        label: scores if places[label] == most else {0: cells.mean(scores)}
        for label, scores in known.items()
    }


def _timed(root: Path, aspect: Aspect, attention: str) -> dict[str, Scores]:
    """Return the speeds of a benchmark; the slowest and the fastest round stand for two seeds."""
    known: dict[str, Scores] = {}
    for row in speed.measured(aspect.benchmark, DEVICE, root):
        if row["attention"] == attention:
            mean, half = row["relative_speed"], row["spread"] / 2
            scores = {1: mean * (1 - half), 2: mean * (1 + half)}
            known.setdefault(method(row["encoding"], {}), scores)
    return known


def _place(label: str) -> tuple[int, str]:
    """Return a key that sorts by ENCODINGS; gated forms follow, then the others."""
    names, name = list(ENCODINGS), label.split("`")[1]
    plain = name.removeprefix("gated:")
    place = names.index(plain) if plain in names else len(names)
    return place + (1000 if plain != name else 0), label
