"""Evaluate one checkpoint by hand: command line, run file and printed metrics."""

import argparse
import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lrpe_fairseq.experiments.data import folders
from lrpe_fairseq.experiments.data.corpus import digest
from lrpe_fairseq.experiments.records import bases, checkpoints
from lrpe_fairseq.experiments.records.files import ROOT, require_writable
from lrpe_fairseq.experiments.records.runs import Run, environment, read_run, write_run
from lrpe_fairseq.experiments.runner import parts, recording
from lrpe_fairseq.experiments.runner.devices import Devices
from lrpe_fairseq.experiments.runner.processes import Children, run_child
from lrpe_fairseq.experiments.runner.recording import described_by

CHECKPOINT = "checkpoint"
"""Field of a run file: the sha256 of the evaluated checkpoint."""


def arguments(script: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with the options of all evaluations: checkpoint, data, splits, out."""
    parser = argparse.ArgumentParser(prog=script, description=description.split("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("data", type=Path, help="a folder of data-prep, or its bin")
    parser.add_argument("--splits", nargs="+", default=["valid", "test"], metavar="SPLIT")
    parser.add_argument("--out", type=Path, help="the run file (default: beside the checkpoint)")
    return parser


def parsed(parser: argparse.ArgumentParser, given: list[str] | None) -> argparse.Namespace:
    """Return the options, with ``out``. Raises: UserError if that cannot be written."""
    options = parser.parse_args(given)
    out = options.out or options.checkpoint.with_suffix(".json")
    if options.out or out.parent.is_dir():
        require_writable(out.parent, "--out")
    options.out = out
    return options


def data_folder(given: Path, preparation_of: Callable[[Path], list[str]]) -> Path:
    """Return the data folder that a script of data-prep made; its ``bin`` may be given instead.

    preparation_of: returns the script that prepares a folder. Raises: UserError if the folder
        contains no prepared data or differs from its manifest.
    """
    data = given.parent if given.name == "bin" else given
    folders.require(data, preparation_of(data))
    folders.verify(data)
    return data


def run(command: Sequence[str], log: Path) -> None:
    """Run an evaluation from the repository root. Raises: RunFailed with its last line."""
    with without_colons(command) as words:
        run_child(Children(), words, log, Devices(), None)


@contextlib.contextmanager
def without_colons(command: Sequence[str]) -> Iterator[list[str]]:
    """Replace paths that contain a colon by links in ``command``.

    fairseq splits a path at colons. Run folders of free forms of encodings, such as
    ``lrpe:identity:rotation``, have colons in their names.
    """
    with tempfile.TemporaryDirectory(prefix="lrpe-") as folder:
        words = list(command)
        for index, word in enumerate(words):
            target = ROOT / word
            if ":" in word and target.exists():
                link = Path(folder, f"{index}{target.suffix}")
                link.symlink_to(target)
                words[index] = str(link)
        yield words


def record(
    checkpoint: Path, data: Path, metrics: Run, protocol: Run, evaluated: Path | None = None
) -> Run:
    """Return the run file of an evaluation; its training fields are from checkpoint and folder.

    evaluated: the file with the weights, if it is not ``checkpoint``.
    """
    state = checkpoints.load(checkpoint)
    return {
        CHECKPOINT: digest(evaluated or checkpoint),
        "experiment": bases.BY_HAND,
        "scale": bases.BY_HAND,
        "dataset": folders.dataset_name(data),
        **described_by(state),
        "metrics": metrics,
        "protocol": protocol,
        "tokens_per_second": _speed(state),
        "wall_seconds": checkpoints.seconds(state),
        "data": folders.checksums(data, set(metrics)),
        **environment(),
        **parts.provenance(checkpoint.absolute().parent.parent),
    }


def report(run: Run, out: Path, data: Path) -> None:
    """Print the metrics of a run file and write it, with those of ``out`` that it lacks."""
    for split, by_protocol in run["metrics"].items():
        for protocol, measured in by_protocol.items():
            numbers = ", ".join(f"{name} {value:,.6g}" for name, value in measured.items())
            print(f"{split}, {protocol}: {numbers}")
    with _alone_in(out.parent):
        write_run(out, _with_earlier(out, run, data))
    print(f"written to {out}")


def _with_earlier(out: Path, run: Run, data: Path) -> Run:
    """Return ``run`` with the evaluations that ``out`` has of the same checkpoint and data."""
    try:
        known = read_run(out)
    except (OSError, ValueError):
        return run
    now = folders.checksums(data, known.get("data", {}))
    if known.get(CHECKPOINT) != run[CHECKPOINT] or known.get("data") != now:
        print(f"{out} had results of another checkpoint or other data, which are replaced")
        return run
    kept = _not_replaced(known, run)
    return recording.with_evaluations(kept, run, run["data"]) if kept["metrics"] else run


def _not_replaced(known: Run, run: Run) -> Run:
    """Return ``known`` without the evaluations that ``run`` has or whose protocol it changes."""
    found: Run = {}
    for split, by_protocol in known["metrics"].items():
        for name, measured in by_protocol.items():
            said = known["protocol"][name]
            if run["protocol"].get(name, said) != said:
                print(f"{split}, {name}: the earlier result is of another protocol: {said}")
            elif name not in run["metrics"].get(split, {}):
                found.setdefault(split, {})[name] = measured
    kept = {name: known["protocol"][name] for own in found.values() for name in own}
    return {**known, "metrics": found, "protocol": kept}


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Let other evaluations wait until this one has read and written a run file in ``folder``."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _speed(state: dict[str, Any]) -> float:
    """Return training tokens per second since the start of the checkpoint's epoch."""
    meters = {name: values for _, name, _, values in state["extra_state"]["metrics"]["train"]}
    return round(meters["wps"]["n"] / meters["wps"]["init"], 1)
