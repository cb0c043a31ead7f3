"""What the evaluations by hand share: their arguments, their data folder and their run file.

An evaluation by hand has a checkpoint that is no run of a table. The facts about its training are
read from the checkpoint.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from lrpe_fairseq.experiments.data import corpus, folders
from lrpe_fairseq.experiments.records import checkpoints, provenance, runs
from lrpe_fairseq.experiments.records.files import relative, require_writable
from lrpe_fairseq.experiments.records.machine import environment
from lrpe_fairseq.experiments.records.runs import Run, write_run

CHECKPOINT = "checkpoint"
"""Field of a run file: the sha256 of the evaluated checkpoint."""
SPLITS = ("valid", "test")
"""Evaluated by default, as far as the data have them."""


def arguments(script: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with the options of all evaluations: checkpoint, data, splits, out."""
    parser = argparse.ArgumentParser(prog=f"scripts/{script}.sh", description=description)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("data", type=Path, help="a folder of data-prep, or its bin")
    parser.add_argument("--splits", nargs="+", default=list(SPLITS), metavar="SPLIT")
    parser.add_argument("--out", type=Path, help="the run file (default: beside the checkpoint)")
    return parser


def parsed(parser: argparse.ArgumentParser, words: list[str] | None) -> argparse.Namespace:
    """Return the options, with ``out``. Raises: UserError if that cannot be written."""
    options = parser.parse_args(words)
    out = options.out or options.checkpoint.with_suffix(".json")
    # Before the evaluation: an hour of it must not end with an error of writing.
    if options.out or out.parent.is_dir():
        require_writable(out.parent, "--out", out)
    return argparse.Namespace(**{**vars(options), "out": out})


def data_folder(folder: Path, preparation_of: Callable[[Path], list[str]]) -> Path:
    """Return the data folder that a script of data-prep made; its ``bin`` may be given instead.

    preparation_of: data folder -> the script that makes it, with its arguments.
    Raises: UserError if the folder contains no prepared data or differs from its manifest.
    """
    # fairseq's own commands take bin, so users pass it here too.
    data = folder.parent if folder.name == "bin" else folder
    folders.require(data, preparation_of(data))
    folders.verify(data)
    return data


def require_dictionary(checkpoint: Path, path: Path, embedding: str, name: str = "") -> None:
    """Raise ValueError unless ``path`` is the dictionary of an embedding of the checkpoint."""
    if not checkpoints.same_dictionary(checkpoint, embedding, path, say=print, name=name):
        raise ValueError(
            f"{relative(path)} is not the dictionary that {relative(checkpoint)} was trained "
            "with: evaluate it on data with the dictionaries of its training"
        )


def record(
    checkpoint: Path, data: Path, metrics: Run, protocol: Run, evaluated: Path | None = None
) -> Run:
    """Return the run file of an evaluation; its training fields are from checkpoint and folder.

    evaluated: the file with the weights, if it is not ``checkpoint``.
    """
    state = checkpoints.load(checkpoint)
    speed = checkpoints.speed(state)
    folder = checkpoint.absolute().parent
    trained_on = provenance.machines(folder.parent)
    return {
        CHECKPOINT: corpus.digest(evaluated or checkpoint),
        "experiment": runs.BY_HAND,
        "scale": runs.BY_HAND,
        "dataset": folders.dataset_name(data),
        **runs.settings_of(checkpoints.options(state)),
        "evaluated_update": checkpoints.updates(state),
        "metrics": metrics,
        "protocol": protocol,
        **({} if speed is None else {"tokens_per_second": speed}),
        "wall_seconds": checkpoints.seconds(state),
        "data": folders.checksums(data, set(metrics)),
        **environment(folder.glob("eval-*.log"), trained_on),
        **provenance.provenance(folder.parent),
    }


def report(run: Run, out: Path, data: Path) -> None:
    """Print the metrics of a run file and write it, with the other evaluations of ``out``."""
    for split, by_protocol in run["metrics"].items():
        for protocol, measured in by_protocol.items():
            numbers = ", ".join(f"{name} {value:,.6g}" for name, value in measured.items())
            print(f"{split}, {protocol}: {numbers}")
    write_run(out, _with_earlier(out, run, data))
    print(f"written to {out}")


def _with_earlier(out: Path, run: Run, data: Path) -> Run:
    """Add the evaluations that ``out`` has of the same checkpoint, data and protocols."""
    try:
        known = runs.read_run(out)
    except (OSError, ValueError):
        return run
    parts = known.get("data", {})
    same = known.get(CHECKPOINT) == run[CHECKPOINT]
    # The splits that only the earlier evaluation has must still be those that it read.
    if not same or folders.checksums(data, parts) != parts:
        print(f"{out} had results of another checkpoint or other data, which are replaced")
        return run
    metrics = dict(run["metrics"])
    sentences = {**known["protocol"], **run["protocol"]}
    for split, by_protocol in known["metrics"].items():
        # A protocol of the same name may be another one, such as blocks of another length.
        kept = {
            name: values
            for name, values in by_protocol.items()
            if sentences[name] == known["protocol"][name]
        }
        if dropped := sorted(by_protocol.keys() - kept.keys()):
            print(f"{split}: the earlier results of another protocol go: {', '.join(dropped)}")
        if kept:
            metrics[split] = {**kept, **metrics.get(split, {})}
    names = {name for by_protocol in metrics.values() for name in by_protocol}
    protocol = {name: sentences[name] for name in sorted(names)}
    merged = {"metrics": metrics, "protocol": protocol, "data": {**parts, **run["data"]}}
    return {**run, **merged, **runs.with_machines(run, runs.machines_of(known))}
