"""Train and evaluate every cell of a table: ``scripts/run_table.sh``.

The cells of ``configs/tables/<table>.yaml`` become runs at
``results/runs/<experiment>/<scale>-<row>-<attention>[-<what differs>]-seed<n>.json``; they work
under ``runs/``.
"""

import argparse
import dataclasses
import itertools
import os
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lrpe_fairseq.experiments.families.finetuning import FinetuningRun, Source, finetuning_runs
from lrpe_fairseq.experiments.families.lm import LMRun
from lrpe_fairseq.experiments.families.pretraining import PretrainingRun
from lrpe_fairseq.experiments.families.translation import Half, TranslationRun
from lrpe_fairseq.experiments.records import checkpoints, sweeps
from lrpe_fairseq.experiments.records.checkout import require_checkout
from lrpe_fairseq.experiments.records.layout import Column, Row, Table, load_table
from lrpe_fairseq.experiments.report import tables
from lrpe_fairseq.experiments.runner import schedule, slurm
from lrpe_fairseq.experiments.runner.training import (
    CONFIGS,
    ROOT,
    Devices,
    RunFailed,
    TrainingRun,
    clock,
    prepare_data,
)

OPTION_KEYS = {  # an option of a table -> fairseq's configuration
    "attention-normalizer": "model.attention_normalizer",
    "fidelity": "model.fidelity",
    "encoder-attention-normalizer": "model.encoder.attention_normalizer",
    "encoder-fidelity": "model.encoder.fidelity",
    "decoder-attention-normalizer": "model.decoder.attention_normalizer",
    "clip-norm": "optimization.clip_norm",
    "max-update": "optimization.max_update",
    "bf16": "common.bf16",
    "fp16": "common.fp16",
    "task": "task._name",
    "memory-length": "model.memory_length",
    "no-token-positional-embeddings": "model.no_token_positional_embeddings",
}
KINDS = {  # task of a configuration -> how its runs are trained and measured
    "language_modeling": LMRun,
    "masked_lm": PretrainingRun,
    "sentence_prediction": FinetuningRun,
    "translation": TranslationRun,
}
SEEDS = 2
SITE_OPTIONS = {"partition": str, "time": str, "gpus_per_node": int, "nodes": int}


@dataclass(frozen=True)
class Cell:
    """One thing to train: a row under an attention type, with the options that differ."""

    label: str
    encoding: str
    attention: str
    changed: tuple[tuple[str, Any], ...]
    dataset: str  # where the columns are data sets; otherwise that of the configuration
    name: str  # of files: ``Type2-linear``; what its column changes is spelled out after it

    @property
    def recipe(self) -> tuple[Any, ...]:
        """What two cells of different tables must share for a run to serve both."""
        return self.encoding, self.attention, self.changed, self.dataset


def cells(table: Table) -> list[Cell]:
    """The cells of ``table`` that need a training of their own, row by row."""
    found: dict[Cell, None] = {}
    for row in table.rows:
        for column in table.columns:
            if column.attention in row.attention and not column.mean_of:
                found[_cell(table, row, column)] = None
    return list(found)


def runs(table: Table, scale: str, seeds: Sequence[int]) -> list[TrainingRun]:
    """Every run of ``table`` at ``scale``, seed by seed.

    A cell that another table of ``table.experiments`` has too is that table's run.

    Raises: ValueError if the table has no such scale, or no family of models trains it.
    """
    table, *others = (t.at(scale) for t in (table, *map(load_named, table.experiments[1:])))
    homes = {cell.recipe: (table, cell) for cell in cells(table)}
    for other in others:
        homes |= {cell.recipe: (other, cell) for cell in cells(other) if cell.recipe in homes}
    config = _config(table, scale)
    make = _finetuning if table.pretrained else _run
    made = (make(*home, scale, config, seed) for seed in seeds for home in homes.values())
    named = {run.name: run for run in itertools.chain.from_iterable(made)}
    return list(named.values())  # columns that tell rates apart share their runs


def load_named(name: str) -> Table:
    """``configs/tables/<name>.yaml``. Raises: ValueError, naming those that there are."""
    require_checkout()
    folder = ROOT / "configs" / "tables"
    if not (folder / f"{name}.yaml").exists():
        known = ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))
        raise ValueError(f"there is no table {name}; there are {known}")
    return load_table(folder / f"{name}.yaml")


def main(arguments: list[str] | None = None) -> int:
    """Run a table, submit it, or show what would be run or how far it is; the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    options, begun = _parse(given), time.monotonic()
    try:
        chosen = _select(options)
        if options.status or options.dry_run:
            return _show(chosen, options)
        for data in dict.fromkeys(run.data for run in chosen):
            prepare_data(data, options.source)
        if options.slurm:
            return _submit(chosen, options, given)
        if options.array_task is not None:
            return _run_task(chosen, options)
        return _run_here(chosen, options, begun)
    except (ValueError, OSError, RunFailed) as error:
        print(f"run_table: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _run_here(chosen: Sequence[TrainingRun], options: argparse.Namespace, begun: float) -> int:
    """Run ``chosen`` on this machine and render the tables; keep the time of a whole table."""
    events = schedule.Events(ROOT / "runs" / options.table / "events.log")
    devices = schedule.shares(min(options.jobs, len(chosen)), options.gpus)
    whole = not (options.rows or options.attention) and sweeps.untouched(chosen)
    failed = schedule.Schedule(chosen, devices, events).run()
    failed = tables.main([]) or failed
    seconds = time.monotonic() - begun
    events.say(f"{options.table}: {clock(seconds)} in all")
    if whole and not failed:
        sweeps.write_sweep(
            ROOT / "results" / "sweeps",
            table=options.table,
            scale=options.scale,
            seeds=options.seeds,
            trainings=len(chosen),
            jobs=len(devices),
            wall_seconds=round(seconds, 1),
        )
    return 1 if failed else 0


def _run_task(chosen: Sequence[TrainingRun], options: argparse.Namespace) -> int:
    """Run one element of a Slurm array with all that Slurm gave it; a later job renders."""
    run = chosen[options.array_task]
    events = schedule.Events(run.folder / "events.log")
    cores = int(os.environ.get("SLURM_CPUS_PER_TASK", "1"))  # not every cluster binds to them
    devices = Devices(threads=cores, nodes=options.nodes or 1)
    return 1 if schedule.Schedule([run], [devices], events).run() else 0


def _submit(chosen: Sequence[TrainingRun], options: argparse.Namespace, given: list[str]) -> int:
    tasks = [index for index, run in enumerate(chosen) if not run.finished()]
    if not tasks:
        print("every run is finished already")
        return tables.main([])
    settings = {name: getattr(options, name) for name in SITE_OPTIONS}
    site = slurm.load_site(ROOT / "configs" / "slurm.yaml", settings)
    own = [word for word in _without(given, SITE_OPTIONS) if word != "--slurm"]
    job = slurm.submit(ROOT, options.table, [*own, "--nodes", str(site.nodes)], tasks, site)
    print(
        f"job array {job}: {len(tasks)} of {len(chosen)} runs; see how far they are with --status"
    )
    return 0


def _without(given: Sequence[str], names: Sequence[str]) -> list[str]:
    """A command line without these options and their values."""
    kept, words = [], iter(given)
    for word in words:
        name, equals, _ = word.partition("=")
        if name.removeprefix("--").replace("-", "_") not in names:
            kept.append(word)
        elif not equals:
            next(words, None)
    return kept


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/run_table.sh", description=__doc__.split("\n")[0], allow_abbrev=False
    )
    add = parser.add_argument
    add("table", help="a file of configs/tables, without .yaml")
    add("--rows", nargs="+", metavar="ROW", help="labels; all rows if left out")
    add("--attention", nargs="+", metavar="TYPE", choices=("linear", "softmax"))
    add("--seeds", type=int, default=SEEDS, metavar="N", help="seeds 1 to N")
    add("--scale", default="small", help="small (the default), paper or another of the table's")
    add("--jobs", type=int, default=1, metavar="J", help="runs at a time")
    add("--gpus", type=int, metavar="G", help="GPUs for each run (default: one, or all for one)")
    add("--from", dest="source", type=Path, metavar="DIR", help="files to prepare the data from")
    add("--dry-run", action="store_true", help="print the training commands only")
    add("--status", action="store_true", help="say how far every run is")
    cluster = parser.add_argument_group("Slurm", "settings of your cluster: configs/slurm.yaml")
    cluster.add_argument("--slurm", action="store_true", help="submit the runs as one job array")
    for name, kind in SITE_OPTIONS.items():
        cluster.add_argument(f"--{name.replace('_', '-')}", type=kind)
    cluster.add_argument("--array-task", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _select(options: argparse.Namespace) -> list[TrainingRun]:
    table = load_named(options.table).at(options.scale)
    labels = [table.row(label).label for label in options.rows or [r.label for r in table.rows]]
    if options.seeds < 1 or options.jobs < 1:
        raise ValueError("--seeds and --jobs must be at least 1")
    wanted = _rows_only(table, labels)
    chosen = [
        run
        for run in runs(wanted, options.scale, range(1, options.seeds + 1))
        if run.attention_type in (options.attention or run.attention_type)
    ]
    if not chosen:
        raise ValueError(f"table {table.name} has no such cells")
    return chosen


def _rows_only(table: Table, labels: Sequence[str]) -> Table:
    rows = [row for row in table.rows if row.label in labels]
    return dataclasses.replace(table, rows=rows)


def _show(chosen: Sequence[TrainingRun], options: argparse.Namespace) -> int:
    """The command of every run, or the state of every run and how many are in each."""
    if options.dry_run:
        print(*(shlex.join(run.command()) for run in chosen), sep="\n")
        return 0
    states = {run.name: schedule.state(run) for run in chosen}
    for name, told in states.items():
        print(f"{name}: {told}")
    counts = Counter(re.match(r"[a-z ]*[a-z]", told)[0] for told in states.values())
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    return 0


def _cell(table: Table, row: Row, column: Column) -> Cell:
    options = {**table.options, **row.overrides, **column.overrides}
    changed = tuple(sorted((k, v) for k, v in options.items() if v != table.options[k]))
    named = [f"{k}={v}" for k, v in changed if k not in row.overrides]
    name = re.sub(r"[^\w.=-]", "_", "-".join([row.label, column.attention, *named]))
    return Cell(row.label, row.encoding, column.attention, changed, column.dataset, name)


def _config(table: Table, scale: str) -> Path:
    """The configuration of a scale."""
    if scale not in table.scales:
        raise ValueError(f"table {table.name} has no scale {scale}; it has {list(table.scales)}")
    path = ROOT / table.scales[scale]
    if not path.exists():
        raise ValueError(f"{table.scales[scale]} is not there")
    if path.parent.parent != CONFIGS or _task(path) not in KINDS:
        raise ValueError(f"{table.scales[scale]} is of none of the tasks {', '.join(KINDS)}")
    return path


def _task(config: Path) -> str:
    return OmegaConf.load(config).task._name


def _run(home: Table, cell: Cell, scale: str, config: Path, seed: int) -> list[TrainingRun]:
    name = f"{scale}-{cell.name}-seed{seed}"
    sides = {"fixed": Half(**home.fixed)} if home.fixed else {}
    run = KINDS[_task(config)](
        experiment=home.name,
        label=cell.label,
        config=config.stem,
        data=ROOT / Path(OmegaConf.load(config).task.data).parent,
        attention_type=cell.attention,
        position_encoding=cell.encoding,
        seed=seed,
        scale=scale,
        folder=ROOT / "runs" / home.name / name,
        result=ROOT / "results" / "runs" / home.name / f"{name}.json",
        overrides=tuple(f"{_key(option)}={_text(value)}" for option, value in cell.changed),
        evaluations=_shown(home),
        **sides,
    )
    return [run]


def _finetuning(home: Table, cell: Cell, scale: str, config: Path, seed: int) -> list[TrainingRun]:
    """The runs of a cell whose data set is a task of GLUE, one for each learning rate."""
    pretrained = ROOT / "runs" / home.pretrained / f"{scale}-{cell.label}-{cell.attention}-seed1"
    source = Source(
        pretrained / "checkpoints" / checkpoints.BEST,
        cell.label,
        cell.attention,
        cell.encoding,
    )
    tasks = [cell.dataset.removeprefix("glue-")]
    return finetuning_runs(source, config, scale, tasks, home.rates.get(scale, []), [seed])


def _shown(table: Table) -> tuple[tuple[str, str], ...]:
    """The (split, protocol) pairs that the columns of ``table`` show."""
    pairs = ((column.split, column.protocol) for column in table.columns if column.split)
    return tuple(dict.fromkeys(pairs))


def _key(option: str) -> str:
    if option not in OPTION_KEYS:
        raise ValueError(f"no key of fairseq's configuration is known for the option {option!r}")
    return OPTION_KEYS[option]


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    sys.exit(main())
