"""Train the table ``quickstart`` here and print it: ``make quickstart``.

Checkpoints, logs and run files are in ``runs/quickstart/``; a second call reuses them. The
published run files of the table are neither read nor changed. ``--record FILE`` also writes the
text of the best model, as results/bench/quickstart-sample.json has it for README.
"""

import argparse
import dataclasses
import logging
import os
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lrpe_fairseq.experiments.families import load_named, ngrams, runs
from lrpe_fairseq.experiments.records import checkpoints
from lrpe_fairseq.experiments.records.console import command
from lrpe_fairseq.experiments.records.files import ROOT, first_shard, relative, write_json
from lrpe_fairseq.experiments.records.machine import environment
from lrpe_fairseq.experiments.records.protocols import BLOCKS
from lrpe_fairseq.experiments.records.runs import read_run
from lrpe_fairseq.experiments.report import pages, plots
from lrpe_fairseq.experiments.report.results import Results
from lrpe_fairseq.experiments.runner.processes import RunFailed
from lrpe_fairseq.experiments.runner.schedule import Events, Schedule, shares
from lrpe_fairseq.experiments.runner.training import TrainingRun
from lrpe_fairseq.models.language_model import LRPELanguageModel

TABLE, SCALE = "quickstart", "small"
WORK = ROOT / "runs" / TABLE
PARALLEL = 2
PROMPT, SPACE = "T h e", "\u2581"  # characters are the tokens
SAMPLING = {"beam": 1, "sampling": True, "sampling_topk": 10}


@command("quickstart")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run all unfinished steps; return the exit status."""
    begun = time.monotonic()
    parser = argparse.ArgumentParser(prog="make quickstart", description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds per row (default 1)")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the text as JSON")
    options = parser.parse_args(arguments)
    if options.seeds < 1:
        parser.error("--seeds must be at least 1")
    # fairseq logs every option of a model; the results would be lost among them.
    logging.getLogger("fairseq").setLevel(logging.WARNING)
    wanted = planned(options.seeds)
    # All runs read the same text.
    wanted[0].prepare_data()
    devices = shares(min(PARALLEL, len(os.sched_getaffinity(0))))
    if Schedule(wanted, devices, Events(WORK / "events.log")).run():
        raise RunFailed(f"some runs failed; their logs are in {relative(WORK)}")
    best = show(wanted)
    if options.record:
        write_json(options.record, sample_record(best))
    minutes, seconds = divmod(round(time.monotonic() - begun), 60)
    print(f"Done in {minutes} min {seconds} s. `tensorboard --logdir {relative(WORK)}` shows more.")
    return 0


def planned(seeds: int) -> list[TrainingRun]:
    """Return the runs of the table, seed by seed, with run files in their own folders."""
    planned_runs = runs(load_named(TABLE), SCALE, range(1, seeds + 1))
    return [dataclasses.replace(run, result=run.folder / "run.json") for run in planned_runs]


def show(finished: Sequence[TrainingRun]) -> TrainingRun:
    """Print the table, the n-gram counts and a text of the best model; draw the table.

    Returns: the run of the best model.
    """
    measured = {run.name: read_run(run.result) for run in finished}
    results = Results(ROOT, measured)
    views = results.headlines(results.sheets_of(TABLE)[0])
    table = pages.grid(views[0].table, views)
    print(f"\nTest perplexity per character, lower is better:\n\n{table}")
    print("\nSigns are against the first row (results/README.md); `?` needs SEEDS=3.")
    counts = counted(finished[0])
    listed = ", ".join(f"{name} {value:.2f}" for name, value in counts.items())
    print(f"\nModified Kneser-Ney of the same text, for comparison: {listed}")
    if min(counts.values()) < min(
        min(view.cells[row].values()) for view in views for row in view.rows
    ):
        print(
            "In these minutes no model beats n-grams that have counted as many characters; of "
            "longer trainings, the best softmax model of 16,200 updates does (results/budget.md)."
        )
    best = min(finished, key=lambda run: measured[run.name]["metrics"]["test"][BLOCKS]["ppl"])
    print(f"\n{best.name} writes:\n{sample(best)}\n")
    rows = {name: [value] for name, value in counts.items()}
    for view in views:
        named = {row: f"{view.names[row]}, {view.column.attention}" for row in view.rows}
        rows |= {name: list(view.cells[row].values()) for row, name in named.items()}
    # The best on top, n-grams among the models.
    ranked = dict(sorted(rows.items(), key=lambda item: min(item[1])))
    panel = plots.Panel("Test perplexity per character", "lower is better", ranked)
    plots.dots(WORK / "test.png", [panel])
    return best


def sample_record(run: TrainingRun) -> dict[str, Any]:
    """Return the text of a trained model, and what it comes from."""
    perplexity = read_run(run.result)["metrics"]["test"][BLOCKS]["ppl"]
    return {
        "row": run.label,
        "scale": SCALE,
        "seed": run.seed,
        "prompt": PROMPT.replace(" ", ""),
        "sampling": SAMPLING,
        "test_perplexity": perplexity,
        "text": sample(run),
        **environment(),
    }


def counted(run: TrainingRun) -> dict[str, float]:
    """Return the test perplexities of n-grams on as many tokens as ``run`` has read, by name."""
    settings = run.settings()
    read = ngrams.tokens_read(settings)
    length = int(settings.task.tokens_per_sample)
    wanted = ngrams.by_hand(run.data, read, length, (("test", BLOCKS),))
    [measured] = ngrams.measure([wanted])
    metrics = measured["metrics"]["test"][BLOCKS]
    orders = {f"{n}-grams": metrics[f"ppl-{n}"] for n in range(2, ngrams.ORDERS + 1)}
    cache = f"{metrics['order']}-grams with a cache of {metrics['cache-window']} characters"
    return {**orders, cache: metrics["cache-ppl"]}


def sample(run: TrainingRun) -> str:
    """Return a text that a trained model writes."""
    data = str(first_shard(run.data))
    hub = LRPELanguageModel.from_pretrained(str(run.checkpoints), checkpoints.BEST, data, bpe=None)
    # The same text at every call.
    torch.manual_seed(1)
    warnings.simplefilter("ignore", UserWarning)  # of memory that is not pinned without a GPU
    text = hub.sample(PROMPT, **SAMPLING)
    return text.replace(" ", "").replace(SPACE, " ")
