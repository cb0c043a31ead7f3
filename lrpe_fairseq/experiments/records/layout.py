"""Read and check the layouts of tables: ``configs/tables/*.yaml``.

A table has rows and columns. A row selects an encoding and changed options; a column selects the
attention type and a field of the run file. A run fills a cell if it has the cell's encoding and
attention and if every option that the table names (``options``, changed by the ``overrides`` of row
and column) has the cell's value in the run's ``config``.
"""

import dataclasses
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lrpe_fairseq.experiments.records import repeated

Options = dict[str, Any]
ATTENTION = ("linear", "softmax")
HALVES = ("encoder", "decoder")
PARTS = (*HALVES, "cross")
"""The attention of an encoder-decoder model: self-attention of both, and cross-attention."""
COMPARE = ("rows", "columns")
BETTER = ("lower", "higher")
SELECTION = {"split", "protocol", "metric", "better"}


@dataclass(frozen=True)
class Column:
    """One column, and the field of the run file that it shows.

    A file may write several columns at once (:mod:`.repeated`).
    key: its name in ``method``. title: its heading. attention: ``linear`` or
    ``softmax``. metric, with split and protocol: a number of the run's ``metrics``; without
    them: a field of the run, such as ``tokens_per_second``. dataset: only runs on this data set
    (for columns that differ in it); ``reverse`` also stands for ``reverse-small`` at scale small.
    config: a training configuration in place of the scale's; the column then names its data set.
    scales: the scales with this column, for example those whose data have the split; default all.
    overrides: options that differ. relative: as a fraction of the baseline row. best_over: an
    option; of each seed's runs that differ in it only the best counts. best_by: split, protocol,
    metric and ``better`` of the number that selects it, instead of the column's own metric. rates:
    learning rates instead of the table's. mean_of: keys of the columns that this one averages,
    instead of a metric. paper: the published cell: ``file`` and the values of its columns.
    comparable: false if the published number is of another or unknown measure; the page then
    leaves it out.
    better: ``lower`` or ``higher``; :func:`load_table` sets that of the table by default.
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
    overrides: Options = field(default_factory=dict)
    relative: bool = False
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

    label: its name, also on the command line. encoding: our public name. attention: the types
    with cells in this row. overrides: options that differ. without: keys of columns
    without a cell in this row. method: its label in the published table, one for all columns or by
    column key; without it there is no published number.
    paper: further columns of the published cell, with their values.
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
        return column.attention in self.attention and column.key not in self.without


@dataclass(frozen=True)
class Table:
    """One table.

    experiments: folders under results/runs; new runs go to the first, cells are filled from all.
    scales: scale -> training configuration, in order of display. rows_of: scale -> labels of its
    rows, if it lacks some; the baseline is one of them. options: the options in which cells
    differ, by fairseq's dotted key, each with its default value; ``model.*.fidelity`` is the option
    of every part of an encoder-decoder model. same: options that all runs of one scale must share,
    by data set if columns have their own configurations.
    fixed: ``side`` (encoder or decoder), ``encoding`` and ``attention`` of the half that all cells
    share, for encoder-decoder models (rows and columns describe the other half). pretrained: the
    table whose runs of seed 1 are fine-tuned. rates: scale -> learning rates to train every cell
    with, and to show; default: that of the configuration. A column with ``best_over:
    optimization.lr`` leaves a seed out until all of these rates have a run. page: the page
    that shows it; default: its own. headline: keys of the columns that the page shows,
    the index and the figure against the paper use, by default the first of each attention type; at
    most one of each, unless compare is ``columns``. compare: ``rows`` of a column with each other,
    or ``columns`` of a row with the first headline.
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
    options: Options = field(default_factory=dict)
    same: list[str] = field(default_factory=list)
    fixed: dict[str, str] = field(default_factory=dict)
    pretrained: str = ""
    rates: dict[str, list[float]] = field(default_factory=dict)
    headline: list[str] = field(default_factory=list)
    compare: str = "rows"
    page: str = ""

    def at(self, scale: str) -> "Table":
        """Return the table with the columns and rows of one scale."""
        columns = [column for column in self.columns if scale in (column.scales or [scale])]
        rows = [row for row in self.rows if row.label in self.rows_of.get(scale, [row.label])]
        headline = [key for key in self.headlines() if key in {c.key for c in columns}]
        parts = {"columns": columns, "rows": rows, "headline": headline}
        return dataclasses.replace(self, **parts)

    def rates_at(self, scale: str, own: Sequence[float]) -> list[float]:
        """Return the rates of a column, or those of the table; empty: the configuration's."""
        return list(own) or self.rates.get(scale, [])

    def has_configs(self) -> bool:
        """True if a column has its own configuration."""
        return any(column.config for column in self.columns)

    def shows(self, column: Column, dataset: str, scale: str) -> bool:
        """True if ``column`` shows runs on ``dataset`` at ``scale``.

        A column without a data set shows all but those of the columns that have a configuration.
        """
        if not column.dataset:
            return dataset not in {other.dataset for other in self.columns if other.config}
        return column.dataset in (dataset, dataset.removesuffix(f"-{scale}"))

    def headlines(self) -> list[str]:
        """Return ``headline``, or by default the first column of each attention type."""
        first = {column.attention: column.key for column in reversed(self.columns)}
        return self.headline or [first[kind] for kind in ATTENTION if kind in first]

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
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(given, dict):
            raise ValueError("a table holds keys and values")
        content = {"name": path.stem, **given}
        columns = repeated.spelled_out(content.get("columns", []))
        usual = {"better": content.get("better", "")}
        content["columns"] = _by_attention([build(Column, {**usual, **each}) for each in columns])
        content["rows"] = [build(Row, row) for row in content.get("rows", [])]
        table = build(Table, content)
        _check(table)
    except (ValueError, TypeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {error}") from error
    return table


def _by_attention(columns: list[Column]) -> list[Column]:
    """Put the columns of one attention type together; the type that comes first stays first."""
    kinds = list(dict.fromkeys(column.attention for column in columns))
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


def build(kind: Any, content: Options) -> Any:
    """Return ``content`` as a ``kind``. Raises: ValueError for a missing or unknown key."""
    fields = {f.name: f for f in dataclasses.fields(kind)}
    unknown = sorted(set(content) - set(fields))
    if unknown:
        raise ValueError(f"a {kind.__name__.lower()} has no key {', '.join(unknown)}")
    required = [n for n, f in fields.items() if _required(f)]
    missing = [n for n in required if n not in content]
    if missing:
        raise ValueError(f"a {kind.__name__.lower()} lacks the key {', '.join(missing)}")
    return kind(**content)


def _required(f: Any) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def _named(items: list[Any], attribute: str, name: str, table: str) -> Any:
    for item in items:
        if getattr(item, attribute) == name:
            return item
    known = "; ".join(getattr(item, attribute) for item in items)  # labels may have commas
    kind = type(items[0]).__name__.lower()
    raise ValueError(f"table {table} has no {kind} {name!r}; it has {known}")


def _check(table: Table) -> None:
    _check_unique([row.label for row in table.rows])
    _check_file_names([row.label for row in table.rows])
    _check_unique([column.key for column in table.columns])
    _check_overrides(table)
    for scale in itertools.chain(table.rows_of, *(column.scales for column in table.columns)):
        if scale not in table.scales:
            raise ValueError(f"there is no scale {scale}; there are {', '.join(table.scales)}")
    for scale, labels in table.rows_of.items():
        if table.baseline not in labels:
            raise ValueError(f"rows_of {scale} lacks the baseline {table.baseline}")
    for better in (table.better, *(column.better for column in table.columns)):
        if better not in BETTER:
            raise ValueError(f"better must be lower or higher, not {better!r}")
    for label in [table.baseline, *itertools.chain(*table.rows_of.values())]:
        table.row(label)
    for row in table.rows:
        _check_row(table, row)
    for column in table.columns:
        _check_column(table, column)
    _check_configs(table)
    if table.fixed and set(table.fixed) != {"side", "encoding", "attention"}:
        raise ValueError("fixed needs side, encoding and attention, and nothing else")
    for key in table.headline:
        table.column(key)
    if table.compare not in COMPARE:
        raise ValueError(f"compare must be rows or columns, not {table.compare!r}")


def _check_unique(names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)} stands there twice")


def _check_file_names(labels: list[str]) -> None:
    homes: dict[str, str] = {}
    for label in labels:
        other = homes.setdefault(file_name(label), label)
        if other != label:
            raise ValueError(
                f"the labels {other!r} and {label!r} have one file name, {file_name(label)}: "
                "rename one of them"
            )


def _check_overrides(table: Table) -> None:
    for part in [*table.rows, *table.columns]:
        unknown = sorted(set(part.overrides) - set(table.options))
        if unknown:
            raise ValueError(f"the override {', '.join(unknown)} has no usual value in options")


def _check_row(table: Table, row: Row) -> None:
    unknown = [name for name in row.attention if name not in ATTENTION]
    if unknown or not row.attention:
        raise ValueError(f"row {row.label} needs attention types out of {', '.join(ATTENTION)}")
    for key in (*row.without, *(row.method if isinstance(row.method, dict) else [])):
        table.column(key)


def _check_column(table: Table, column: Column) -> None:
    if column.attention not in ATTENTION:
        raise ValueError(f"column {column.key} needs attention {' or '.join(ATTENTION)}")
    if bool(column.metric) == bool(column.mean_of):
        raise ValueError(f"column {column.key} needs either a metric or mean_of")
    if bool(column.split) != bool(column.protocol):
        raise ValueError(f"column {column.key} needs split and protocol together, or neither")
    for key in column.mean_of:
        table.column(key)
    if not (column.comparable or column.paper or column.mean_of):
        raise ValueError(f"column {column.key} has no published number: leave out comparable")
    if column.best_by and not (column.best_over and set(column.best_by) == SELECTION):
        raise ValueError(
            f"best_by of column {column.key} needs best_over, and the keys "
            f"{', '.join(sorted(SELECTION))}"
        )
    if column.best_by and column.best_by["better"] not in BETTER:
        raise ValueError(f"better in best_by of column {column.key} must be lower or higher")


def _check_configs(table: Table) -> None:
    """Refuse columns with their own configurations if a run does not tell which one it fills."""
    if not table.has_configs():
        return
    for scale in table.scales:
        homes: dict[str, Column] = {}
        for column in table.at(scale).columns:
            if not column.mean_of:
                _check_config(column, homes)


def _check_config(column: Column, homes: dict[str, Column]) -> None:
    """Compare the configuration of a column with those of equal columns before it, ``homes``."""
    if column.config and not column.dataset:
        raise ValueError(f"column {column.key} needs a dataset, because it names its own config")
    place = str((column.attention, column.dataset, sorted(column.overrides.items())))
    other = homes.setdefault(place, column)
    if other.config != column.config:
        raise ValueError(
            f"columns {other.key} and {column.key} have different configs, but nothing "
            "distinguishes their runs: give them other datasets or overrides"
        )


def _order(table: Table) -> tuple[bool, int, str]:
    number = re.fullmatch(r"table(\d+)", table.name)
    return (number is None, int(number[1]) if number else 0, table.name)
