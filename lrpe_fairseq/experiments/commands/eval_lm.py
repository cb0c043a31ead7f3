"""Evaluate a language model by hand: ``scripts/eval_lm.sh``."""

import shlex
from collections.abc import Sequence
from pathlib import Path

import lrpe_fairseq  # noqa: F401  registers the models
from lrpe_fairseq.encodings.rotations.scaling import SCALINGS
from lrpe_fairseq.experiments.families import lm, preparation_of
from lrpe_fairseq.experiments.records import checkpoints
from lrpe_fairseq.experiments.records.console import command
from lrpe_fairseq.experiments.records.files import first_shard
from lrpe_fairseq.experiments.records.protocols import BLOCKS, FORMS, SLIDING, Protocol
from lrpe_fairseq.experiments.records.runs import Run
from lrpe_fairseq.experiments.runner import by_hand
from lrpe_fairseq.experiments.runner.devices import Devices
from lrpe_fairseq.experiments.runner.processes import Children
from lrpe_fairseq.experiments.runner.training import shell

PROTOCOLS = (BLOCKS, SLIDING)


@command("eval_lm")
def main(arguments: list[str] | None = None) -> None:
    """Evaluate a language model: print the perplexities, write the run file."""
    parser = by_hand.arguments("eval_lm", "Evaluate a language model under several protocols.")
    add = parser.add_argument
    add("--protocols", nargs="+", default=PROTOCOLS, metavar="PROTOCOL", help=f"of {FORMS}")
    add("--context-scaling", choices=SCALINGS, default="none")
    add("--context-factor", type=float, default=1.0, metavar="F")
    options = by_hand.parsed(parser, arguments)
    data = by_hand.data_folder(options.data, preparation_of)
    names = options.protocols
    scaled = options.context_factor != 1
    if (options.context_scaling != "none") != scaled or not options.context_factor >= 1:
        raise ValueError("--context-scaling and --context-factor, above 1, need each other")
    if scaled:
        factor = str(options.context_factor).removesuffix(".0")
        # A scaling is part of a protocol's name, so that run files keep both values.
        names = [f"{name}+{options.context_scaling}-{factor}" for name in names]
    run = evaluate_lm(options.checkpoint, data, options.splits, names)
    by_hand.report(run, options.out, data)


def evaluate_lm(
    checkpoint: Path, data: Path, splits: list[str], names: Sequence[str] = PROTOCOLS
) -> Run:
    """Evaluate ``checkpoint`` on ``splits`` of a data folder and return the run file.

    Raises: ValueError for an unknown protocol, a damaged or diverged checkpoint, one of another
        model, or data with another dictionary; UserError for learned positions that are too few;
        RunFailed if an evaluation fails or is empty.
    """
    wanted = [Protocol.parse(name) for name in names]
    config = checkpoints.options(checkpoints.require_model(checkpoint, "lrpe_lm"))
    lm.require_positions(config, config["task.tokens_per_sample"], wanted)
    dictionary = first_shard(data) / "dict.txt"
    by_hand.require_dictionary(checkpoint, dictionary, "decoder.embed_tokens.weight")
    pairs = tuple((split, name) for split in splits for name in names)
    folder = checkpoint.absolute().parent
    measured = lm.measure(checkpoint, data, pairs, config, folder, _shown)
    return by_hand.record(checkpoint, data, measured["metrics"], measured["protocol"])


def _shown(words: list[str], log: Path) -> None:
    print(shlex.join(words), flush=True)
    shell(Children(), Devices())(words, log)
