"""Translate with a checkpoint, or the mean of the last ones, and score: ``scripts/eval_mt.sh``.

The facts about the training are read from the checkpoint; the result is a run file.
"""

import argparse
import sys
from pathlib import Path

from lrpe_fairseq.experiments.families import preparation_of, translation
from lrpe_fairseq.experiments.families.translation import Decoding
from lrpe_fairseq.experiments.records import checkpoints
from lrpe_fairseq.experiments.records.console import command
from lrpe_fairseq.experiments.records.runs import Run
from lrpe_fairseq.experiments.runner import by_hand


@command("eval_mt")
def main(arguments: list[str] | None = None) -> None:
    """Translate, print the scores, write the run file."""
    options = _parse(arguments)
    decoding = Decoding(options.beam, options.lenpen, options.average)
    data = by_hand.data_folder(options.data, preparation_of)
    run = evaluate(options.checkpoint, data, options.splits, decoding)
    by_hand.report(run, options.out, data)


def evaluate(checkpoint: Path, data: Path, splits: list[str], decoding: Decoding) -> Run:
    """Return the run file of ``checkpoint``, or of the mean of the last ones in its folder.

    Raises: ValueError if there are no such checkpoints, or for a damaged or diverged one or one of
        another model; RunFailed if they do not match the data or a sentence is not translated.
    """
    checkpoints.require_model(checkpoint, "lrpe_transformer")
    translation.require_dictionaries(checkpoint, data)  # raises before a mean is written
    used = checkpoint
    if decoding.average > 1:
        used, decoding = decoding.mean(checkpoint.parent)
    logs = checkpoint.absolute().parent
    measured = translation.measure(used, data, splits, decoding, logs, by_hand.run)
    return by_hand.record(checkpoint, data, measured["metrics"], measured["protocol"], used)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = by_hand.arguments("scripts/eval_mt.sh", __doc__)
    usual = Decoding()
    parser.add_argument("--beam", type=int, default=usual.beam)
    parser.add_argument("--lenpen", type=float, default=usual.length_penalty)
    parser.add_argument(
        "--average",
        type=int,
        default=usual.average,
        metavar="N",
        help="average the last N periodic checkpoints of this folder; 1: this checkpoint only",
    )
    return by_hand.parsed(parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
