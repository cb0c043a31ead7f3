"""What the scripts share that evaluate one checkpoint: its run file, on the screen and on disk."""

import argparse
from pathlib import Path
from typing import Any

from lrpe_fairseq.experiments.records import checkpoints
from lrpe_fairseq.experiments.records.runs import Run, environment, write_run
from lrpe_fairseq.experiments.runner import training


def arguments(script: str, description: str) -> argparse.ArgumentParser:
    """The command line that they share: checkpoint, data, splits, out."""
    parser = argparse.ArgumentParser(prog=script, description=description.split("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("data", type=Path, help="a folder of data-prep, or its bin")
    parser.add_argument("--splits", nargs="+", default=["valid", "test"], metavar="SPLIT")
    parser.add_argument("--out", type=Path, help="the run file (default: beside the checkpoint)")
    return parser


def data_folder(given: Path) -> Path:
    """The folder of data-prep. Raises: RunFailed if nothing is prepared there."""
    data = given.parent if given.name == "bin" else given
    training.require_data(data)
    return data


def record(checkpoint: Path, data: Path, metrics: Run, protocol: Run) -> Run:
    """The run file; everything about the training is read from the checkpoint."""
    state = checkpoints.load(checkpoint)
    return {
        "experiment": "by-hand",
        "scale": "by-hand",
        "dataset": training.dataset_name(data),
        **training.described_by(state),
        "metrics": metrics,
        "protocol": protocol,
        "tokens_per_second": _speed(state),
        "wall_seconds": checkpoints.seconds(state),
        **environment(),
    }


def report(run: Run, out: Path) -> None:
    """Write the run file and print what it says."""
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
