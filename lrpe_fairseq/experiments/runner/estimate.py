"""What the trainings of a table will take: ``scripts/run_table.sh TABLE --estimate``.

Each distinct cell trains a few updates on the devices that the table would use, without a
checkpoint and without validation; or, with ``--on v100x8``, the figures are arithmetic.
"""

import contextlib
import math
import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lrpe_fairseq.experiments.data import folders
from lrpe_fairseq.experiments.data.corpus import row_lengths
from lrpe_fairseq.experiments.records import fairseq_log
from lrpe_fairseq.experiments.records.console import format_duration
from lrpe_fairseq.experiments.records.files import ROOT, first_shard
from lrpe_fairseq.experiments.runner import arithmetic, identity
from lrpe_fairseq.experiments.runner.arithmetic import GB, Need
from lrpe_fairseq.experiments.runner.devices import Devices
from lrpe_fairseq.experiments.runner.training import TrainingRun

UPDATES = 20
WARM = 10
"""Updates that are not timed."""
MEASURED = (
    f"optimization.max_update={UPDATES}",
    "dataset.disable_validation=true",
    "checkpoint.no_save=true",
    "common.log_interval=1",
    "common.tensorboard_logdir=null",
)
OUT_OF_MEMORY = ("OutOfMemoryError", "out of memory", "DefaultCPUAllocator", "bad_alloc")


@dataclass(frozen=True)
class Line:
    """The estimate of one cell. need: None if it cannot be estimated; why: the reason in words."""

    run: TrainingRun
    trainings: int
    need: Need | None
    why: str = ""


def distinct(chosen: Sequence[TrainingRun]) -> list[tuple[TrainingRun, int]]:
    """Return one run for every cell, and the number of its trainings (of other seeds)."""
    cells: dict[tuple, list[TrainingRun]] = {}
    for run in chosen:
        own = run.config, run.data, run.attention_type, run.position_encoding, run.overrides
        cells.setdefault(own, []).append(run)
    return [(runs[0], len(runs)) for runs in cells.values()]


# --- by arithmetic -----------------------------------------------------------------------------


def by_arithmetic(chosen: Sequence[TrainingRun], on: str) -> int:
    """Print hours, memory and disk of ``chosen`` on devices such as v100x8; return the status.

    Raises: ValueError for devices that are not known.
    """
    name, devices = arithmetic.cards_of(on)
    lines = computed(chosen, on)
    print(
        f"Arithmetic, nothing is measured: peak figures of {devices} {name}; trainings take longer."
    )
    _print(lines, f"{devices} {name}", arithmetic.CARDS[name].memory)
    return 0


def computed(chosen: Sequence[TrainingRun], on: str) -> list[Line]:
    """Return the estimate of every distinct cell by arithmetic, on devices such as v100x8.

    Raises: ValueError for devices that are not known.
    """
    name, devices = arithmetic.cards_of(on)
    card = arithmetic.CARDS[name]
    return [_computed(*cell, card, devices) for cell in distinct(chosen)]


def _computed(run: TrainingRun, trainings: int, card: arithmetic.Card, devices: int) -> Line:
    """Return the estimate of a cell on as many of the devices as the runner would use."""
    try:
        words = words_of(run)
        options = identity.options(identity.resolved(run.settings()))
        if length := mean_length(run.data):
            options["task.tokens_per_sample"] = length
        need = arithmetic.need(options, words, card, run.equal_parts(devices))
    except ValueError as error:
        return Line(run, trainings, None, str(error))
    return Line(run, trainings, need)


def words_of(run: TrainingRun) -> int:
    """Return the number of entries of the dictionary of a run's data.

    Raises: ValueError if they are not known, with the command that prepares the data.
    """
    if folders.is_prepared(run.data):
        bin_dir = first_shard(run.data)
        # data of single sentences and pairs have a folder for each side
        for path in sorted([*bin_dir.glob("dict*.txt"), *bin_dir.glob("input0/dict.txt")]):
            return sum(1 for _ in path.open(encoding="utf-8")) + 4  # fairseq's own symbols
    if run.data.name in arithmetic.WORDS:
        return arithmetic.WORDS[run.data.name]
    script = run.preparation_of(run.data)
    how = f": .venv/bin/python {shlex.join(script)}" if script else ""
    raise ValueError(f"not known before the data are prepared{how}")


def mean_length(data: Path) -> int:
    """Return the mean tokens of a training sample of prepared sentences or pairs; 0 for others."""
    if not folders.is_prepared(data):
        return 0
    sides = (first_shard(data) / side / "train" for side in ("input0", "input1"))
    means = [row_lengths(side).mean() for side in sides if side.with_suffix(".idx").exists()]
    return math.ceil(sum(means))


# --- by measurement ----------------------------------------------------------------------------


def by_measurement(
    chosen: Sequence[TrainingRun], devices: Devices, say: Callable[[str], None]
) -> int:
    """Train :data:`UPDATES` updates of every distinct cell, one after another, and print.

    Returns: 1 if a cell failed for another reason than memory.
    """
    lines = []
    for run, trainings in distinct(chosen):
        say(f"{run.name}: {UPDATES} updates")
        part = run.usable(devices, say)
        lines.append(_measured(run, trainings, part))
    _print(lines, f"{devices.processes} processes of this machine", None)
    return int(any(line.need is None and line.why != "does not fit" for line in lines))


def _measured(run: TrainingRun, trainings: int, devices: Devices) -> Line:
    """Train a few updates of a run, and return what the whole run will take."""
    run.require_inputs()
    words = (*run.overrides, *MEASURED)
    with tempfile.TemporaryDirectory() as folder:
        short = replace(run, overrides=words, folder=Path(folder))
        command = devices.launch(short.command(devices.processes))
        failed, peak = run_with_peak(command, devices, short.log)
        if failed:
            said = fairseq_log.last_line(short.log)
            lost = any(word in said for word in OUT_OF_MEMORY) or failed == -signal.SIGKILL
            return Line(run, trainings, None, "does not fit" if lost else said)
        seconds = fairseq_log.seconds_per_update(short.log, WARM)
        taken = fairseq_log.peak_of_gpu(short.log) or peak
        parameters = 1e6 * (fairseq_log.million_parameters(short.log) or 0)
    options = identity.options(identity.resolved(run.settings()))
    kept = max(0, int(options.get("checkpoint.keep_interval_updates") or 0))
    disk = 0.0 if options.get("checkpoint.no_save") else 12 * parameters * (3 + kept)
    return Line(run, trainings, Need(seconds * run.max_update(), taken, disk))


def run_with_peak(command: list[str], devices: Devices, log: Path) -> tuple[int, float]:
    """Run a command; return its exit status and the most memory of one process, in bytes."""
    environment = {**os.environ, **devices.environment}
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=out, stderr=out, start_new_session=True
        )
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            raise
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, 1024.0 * usage.ru_maxrss


# --- the report --------------------------------------------------------------------------------


def _print(lines: Sequence[Line], where: str, limit: float | None) -> None:
    """Print a line for every cell, and the sum. limit: bytes of a device, or None."""
    names = [_cell_of(line.run) for line in lines]
    width = max(map(len, names))
    print(f"{'cell':{width}}  trainings  hours each  peak GB  checkpoints GB")
    for name, line in zip(names, lines, strict=True):
        if line.need is None:
            print(f"{name:{width}}  {line.trainings:9}  {line.why}")
            continue
        hours, peak, disk = line.need.seconds / 3600, line.need.memory / GB, line.need.disk / GB
        late = f"  does not fit {limit / GB:.0f} GB" if limit and line.need.memory > limit else ""
        print(f"{name:{width}}  {line.trainings:9}  {hours:10.3g}  {peak:7.3g}  {disk:14.3g}{late}")
    known = [line for line in lines if line.need]
    hours = sum(line.need.seconds * line.trainings for line in known) / 3600
    disk = sum(line.need.disk * line.trainings for line in known) / GB
    trainings = sum(line.trainings for line in known)
    unknown = sum(line.trainings for line in lines) - trainings
    others = f"; {unknown} other trainings are not known" if unknown else ""
    print(
        f"{trainings} trainings, one after another on {where}: {hours:.3g} hours "
        f"({hours / 24:.3g} days), checkpoints of all together {disk:.3g} GB, "
        f"data {_bytes_of(lines) / GB:.3g} GB{others}"
    )


def _cell_of(run: TrainingRun) -> str:
    """Return the name of a run without its seed."""
    return run.folder.name.removesuffix(f"-seed{run.seed}")


def _bytes_of(lines: Iterable[Line]) -> float:
    """Return the bytes of the prepared data of all lines."""
    homes = {line.run.data for line in lines if folders.is_prepared(line.run.data)}
    return float(sum(p.stat().st_size for home in homes for p in home.rglob("*") if p.is_file()))


def time_left(chosen: Sequence[TrainingRun]) -> str:
    """Return the time that unfinished runs need one after another, from the logs of ``chosen``.

    A run that has not begun counts with the mean speed of the others; without any log the answer
    says so. It is empty if nothing is left.
    """
    left, speeds = [], []
    for run in chosen:
        update, total = run.progress()
        seconds = fairseq_log.seconds_per_update(run.log, 0)
        if seconds is not None:
            speeds.append(seconds)
        if not run.finished():
            left.append((max(0, total - update), seconds))
    if not left:
        return ""
    if not speeds:
        return "time left: not known before the first updates; see --estimate"
    usual = sum(speeds) / len(speeds)
    total = sum(updates * (usual if own is None else own) for updates, own in left)
    return f"time left: {format_duration(total)} of training, one after another"
