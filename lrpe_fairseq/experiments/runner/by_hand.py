"""Evaluate one checkpoint by hand: the command line, and the run file on screen and on disk."""

import argparse
import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lrpe_fairseq.experiments.data import checksums, folders
from lrpe_fairseq.experiments.records import checkpoints
from lrpe_fairseq.experiments.records.files import ROOT
from lrpe_fairseq.experiments.records.runs import Run, environment, write_run
from lrpe_fairseq.experiments.runner import parts
from lrpe_fairseq.experiments.runner.devices import Devices
from lrpe_fairseq.experiments.runner.processes import Children, run_child
from lrpe_fairseq.experiments.runner.recording import described_by


def arguments(script: str, description: str) -> argparse.ArgumentParser:
    """The options that all evaluations share: checkpoint, data, splits, out."""
    parser = argparse.ArgumentParser(prog=script, description=description.split("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("data", type=Path, help="a folder of data-prep, or its bin")
    parser.add_argument("--splits", nargs="+", default=["valid", "test"], metavar="SPLIT")
    parser.add_argument("--out", type=Path, help="the run file (default: beside the checkpoint)")
    return parser


def data_folder(given: Path, preparation_of: Callable[[Path], list[str]]) -> Path:
    """The folder of data-prep, also if its ``bin`` is given.

    preparation_of: what prepares a folder. Raises: UserError if nothing is prepared there, or if
        it is not what data-prep wrote.
    """
    data = given.parent if given.name == "bin" else given
    folders.require(data, preparation_of(data))
    checksums.verify(data)
    return data


def run(command: Sequence[str], log: Path) -> None:
    """Run an evaluation from the repository root. Raises: RunFailed with its last line."""
    with without_colons(command) as words:
        run_child(Children(), words, log, Devices(), None)


@contextlib.contextmanager
def without_colons(command: Sequence[str]) -> Iterator[list[str]]:
    """``command`` with links in place of files and folders that have a colon in their path.

    fairseq takes such a path for several paths. Free forms of encodings, as in
    ``lrpe:identity:rotation``, put colons into the names of run folders.
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


def record(checkpoint: Path, data: Path, metrics: Run, protocol: Run) -> Run:
    """The run file of an evaluation; checkpoint and run folder say all about the training."""
    state = checkpoints.load(checkpoint)
    return {
        "experiment": "by-hand",
        "scale": "by-hand",
        "dataset": folders.dataset_name(data),
        **described_by(state),
        "metrics": metrics,
        "protocol": protocol,
        "tokens_per_second": _speed(state),
        "wall_seconds": checkpoints.seconds(state),
        "data": checksums.checksums(data, set(metrics)),
        **environment(),
        **parts.provenance(checkpoint.absolute().parent.parent),
    }


def report(run: Run, out: Path) -> None:
    """Write the run file and print its metrics."""
    write_run(out, run)
    for split, by_protocol in run["metrics"].items():
        for protocol, measured in by_protocol.items():
            numbers = ", ".join(f"{name} {value:,.6g}" for name, value in measured.items())
            print(f"{split}, {protocol}: {numbers}")
    print(f"written to {out}")


def _speed(state: dict[str, Any]) -> float:
    """Training tokens per second since the epoch of the checkpoint began."""
    meters = {name: values for _, name, _, values in state["extra_state"]["metrics"]["train"]}
    return round(meters["wps"]["n"] / meters["wps"]["init"], 1)
