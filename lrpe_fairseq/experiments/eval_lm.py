"""Evaluate a checkpoint of a language model under both protocols: ``scripts/eval_lm.sh``.

Everything about the training is read from the checkpoint; the result is a run file.
"""

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from lrpe_fairseq.experiments import checkpoints, lm, training
from lrpe_fairseq.experiments.processes import Children, Stopped
from lrpe_fairseq.experiments.runs import Run, environment, write_run

PROTOCOLS = (lm.BLOCKS, lm.SLIDING)


def main(arguments: list[str] | None = None) -> int:
    """Evaluate, print the perplexities, write the run file; returns the exit status."""
    options = _parse(arguments)
    out = options.out or options.checkpoint.with_suffix(".json")
    data = options.data.parent if options.data.name == "bin" else options.data
    try:
        training.require_data(data)
        run = evaluate(options.checkpoint, data, options.splits)
        write_run(out, run)
    except (ValueError, OSError, training.RunFailed, Stopped) as error:
        print(f"eval_lm: {error}", file=sys.stderr)
        return 1
    for split, by_protocol in run["metrics"].items():
        for protocol, measured in by_protocol.items():
            numbers = ", ".join(f"{name} {value:,.6g}" for name, value in measured.items())
            print(f"{split}, {protocol}: {numbers}")
    print(f"written to {out}")
    return 0


def evaluate(checkpoint: Path, data: Path, splits: list[str]) -> Run:
    """The run file of ``checkpoint``, evaluated on ``splits`` of a data folder.

    Raises: ValueError if it is no checkpoint, RunFailed if an evaluation fails or is empty.
    """
    state = checkpoints.load(checkpoint)
    config = checkpoints.options(state)
    metrics: Run = {}
    for split in splits:
        metrics[split] = {p: _measure(checkpoint, data, split, p, config) for p in PROTOCOLS}
    return {
        "experiment": "by-hand",
        "scale": "by-hand",
        "dataset": training.dataset_name(data),
        **training.described_by(state),
        "metrics": metrics,
        "protocol": lm.protocols(config["tokens-per-sample"], set(PROTOCOLS)),
        "tokens_per_second": _speed(state),
        "wall_seconds": checkpoints.seconds(state),
        **environment(),
    }


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/eval_lm.sh", description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("data", type=Path, help="a folder of data-prep, or its bin")
    parser.add_argument("--splits", nargs="+", default=["valid", "test"], metavar="SPLIT")
    parser.add_argument("--out", type=Path, help="the run file (default: beside the checkpoint)")
    return parser.parse_args(arguments)


def _measure(checkpoint: Path, data: Path, split: str, protocol: str, config: Run) -> Run:
    tokens = config["tokens-per-sample"]
    command = lm.evaluation_command(
        checkpoint,
        data,
        split,
        tokens_per_sample=tokens,
        context_window=lm.context_window(protocol, tokens),
        max_tokens=config["max-tokens"] or tokens,
    )
    print(shlex.join(command), flush=True)
    log = checkpoint.absolute().with_name(f"eval-{checkpoint.stem}-{split}-{protocol}.log")
    log.unlink(missing_ok=True)
    training.run_child(Children(), command, log, training.Devices(), None)
    return lm.read_evaluation(log, data, split)


def _speed(state: dict[str, Any]) -> float:
    """Training tokens per second since the epoch of the checkpoint began."""
    meters = {name: values for _, name, _, values in state["extra_state"]["metrics"]["train"]}
    return round(meters["wps"]["n"] / meters["wps"]["init"], 1)


if __name__ == "__main__":
    sys.exit(main())
