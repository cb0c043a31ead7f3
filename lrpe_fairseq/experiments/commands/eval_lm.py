"""Evaluate a checkpoint of a language model under both protocols: ``scripts/eval_lm.sh``.

The facts about the training are read from the checkpoint; the result is a run file.
"""

import shlex
import sys
from pathlib import Path

from lrpe_fairseq.experiments.families import lm, preparation_of
from lrpe_fairseq.experiments.records import checkpoints, dictionaries
from lrpe_fairseq.experiments.records.console import command
from lrpe_fairseq.experiments.records.files import relative
from lrpe_fairseq.experiments.records.runs import Run
from lrpe_fairseq.experiments.runner import by_hand

PROTOCOLS = (lm.BLOCKS, lm.SLIDING)
EMBEDDING = "decoder.embed_tokens.weight"


@command("eval_lm")
def main(arguments: list[str] | None = None) -> None:
    """Evaluate, print the perplexities, write the run file."""
    options = by_hand.arguments("scripts/eval_lm.sh", __doc__).parse_args(arguments)
    data = by_hand.data_folder(options.data, preparation_of)
    run = evaluate(options.checkpoint, data, options.splits)
    by_hand.report(run, options.out or options.checkpoint.with_suffix(".json"))


def evaluate(checkpoint: Path, data: Path, splits: list[str]) -> Run:
    """Evaluate ``checkpoint`` on ``splits`` of a data folder and return the run file.

    Raises: ValueError for a damaged or diverged checkpoint, one of another model, or data with
        another dictionary; RunFailed if an evaluation fails or is empty.
    """
    config = checkpoints.options(checkpoints.require_model(checkpoint, "lrpe_lm"))
    _require_dictionary(checkpoint, data)
    metrics: Run = {}
    for split in splits:
        metrics[split] = {p: _measure(checkpoint, data, split, p, config) for p in PROTOCOLS}
    protocol = lm.protocols(config["tokens-per-sample"], set(PROTOCOLS))
    return by_hand.record(checkpoint, data, metrics, protocol)


def _require_dictionary(checkpoint: Path, data: Path) -> None:
    dictionary = data / "bin" / "dict.txt"
    if not dictionaries.agree(checkpoint, EMBEDDING, dictionary, say=print):
        raise ValueError(
            f"{relative(dictionary)} is not the dictionary that {relative(checkpoint)} was trained "
            "with: evaluate it on data with the dictionary of its training"
        )


def _measure(checkpoint: Path, data: Path, split: str, protocol: str, config: Run) -> Run:
    tokens = config["tokens-per-sample"]
    words = lm.evaluation_command(
        checkpoint,
        data,
        split,
        tokens_per_sample=tokens,
        context_window=lm.context_window(protocol, tokens),
        max_tokens=config["max-tokens"] or tokens,
    )
    print(shlex.join(words), flush=True)
    log = checkpoint.absolute().with_name(f"eval-{checkpoint.stem}-{split}-{protocol}.log")
    log.unlink(missing_ok=True)
    by_hand.run(words, log)
    return lm.read_evaluation(log, data, split)


if __name__ == "__main__":
    sys.exit(main())
