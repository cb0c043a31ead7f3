"""Evaluate a checkpoint of a language model under several protocols: ``scripts/eval_lm.sh``.

The facts about the training are read from the checkpoint; the result is a run file.
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from lrpe_fairseq.experiments.families import lm, preparation_of
from lrpe_fairseq.experiments.records import checkpoints, dictionaries, shards
from lrpe_fairseq.experiments.records.console import command
from lrpe_fairseq.experiments.records.files import relative
from lrpe_fairseq.experiments.records.protocols import BLOCKS, FORMS, SLIDING, Protocol
from lrpe_fairseq.experiments.records.runs import Run
from lrpe_fairseq.experiments.runner import by_hand

PROTOCOLS = (BLOCKS, SLIDING)
EMBEDDING = "decoder.embed_tokens.weight"


@command("eval_lm")
def main(arguments: list[str] | None = None) -> None:
    """Evaluate, print the perplexities, write the run file."""
    parser = by_hand.arguments("scripts/eval_lm.sh", __doc__)
    parser.add_argument(
        "--protocols", nargs="+", default=PROTOCOLS, metavar="PROTOCOL", help=f"of {FORMS}"
    )
    options = by_hand.parsed(parser, arguments)
    data = by_hand.data_folder(options.data, preparation_of)
    run = evaluate(options.checkpoint, data, options.splits, options.protocols)
    by_hand.report(run, options.out, data)


def evaluate(
    checkpoint: Path, data: Path, splits: list[str], names: Sequence[str] = PROTOCOLS
) -> Run:
    """Evaluate ``checkpoint`` on ``splits`` of a data folder and return the run file.

    Raises: ValueError for an unknown protocol, a damaged or diverged checkpoint, one of another
        model, or data with another dictionary; UserError for learned positions that are too few;
        RunFailed if an evaluation fails or is empty.
    """
    wanted = [Protocol.parse(name) for name in names]
    config = checkpoints.options(checkpoints.require_model(checkpoint, "lrpe_lm"))
    trained = config["task.tokens_per_sample"]
    lm.require_positions(config, trained, wanted)
    _require_dictionary(checkpoint, data)
    metrics: Run = {}
    for split in splits:
        own = {p: _measure(checkpoint, data, split, p, config) for p in names if lm.is_fairseqs(p)}
        folder = checkpoint.absolute().parent
        own |= lm.scored(checkpoint, data, split, names, trained, folder, _shown)
        metrics[split] = {name: own[name] for name in names}
    return by_hand.record(checkpoint, data, metrics, lm.protocols(trained, set(names)))


def _require_dictionary(checkpoint: Path, data: Path) -> None:
    dictionary = shards.first(data) / "dict.txt"
    if not dictionaries.agree(checkpoint, EMBEDDING, dictionary, say=print):
        raise ValueError(
            f"{relative(dictionary)} is not the dictionary that {relative(checkpoint)} was trained "
            "with: evaluate it on data with the dictionary of its training"
        )


def _measure(checkpoint: Path, data: Path, split: str, protocol: str, config: Run) -> Run:
    tokens = config["task.tokens_per_sample"]
    words = lm.evaluation_command(
        checkpoint,
        data,
        split,
        tokens_per_sample=tokens,
        context_window=Protocol.parse(protocol).context_window(tokens),
        max_tokens=config["dataset.max_tokens"] or tokens,
        task=lm.task_of(config["task._name"], protocol),
    )
    log = checkpoint.absolute().with_name(f"eval-{checkpoint.stem}-{split}-{protocol}.log")
    log.unlink(missing_ok=True)
    _shown(words, log)
    return lm.read_evaluation(log, data, split)


def _shown(words: list[str], log: Path) -> None:
    print(shlex.join(words), flush=True)
    by_hand.run(words, log)


if __name__ == "__main__":
    sys.exit(main())
