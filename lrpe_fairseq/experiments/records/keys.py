"""The cells of a table that a training fills, and the trainings that fill a table.

:func:`key` reads the key of a run from its settings, :func:`key_at` that of a row and a column. A
run fills the cells that have its key. The plan makes one training of the cells with one key, and a
page shows in a cell the runs with its key.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from lrpe_fairseq import patterns
from lrpe_fairseq.encodings import canonical_name, options_of_encodings, options_read_by
from lrpe_fairseq.errors import ChoiceError
from lrpe_fairseq.experiments.records.runs import Evaluations, Run
from lrpe_fairseq.experiments.records.tables import (
    HALVES,
    PARTS,
    Column,
    Row,
    Table,
    file_name,
    short,
)
from lrpe_fairseq.stock import STOCK

Sides = str | Mapping[str, str]
"""A name, or those of encoder and decoder."""
RATE = "optimization.lr"
LIMITS = ("dataset.max_tokens", "dataset.batch_size")
"""Options that limit a batch; one of them may be None."""
FREQUENCY = "optimization.update_freq"
WORLD = "distributed_training.distributed_world_size"
ABSENT = object()
CROSS = "model.cross."


class Key(NamedTuple):
    """What distinguishes the cells of a table, apart from what they show of a run.

    attention, encoding: of encoder and decoder; a model with one stack has the same twice.
    Both are as :func:`comparable` has them. changed: the options with other values than the table's
    usual ones. dataset: that of a column; empty for the data of the table's configuration.
    """

    attention: tuple[str, ...]
    encoding: tuple[str, ...]
    changed: frozenset[tuple[str, str]]
    dataset: str


def key(table: Table, run: Run) -> Key:
    """Return the key of a run file, or of a planned run with the same fields."""
    values = {name: option(run["config"], name, usual) for name, usual in table.options.items()}
    names = {column.dataset for column in table.columns}
    data = run["dataset"]
    return Key(
        _canonical("attention_type", run["attention_type"]),
        _canonical("position_encoding", run["position_encoding"]),
        _changed(table, values),
        next((n for n in (data, data.removesuffix(f"-{run['scale']}")) if n in names), ""),
    )


def key_at(table: Table, row: Row, column: Column) -> Key:
    """Return the key of the cell at ``row`` and ``column``."""
    attention = dict.fromkeys(HALVES, row.attention_in(column))
    encoding = dict.fromkeys(HALVES, row.encoding)
    # An encoder-decoder table varies one half; the other is the same in all cells.
    if table.fixed:
        attention[table.fixed["side"]] = table.fixed["attention"]
        encoding[table.fixed["side"]] = table.fixed["encoding"]
    chosen = {**table.options, **row.overrides, **column.overrides}
    return Key(
        _canonical("attention_type", attention),
        _canonical("position_encoding", encoding),
        _changed(table, chosen),
        column.dataset,
    )


def filled(table: Table, run: Run) -> list[tuple[str, str]]:
    """Return (label of the row, key of the column) of every cell of ``table`` that a run fills."""
    # Runs by hand have the same configuration and belong to no table.
    if run["experiment"] not in table.experiments or run["scale"] not in table.scales:
        return []
    run_key = key(table, run)
    rate = option(run["config"], RATE)
    return [
        (row.label, column.key)
        for row, column in _places(table).get(run_key, ())
        # A table with rates shows these only; one without shows any.
        if rate in (table.rates_at(run["scale"], column.rates) or [rate])
    ]


@lru_cache(maxsize=256)
def _places(table: Table) -> dict[Key, list[tuple[Row, Column]]]:
    """Return the cells of a table by key, row by row."""
    cells_of: dict[Key, list[tuple[Row, Column]]] = {}
    for row in table.rows:
        for column in table.columns:
            if row.has(column) and not column.mean_of:
                cells_of.setdefault(key_at(table, row, column), []).append((row, column))
    return cells_of


def option(config: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """Return the option with the dotted key ``name`` in the options of a run.

    Limits of a batch are those of an update over all processes. A list of one value, such as
    fairseq's learning rate per epoch, is returned as that value. ``model.*.key`` is the option of
    encoder, decoder and perhaps cross-attention if they have the same value; otherwise the result
    is a dictionary, which equals no value of a table. Parts that do not read the option do not
    count.
    """
    if name in LIMITS:
        # Two GPUs with half the batch are the same training.
        whole = [int(size) for size in sizes(config, name)]
        return whole[0] if len(whole) == 1 else whole or None
    by_part = {part: config.get(name.replace("*", part), ABSENT) for part in PARTS}
    by_part = {part: _single(value) for part, value in by_part.items() if value is not ABSENT}
    if not by_part:
        return default
    if "*" in name:
        # An option that a part does not read may have any value there.
        skipped = unread(config)
        read = {p: v for p, v in by_part.items() if name.replace("*", p) not in skipped}
        by_part = read or by_part
    first, *others = by_part.values()
    return by_part if any(other != first for other in others) else first


def unread(config: Mapping[str, Any]) -> set[str]:
    """Return the options of the model of a run that nothing reads.

    They are those of encodings that the part does not have, and in ``lrpe_transformer`` all of a
    cross-attention that is fairseq's own, but those that make it so.
    """
    unused = set()
    for section in ("model.", *(f"model.{part}." for part in PARTS)):
        # Empty for a part that the model does not have.
        names = str(config.get(f"{section}position_encoding") or "")
        section_options = {
            name.removeprefix(section) for name in config if name.startswith(section)
        }
        # Stock cross-attention reads none of our options.
        if section == CROSS and all(str(config.get(CROSS + n, v)) == v for n, v in STOCK.items()):
            unused |= {section + name for name in section_options if names and name not in STOCK}
        elif names:
            unused |= {section + name for name in section_options & _unread_by(names)}
    return unused


@lru_cache(maxsize=256)
def _unread_by(pattern: str) -> frozenset[str]:
    """Return the options of encodings that those of a pattern do not read."""
    known = options_of_encodings().keys()
    try:
        return known - frozenset().union(*map(options_read_by, patterns.values(pattern)))
    except ChoiceError:  # a run with an encoding that no longer exists
        return frozenset()


def comparable(name: str, value: Any) -> Any:
    """Return the value of an option in the form in which settings are compared.

    Patterns are as short as possible, encodings have canonical names, and 1, 1.0 and "1" are equal.
    So are an empty text and None: fairseq's command line reads the one, its YAML the other.
    """
    if value == "":
        value = None
    if not (isinstance(value, str) and value and name.endswith(patterns.OPTIONS)):
        return plain(value)
    canonical = canonical_name if name.endswith("position_encoding") else str
    return plain(patterns.canonical(value, canonical))


def plain(value: Any) -> Any:
    """Return a canonical value: 1, 1.0 and "1" are equal, and so are True and "true"."""
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    text = str(value).strip().lower()
    try:
        return float(text)
    except ValueError:
        return text


def steps(config: Mapping[str, Any]) -> list[float]:
    """Return the batches of an update in one process, by epoch."""
    return [float(frequency) for frequency in config.get(FREQUENCY) or [1]]


def batches(config: Mapping[str, Any]) -> list[float]:
    """Return the batches of an update over all processes, by epoch."""
    return [count * (config.get(WORLD) or 1) for count in steps(config)]


def sizes(config: Mapping[str, Any], limit: str) -> list[float]:
    """Return the largest update by epoch, as an option of LIMITS counts it; empty if not set."""
    size = config.get(limit)
    return [float(size) * count for count in batches(config)] if size else []


@dataclass(frozen=True)
class Cell:
    """One model to train: a row under an attention type, and its options.

    options: every option of the table, with the value of the row and column. changed: those that
    differ from the table's own values. name: for file names, such as ``Type2-linear``, followed by
    the data set of a column with its own configuration and the options that the column changes.
    config: the column's own configuration; empty for that of the scale. rates: the column's own
    learning rates; empty for those of the table. evaluations: what the columns that the model fills
    show.
    """

    key: Key
    label: str
    encoding: str
    attention: str
    options: tuple[tuple[str, Any], ...]
    changed: tuple[tuple[str, Any], ...]
    dataset: str
    name: str
    config: str = ""
    rates: tuple[float, ...] = ()
    evaluations: Evaluations = ()

    def asked(self, evaluations: Evaluations) -> "Cell":
        """Return the cell with more evaluations."""
        both = tuple(dict.fromkeys(self.evaluations + evaluations))
        return dataclasses.replace(self, evaluations=both)


def cells(table: Table) -> list[Cell]:
    """Return the cells of ``table`` that need separate trainings, row by row."""
    shown_in: dict[Cell, Evaluations] = {}
    for row in table.rows:
        for column in table.columns:
            if row.has(column) and not column.mean_of:
                cell = _cell(table, row, column)
                shown = ((column.split, column.protocol),) if column.split else ()
                shown_in[cell] = shown_in.get(cell, ()) + shown
    return [cell.asked(evaluations) for cell, evaluations in shown_in.items()]


def _cell(table: Table, row: Row, column: Column) -> Cell:
    chosen = {**table.options, **row.overrides, **column.overrides}
    options = tuple(sorted(chosen.items(), key=lambda option: short(option[0])))
    # The usual values stay out of file names, which would be too long.
    changed = tuple((k, v) for k, v in options if v != table.options[k])
    of_row = {**table.options, **row.overrides}
    named = [column.dataset] if column.config else []
    named += [f"{short(k)}={v}" for k, v in options if v != of_row[k]]
    return Cell(
        key=key_at(table, row, column),
        label=row.label,
        encoding=row.encoding,
        attention=row.attention_in(column),
        options=options,
        changed=changed,
        dataset=column.dataset,
        name=file_name("-".join([row.label, row.attention_in(column), *named])),
        config=column.config,
        rates=tuple(column.rates),
    )


def _changed(table: Table, chosen: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    return frozenset(
        (name, repr(comparable(name, value)))
        for name, value in chosen.items()
        if comparable(name, value) != comparable(name, table.options[name])
    )


def _single(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _canonical(name: str, names: Sides) -> tuple[str, ...]:
    """Return the names of encoder and decoder; models with one stack have the same name twice."""
    sides = dict.fromkeys(HALVES, names) if isinstance(names, str) else names
    return tuple(comparable(name, sides[side]) for side in HALVES)
