"""Read and check tables: ``configs/tables/*.yaml``.

A table has rows and columns. A row selects an encoding and changed options; a column selects the
attention type and a field of the run file. A run fills a cell if it has the cell's encoding and
attention and if every option that the table names (``options``, changed by the ``overrides`` of row
and column) has the cell's value in the run's ``config``.
"""

import dataclasses
import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lrpe_fairseq import patterns
from lrpe_fairseq.experiments.records.precision import parted

Options = dict[str, Any]
ATTENTION = ("linear", "softmax")
ANY = "any"
"""The attention of a column whose rows have their own."""
HALVES = ("encoder", "decoder")
PARTS = (*HALVES, "cross")
"""The attention of an encoder-decoder model: self-attention of both, and cross-attention."""
BETTER = ("lower", "higher")


@dataclass(frozen=True)
class Column:
    """One column, and the field of the run file that it shows.

    A file may write several columns at once (:func:`repeated`). key: its name in ``method``.
    title: its heading. attention: ``linear``, ``softmax`` or :data:`ANY`. metric, with split and
    protocol: a number of the run's ``metrics``; without them: a field of the run, such as
    ``tokens_per_second``. dataset: only runs on this data set (for columns that differ in it);
    ``reverse`` also stands for ``reverse-small`` at scale small. config: a training configuration
    in place of the scale's; the column then names its data set. scales: the scales with this
    column, for example those whose data have the split; default all. rows: labels of the rows with
    this column; default all. overrides: options that differ. best_over: an option; of each seed's
    runs that differ in it only the best counts.
    best_by: split, protocol, metric and ``better`` of the number that selects it, instead of the
    column's own metric. rates: learning rates instead of the table's. mean_of: keys of the columns
    that this one averages, instead of a metric. paper: the published cell: ``file`` and the values
    of its columns. comparable: false if the published number is of another or unknown measure; the
    page then leaves it out. better: ``lower`` or ``higher``; default: that of the table.
    """

    key: str
    title: str
    attention: str
    metric: str = ""
    split: str = ""
    protocol: str = ""
    dataset: str = ""
    config: str = ""
    scales: list[str] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    overrides: Options = field(default_factory=dict)
    best_over: str = ""
    best_by: dict[str, str] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    mean_of: list[str] = field(default_factory=list)
    paper: dict[str, str] = field(default_factory=dict)
    comparable: bool = True
    better: str = ""
    decimals: int = 2


@dataclass(frozen=True)
class Row:
    """One method.

    label: its name; the command line takes others, too (``records.methods``). encoding: our public
    name, or a pattern over the layers. attention: the types with cells in this row; in a column
    with :data:`ANY` one type or pattern. overrides: options that differ. without: keys of columns
    without a cell in this row. method: its label in the published table, one for all columns or by
    column key; without it there is no published number. paper: further columns of the published
    cell, with their values.
    """

    label: str
    encoding: str
    attention: list[str]
    overrides: Options = field(default_factory=dict)
    without: list[str] = field(default_factory=list)
    method: str | dict[str, str] = ""
    paper: dict[str, str] = field(default_factory=dict)

    def has(self, column: Column) -> bool:
        """True if the row has a cell in ``column``."""
        shown = column.attention in (ANY, *self.attention) and column.key not in self.without
        return shown and self.label in (column.rows or [self.label])

    def attention_in(self, column: Column) -> str:
        """Return the attention type, or the pattern, of the row's cell in ``column``."""
        return self.attention[0] if column.attention == ANY else column.attention


@dataclass(frozen=True)
class Map:
    """A picture with a panel for every row: columns of the table over two axes.

    name: in the picture's file name. cells: what is added to the row's name in a panel's title ->
    the keys of its columns, with ``{x}`` and ``{y}``. x, y: the values of the axes, as in the keys.
    """

    name: str
    cells: dict[str, str]
    x: list[Any]
    y: list[Any]

    def keys(self) -> list[str]:
        """Return the keys that the map may show; a panel may lack some of them."""
        places = itertools.product(self.cells.values(), self.x, self.y)
        return [cell.format(x=x, y=y) for cell, x, y in places]


@dataclass(frozen=True, eq=False)  # compared by identity, which caches need
class Table:
    """One table.

    experiments: folders under results/runs; new runs go to the first, cells are filled from all.
    seeds: the seeds to train in place of the first ones, such as [0] of a table that only selects.
    scales: scale -> training configuration, in order of display. rows_of: scale -> labels of its
    rows, if it lacks some; the baseline is one of them. options: the options in which cells
    differ, by fairseq's dotted key, each with its default value; ``model.*.fidelity`` is the option
    of every part of an encoder-decoder model. same: options that all runs of one scale must share,
    by data set if columns have their own configurations.
    selected_by: a table that decides options of the rows, by the lowest (or highest) mean over its
    columns; ``selects`` names these options. Pages refuse rows with other values.
    fixed: ``side`` (encoder or decoder), ``encoding`` and ``attention`` of the half that all cells
    share, for encoder-decoder models (rows and columns describe the other half). pretrained: the
    table whose runs of seed 1 are fine-tuned. rates: scale -> learning rates to train every cell
    with, and to show; default: that of the configuration. A column with ``best_over:
    optimization.lr`` leaves a seed out until all of these rates have a run. page: the page
    that shows it; default: its own. headline: keys of the columns that the page shows,
    the index and the figure against the paper use, by default the first of each attention type; at
    most one of each, unless compare is ``columns``. compare: ``rows`` of a column with each other,
    or ``columns`` of a row with the first headline. maps: further pictures of the page. curves:
    true if the page shows the validation curves of the trainings.
    """

    name: str
    title: str
    text: str
    experiments: list[str]
    scales: dict[str, str]
    baseline: str
    better: str
    columns: list[Column]
    rows: list[Row]
    rows_of: dict[str, list[str]] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=list)
    options: Options = field(default_factory=dict)
    same: list[str] = field(default_factory=list)
    selected_by: str = ""
    selects: list[str] = field(default_factory=list)
    fixed: dict[str, str] = field(default_factory=dict)
    pretrained: str = ""
    rates: dict[str, list[float]] = field(default_factory=dict)
    headline: list[str] = field(default_factory=list)
    compare: str = "rows"
    page: str = ""
    maps: list[Map] = field(default_factory=list)
    curves: bool = False

    def at(self, scale: str) -> "Table":
        """Return the table with the columns and rows of one scale."""
        base, _ = parted(scale)
        columns = [column for column in self.columns if base in (column.scales or [base])]
        rows = [row for row in self.rows if row.label in self.rows_of.get(base, [row.label])]
        # A scale may lack the split of a headline column.
        headline = [key for key in self.headlines() if key in {c.key for c in columns}]
        parts = {"columns": columns, "rows": rows, "headline": headline}
        return dataclasses.replace(self, **parts)

    def with_scales(self, scales: Iterable[str]) -> "Table":
        """Return the table with those of ``scales`` that are its own in another precision."""
        own = {scale: self.scales.get(parted(scale)[0]) for scale in scales}
        known = {scale: config for scale, config in own.items() if config is not None}
        return dataclasses.replace(self, scales=self.scales | known)

    def rates_at(self, scale: str, of_column: Sequence[float]) -> list[float]:
        """Return the rates of a column, or those of the table; empty: the configuration's."""
        return list(of_column) or self.rates.get(parted(scale)[0], [])

    def headlines(self) -> list[str]:
        """Return ``headline``, or by default the first column of each attention type."""
        # Reversed, so that the first column of each type stays.
        first = {column.attention: column.key for column in reversed(self.columns)}
        return self.headline or [first[kind] for kind in (*ATTENTION, ANY) if kind in first]

    def column(self, key: str) -> Column:
        """Return the column ``key``. Raises: ValueError if there is none."""
        return _named(self.columns, "key", key, self.name)

    def row(self, label: str) -> Row:
        """Return the row ``label``. Raises: ValueError if there is none."""
        return _named(self.rows, "label", label, self.name)


def load_tables(folder: Path) -> list[Table]:
    """Return every table of ``folder``: numbered ones first, then the others by name."""
    return sorted((load_table(path) for path in folder.glob("*.yaml")), key=_order)


def load_table(path: Path) -> Table:
    """Read and check one table. Raises: ValueError, which names the file and the error."""
    try:
        content = {"name": path.stem, **yaml.safe_load(path.read_text(encoding="utf-8"))}
        columns = repeated(content.get("columns", []))
        usual = {"better": content.get("better", "")}
        content["columns"] = _by_attention([Column(**{**usual, **each}) for each in columns])
        content["rows"] = [Row(**row) for row in content.get("rows", [])]
        content["maps"] = [Map(**each) for each in content.get("maps", [])]
        table = Table(**content)
        _check(table)
    except (KeyError, TypeError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {error}") from error
    return table


def repeated(columns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return ``columns`` with each one that has ``for`` repeated for all its values.

    ``for`` maps names to their values, either a list or a mapping of values to titles. The column
    is repeated for every combination; the last name changes fastest. In its texts, ``{name}``
    stands for the value and ``{name title}`` for its title::

        - for: {attention: [linear, softmax], task: {copy: copy, mqar: MQAR}, length: [1, 2]}
          key: "{attention}-{task}-{length}x"
          title: "{task title} {length}x"
          attention: "{attention}"
    """
    return [single for column in columns for single in _repeat(dict(column))]


def _repeat(column: dict[str, Any]) -> list[dict[str, Any]]:
    if "for" not in column:
        return [column]
    choices = []
    for name, values in column.pop("for").items():
        titles = values if isinstance(values, dict) else {value: value for value in values}
        choices.append([{name: value, f"{name} title": title} for value, title in titles.items()])
    repeated = []
    for combination in itertools.product(*choices):
        texts = {}
        for choice in combination:
            texts |= choice
        repeated.append(_filled(column, texts))
    return repeated


def _filled(content: Any, texts: dict[str, Any]) -> Any:
    """Return ``content`` with the names in its strings replaced."""
    if isinstance(content, dict):
        return {key: _filled(value, texts) for key, value in content.items()}
    if isinstance(content, list):
        return [_filled(item, texts) for item in content]
    if not isinstance(content, str):
        return content
    return content.format_map(texts)


def _by_attention(columns: list[Column]) -> list[Column]:
    """Put the columns of one attention type together; the type that comes first stays first."""
    kinds = list(dict.fromkeys(column.attention for column in columns))
    # sorted is stable: columns of one type keep their order.
    return sorted(columns, key=lambda column: kinds.index(column.attention))


def short(option: str) -> str:
    """Return an option's name on the command line, without dashes before it.

    >>> short("model.encoder.attention_normalizer"), short("model.*.fidelity"), short("task._name")
    ('encoder-attention-normalizer', 'fidelity', 'task')
    """
    section, *parts = option.split(".")
    parts = [section] if parts == ["_name"] else [part for part in parts if part != "*"]
    return "-".join(parts).replace("_", "-")


def file_name(name: str) -> str:
    """Replace characters other than letters, digits, ``_`` and ``.=-`` by ``_`` for a file name."""
    return re.sub(r"[^\w.=-]", "_", name)


def unambiguous(name: str) -> str:
    """As :func:`file_name`; if that replaces characters, with a digest of ``name`` at its end.

    Two names never have the same file: ``64,128`` and ``64_128`` do not.
    """
    plain = file_name(name)
    return plain if plain == name else f"{plain}-{digest_of_text(name)}"


def digest_of_text(text: str) -> str:
    """Return eight characters for a file name that stand for a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _named(items: list[Any], attribute: str, name: str, table: str) -> Any:
    """Return the row or column of this name.

    Raises: ValueError, which lists the names, if there is none.
    """
    for item in items:
        if getattr(item, attribute) == name:
            return item
    known = "; ".join(getattr(item, attribute) for item in items)  # labels may have commas
    kind = type(items[0]).__name__.lower()
    raise ValueError(f"table {table} has no {kind} {name!r}; it has {known}")


def _check(table: Table) -> None:
    """Raise ValueError for the first fault of a table."""
    for fault in _faults(table):
        raise ValueError(fault)
    keys = [table.headline, *(c.mean_of for c in table.columns), *(r.without for r in table.rows)]
    keys += [row.method for row in table.rows if isinstance(row.method, dict)]
    for key in itertools.chain(*keys):
        table.column(key)
    of_columns = itertools.chain(*(column.rows for column in table.columns))
    for label in [table.baseline, *itertools.chain(*table.rows_of.values()), *of_columns]:
        table.row(label)


def _faults(table: Table) -> Iterator[str]:
    """Yield what would train or show other cells than the file seems to say."""
    yield from _faults_of_names(table)
    yield from _faults_of_attention(table)
    yield from _faults_of_choices(table)
    yield from _faults_of_configs(table)


def _faults_of_names(table: Table) -> Iterator[str]:
    """Yield names that occur twice, as files or as keys, and options without a usual value."""
    files = [file_name(row.label) for row in table.rows]
    # Labels that differ in punctuation only would share a file name.
    for names in (files, [column.key for column in table.columns]):
        for twice in sorted({name for name in names if names.count(name) > 1}):
            yield f"two rows or columns have the name {twice}: rename one of them"
    for part in [*table.rows, *table.columns]:
        # Without a usual value the runs of other rows could not be told apart.
        if unknown := sorted(part.overrides.keys() - table.options.keys()):
            yield f"the override {', '.join(unknown)} has no usual value in options"


def _faults_of_attention(table: Table) -> Iterator[str]:
    """Yield attention types that do not exist, and rows with two where a column takes any."""
    of_rows = itertools.chain(*(row.attention for row in table.rows))
    of_columns = {column.attention for column in table.columns}
    # Patterns name several types: linear,linear,softmax.
    for value in [*itertools.chain(*map(patterns.values, of_rows)), *(of_columns - {ANY})]:
        if value not in ATTENTION:
            yield f"attention must be {' or '.join(ATTENTION)}, not {value!r}"
    for row in table.rows:
        if ANY in of_columns and len(row.attention) != 1:
            yield f"row {row.label} needs one attention type, for the columns with attention {ANY}"


def _faults_of_choices(table: Table) -> Iterator[str]:
    """Yield directions and scales that do not exist."""
    for value in [table.better, *(column.better for column in table.columns)]:
        if value not in BETTER:
            yield f"better must be {' or '.join(BETTER)}, not {value!r}"
    for scale in itertools.chain(table.rows_of, *(column.scales for column in table.columns)):
        if scale not in table.scales:
            yield f"there is no scale {scale}; there are {', '.join(table.scales)}"


def _faults_of_configs(table: Table) -> Iterator[str]:
    """Yield columns with the runs of another column, but another configuration."""
    configs: dict[str, str] = {}
    for column in (column for column in table.columns if not column.mean_of):
        cell = str((column.scales, column.attention, column.dataset, column.overrides))
        if configs.setdefault(cell, column.config) != column.config:
            yield f"column {column.key} has the runs of another one, but another config"


def _order(table: Table) -> tuple[bool, int, str]:
    # table10 would come before table2 as text.
    number = re.fullmatch(r"table(\d+)", table.name)
    return (number is None, int(number[1]) if number else 0, table.name)
