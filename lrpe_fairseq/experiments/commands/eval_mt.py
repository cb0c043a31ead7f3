"""Translate with a checkpoint and score, by hand: ``scripts/eval_mt.sh``."""

import argparse
from pathlib import Path

import lrpe_fairseq  # noqa: F401  registers the models
from lrpe_fairseq.experiments.families import preparation_of, translation
from lrpe_fairseq.experiments.families.translation import Decoding
from lrpe_fairseq.experiments.records import checkpoints
from lrpe_fairseq.experiments.records.console import command
from lrpe_fairseq.experiments.records.runs import Run
from lrpe_fairseq.experiments.runner import by_hand
from lrpe_fairseq.experiments.runner.devices import Devices
from lrpe_fairseq.experiments.runner.processes import Children
from lrpe_fairseq.experiments.runner.training import shell


@command("eval_mt")
def main(arguments: list[str] | None = None) -> None:
    """Translate with a checkpoint: print the scores, write the run file."""
    options = _parse(arguments)
    decoding = Decoding(options.beam, options.lenpen, options.average)
    data = by_hand.data_folder(options.data, preparation_of)
    run = evaluate_mt(options.checkpoint, data, options.splits, decoding)
    by_hand.report(run, options.out, data)


def evaluate_mt(checkpoint: Path, data: Path, splits: list[str], decoding: Decoding) -> Run:
    """Return the run file of ``checkpoint``, or of the mean of the last ones in its folder.

    Raises: ValueError if there are no such checkpoints, or for a damaged or diverged one or one of
        another model; RunFailed if they do not match the data or a sentence is not translated.
    """
    checkpoints.require_model(checkpoint, "lrpe_transformer")
    translation.require_dictionaries(checkpoint, data)  # raises before a mean is written
    used = checkpoint
    # The mean is written beside the checkpoints, where run_table looks for it too.
    if decoding.average > 1:
        used, decoding = decoding.mean(checkpoint.parent)
    logs = checkpoint.absolute().parent
    measured = translation.measure(used, data, splits, decoding, logs, shell(Children(), Devices()))
    return by_hand.record(checkpoint, data, measured["metrics"], measured["protocol"], used)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = by_hand.arguments("eval_mt", "Translate with checkpoints and score.")
    add = parser.add_argument
    usual = Decoding()
    average = "average the last N periodic checkpoints of this folder; 1: this checkpoint only"
    add("--beam", type=int, default=usual.beam)
    add("--lenpen", type=float, default=usual.length_penalty)
    add("--average", type=int, default=usual.average, metavar="N", help=average)
    return by_hand.parsed(parser, arguments)
