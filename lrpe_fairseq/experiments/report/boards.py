"""The matrix of docs/choosing.md: every measured method in one column, ranked with ties.

A board holds one aspect of ``configs/choosing.yaml`` under one attention type. It is a sheet with
one column whose rows are methods, so that the rules of :mod:`.claims` apply to it. A method is an
encoding with a normalizer; ``none`` with sinusoidal positions is a method of its own. So are the
later rows of a table whose encoding and normalizer an earlier one has, with the options in which
they differ from it.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lrpe_fairseq.encodings import ENCODINGS, canonical_name, encoding_class
from lrpe_fairseq.experiments.records.choices import Aspect, Choices, Source
from lrpe_fairseq.experiments.records.layout import ATTENTION, Column, Row, Table, short
from lrpe_fairseq.experiments.report import cells, claims, speed
from lrpe_fairseq.experiments.report.cells import Group, Scores
from lrpe_fairseq.experiments.report.markdown import DIVERGED, NO_CELL, fixed, listed
from lrpe_fairseq.experiments.report.sheet import Sheet

USUAL = "rotated"
SINUSOIDAL = "`none` with sinusoids"
"""The baseline of every board: absolute positions only."""
WITHOUT_SINUSOIDS = "model.no_token_positional_embeddings"
VALUE = "value"
NO_RANK = "–"
ADDED = "†"
"""Marks a method that has sinusoidal positions besides its encoding."""
UNLEARNED = "‡"
"""Marks a method that has not learned the task of the column at its training length."""
IMPOSSIBLE = "n/a"


@dataclass
class Board(Sheet):
    """A sheet of one column.

    added: the methods with sinusoidal positions besides an encoding. unlearned: the methods that
    have not learned the task, which have no rank. bidirectional: True if the models of the column
    are, which methods for causal attention cannot serve.
    """

    added: frozenset[str] = frozenset()
    unlearned: frozenset[str] = frozenset()
    bidirectional: bool = False

    @cached_property
    def ranks(self) -> dict[str, tuple[int, int]]:
        """The best and the worst rank of every method that is compared, best mean first.

        The best is 1 + the number of methods ahead of it, the worst the number of methods that it
        is not ahead of: with seeds that differ much a method has many ranks. Empty without any
        order.
        """
        better, own = self.table.better, ranked(self)
        if not claims.any_order(own, better):
            return {}
        return {
            label: (
                1 + sum(claims.ahead(other, scores, better) for other in own.values()),
                len(own) - sum(claims.ahead(scores, other, better) for other in own.values()),
            )
            for label, scores in own.items()
        }


Boards = dict[tuple[str, str], Board]
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


def board(root: Path, aspect: Aspect, attention: str, found: Mapping[str, list[Sheet]]) -> Board:
    """Return one aspect under one attention type."""
    if aspect.benchmark:
        values, added = _timed(root, aspect, attention), frozenset()
    else:
        values, added = _measured(aspect, attention, found)
    shown = {"better": aspect.better, "decimals": aspect.decimals}
    column = Column(VALUE, aspect.title, attention, VALUE, **shown)
    rows = [Row(label, label, [attention]) for label in sorted(values, key=_place)]
    table = Table(
        aspect.key, aspect.title, "", [], {"": ""}, SINUSOIDAL, aspect.better, [column], rows
    )
    found_values = {(row.label, VALUE): values[row.label] for row in rows}
    marks = {
        "added": added if aspect.quality else frozenset(),
        "unlearned": _unlearned(aspect, attention, found),
        "bidirectional": aspect.bidirectional,
    }
    return Board(root, table, Group("", "", {}), found_values, **marks)


def values(sheet: Sheet) -> dict[str, Scores]:
    """Return the values per seed of the methods of a board that have any."""
    column = sheet.table.columns[0]
    found = {row.label: sheet.ours(row, column) for row in sheet.table.rows}
    return {label: scores for label, scores in found.items() if scores}


def ranked(sheet: Board) -> dict[str, Scores]:
    """Return the values of the methods that are compared, best mean first.

    They have several seeds, all of them finite, and have learned the task.
    """
    own = {
        label: scores
        for label, scores in values(sheet).items()
        if len(scores) > 1 and not scores.lost and label not in sheet.unlearned
    }
    sign = 1 if sheet.table.better == "lower" else -1
    return dict(sorted(own.items(), key=lambda each: sign * cells.mean(each[1])))


def leading(sheet: Board) -> list[str]:
    """Return the methods that no other is ahead of, best mean first.

    Seeds that differ much are behind nothing, which does not make a method one of the best. So each
    is also ahead of at least half as many methods as that with the best mean, and has a better mean
    than every method that is behind another.
    """
    found = sheet.ranks
    behind = {label: len(found) - worst for label, (_, worst) in found.items()}
    most = next(iter(behind.values()), 0)
    unbeaten = itertools.takewhile(lambda label: found[label][0] == 1, found)
    return [label for label in unbeaten if 2 * behind[label] >= most]


def cell(sheet: Board, label: str, with_ranks: bool = True) -> str:
    """Return the mean and its ranks, in bold if it is leading; a dash without runs."""
    row = next((row for row in sheet.table.rows if row.label == label), None)
    if row is None:
        return IMPOSSIBLE if sheet.bidirectional and _causal_only(label) else NO_CELL
    scores = sheet.ours(row, sheet.table.columns[0])
    if not scores:
        return DIVERGED
    shown = fixed(cells.mean(scores), sheet.table.columns[0].decimals)
    shown += ADDED if label in sheet.added else ""
    shown += UNLEARNED if label in sheet.unlearned else ""
    if with_ranks:
        shown += f" ({_span(sheet.ranks.get(label))})"
        shown = f"**{shown}**" if label in leading(sheet) else shown
    return f"{shown}, {DIVERGED}" if scores.lost else shown


def _span(rank: tuple[int, int] | None) -> str:
    """Return ``1–3``, or one number if both are equal."""
    return NO_RANK if rank is None else "–".join(map(str, dict.fromkeys(rank)))


def _causal_only(label: str) -> bool:
    """True if the encoding of a method is defined for causal attention only."""
    name = label.split("`")[1]
    return name.startswith("gated:") or (name in ENCODINGS and encoding_class(name).causal_only)


def methods(found: Iterable[Board]) -> list[str]:
    """Return every method that one of the boards has, in the order of ENCODINGS."""
    return sorted({row.label for sheet in found for row in sheet.table.rows}, key=_place)


def unmeasured(found: Boards, attention: str) -> list[str]:
    """Return the names of the encodings that serve this attention type and that no board has."""
    served = [n for n in ENCODINGS if attention == "softmax" or encoding_class(n).serves_linear]
    own = [sheet for (_, kind), sheet in found.items() if kind == attention]
    known = {label.split("`")[1] for label in methods(own)}
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

    >>> method("rope", {"model.attention_normalizer": "layernorm"})
    '`rope` with `layernorm`'
    """
    normalizers = ("model.attention_normalizer", "model.encoder.attention_normalizer")
    normalizer = next((options[name] for name in normalizers if name in options), USUAL)
    label, joint = f"`{public_name(encoding)}`", "with"
    if encoding == "none" and not options.get(WITHOUT_SINUSOIDS, False):
        label, joint = SINUSOIDAL, "and"
    return label if normalizer == USUAL else f"{label} {joint} `{normalizer}`"


def labels(table: Table, column: Column) -> dict[str, str]:
    """Return the method of every row, by the label of the row."""
    first: dict[str, dict[str, Any]] = {}
    named = {}
    for row in table.rows:
        options = {**table.options, **row.overrides, **column.overrides}
        label = method(row.encoding, options)
        named[row.label] = _with(label, options, first.setdefault(label, options))
    return named


def _measured(
    aspect: Aspect, attention: str, found: Mapping[str, list[Sheet]]
) -> tuple[dict[str, Scores], frozenset[str]]:
    """Return the values of an aspect's columns, and the methods with sinusoidal positions too.

    Of several sources with a method the first counts.
    """
    known: dict[str, Scores] = {}
    added, configs = set(), set()
    for source in aspect.sources:
        key = getattr(source, attention)
        for sheet in _sheets(source, found) if key else ():
            column = _column(aspect, sheet.table.column(key))
            configs.add(column.config or sheet.table.scales[source.scale])
            for label, scores, sinusoids in _rows(sheet, column):
                if label not in known:
                    known[label] = scores
                    added.update([label] if sinusoids else [])
    if len(configs) > 1:
        raise ValueError(f"the sources of {aspect.key} have the configurations {sorted(configs)}")
    return known, frozenset(added)


def _unlearned(aspect: Aspect, attention: str, found: Mapping[str, list[Sheet]]) -> frozenset[str]:
    """Return the methods with a seed below the least accuracy at the training length."""
    if aspect.learned is None:
        return frozenset()
    key, least = getattr(aspect.learned, attention), aspect.learned.least
    return frozenset(
        label
        for sheet in _sheets(aspect.sources[0], found)
        for label, scores, _ in _rows(sheet, sheet.table.column(key))
        if scores.lost or min(scores.values()) < least
    )


def _sheets(source: Source, found: Mapping[str, list[Sheet]]) -> list[Sheet]:
    return [sheet for sheet in found[source.table] if sheet.group.scale == source.scale][:1]


def _column(aspect: Aspect, column: Column) -> Column:
    """Return the column, or the field ``metric`` of its runs."""
    if not aspect.metric:
        return column
    changed = {"key": f"{column.key} {aspect.metric}", "metric": aspect.metric}
    return dataclasses.replace(column, **changed, split="", protocol="", paper={})


def _rows(sheet: Sheet, column: Column) -> list[tuple[str, Scores, bool]]:
    """Return method, values per seed, and True for sinusoids too, of every row with runs."""
    found, named = [], labels(sheet.table, column)
    for row in sheet.table.rows:
        options = {**sheet.table.options, **row.overrides, **column.overrides}
        scores = sheet.ours(row, column)
        if scores or scores.lost:
            sinusoids = row.encoding != "none" and not options.get(WITHOUT_SINUSOIDS, False)
            found.append((named[row.label], scores, sinusoids))
    return found


def _with(label: str, options: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    """Name the options in which a later row of a method differs from its first.

    >>> _with("`fox`", {"model.fox_bias": 3.0}, {"model.fox_bias": 0.0})
    '`fox` with `fox-bias` 3.0'
    """
    new = {name: value for name, value in options.items() if value != first.get(name)}
    changed = [f"`{short(name)}` {value}" for name, value in new.items()]
    if not changed:
        return label
    return f"{label} {'and' if ' with ' in label else 'with'} {listed(changed)}"


def _timed(root: Path, aspect: Aspect, attention: str) -> dict[str, Scores]:
    """Return the relative speeds of a benchmark, medians over its rounds.

    A name such as ``ape (canonical)`` is another computation of an encoding, not a method.
    """
    known: dict[str, Scores] = {}
    for row in speed.measured(aspect.benchmark, aspect.device, root):
        if row["attention"] == attention and "(" not in row["encoding"]:
            known.setdefault(method(row["encoding"], {}), Scores({1: row["relative_speed"]}))
    return known


def _place(label: str) -> tuple[int, str]:
    """Return a key that sorts by ENCODINGS; gated forms follow, then the others."""
    names, name = list(ENCODINGS), label.split("`")[1]
    plain = name.removeprefix("gated:")
    place = names.index(plain) if plain in names else len(names)
    return place + (1000 if plain != name else 0), label
