"""Evaluate a language model by hand: ``scripts/eval_lm.sh``."""

import argparse
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

import lrpe_fairseq  # noqa: F401  registers the models
from lrpe_fairseq.encodings.rotations.scaling import BY_TEXT, SCALINGS
from lrpe_fairseq.experiments.families import lm, preparation_of
from lrpe_fairseq.experiments.records import checkpoints
from lrpe_fairseq.experiments.records.console import UserError, command
from lrpe_fairseq.experiments.records.files import first_shard
from lrpe_fairseq.experiments.records.protocols import BLOCKS, FORMS, SLIDING, Protocol
from lrpe_fairseq.experiments.records.runs import Run
from lrpe_fairseq.experiments.runner import by_hand
from lrpe_fairseq.experiments.runner.devices import Devices
from lrpe_fairseq.experiments.runner.processes import Children
from lrpe_fairseq.experiments.runner.training import shell

PROTOCOLS = (BLOCKS, SLIDING)
FACTORS_OF = "of longrope: a JSON file with short_factor and long_factor, as of transformers"


@command("eval_lm")
def main(arguments: list[str] | None = None) -> None:
    """Evaluate a language model: print the perplexities, write the run file."""
    parser = by_hand.arguments("eval_lm", "Evaluate a language model under several protocols.")
    add = parser.add_argument
    add("--protocols", nargs="+", default=PROTOCOLS, metavar="PROTOCOL", help=f"of {FORMS}")
    add("--context-scaling", choices=SCALINGS, default="none")
    add("--context-factor", type=float, default=1.0, metavar="F")
    add("--longrope-factors", type=Path, metavar="FILE", help=FACTORS_OF)
    options = by_hand.parsed(parser, arguments)
    data = by_hand.data_folder(options.data, preparation_of)
    names = options.protocols
    scaling = options.context_scaling
    _check_scaling(options)
    if scaling != "none":
        factor = str(options.context_factor).removesuffix(".0")
        # A scaling is part of a protocol's name, so that run files keep both values.
        names = [f"{name}+{scaling}-{factor}" for name in names]
    factors = longrope_factors(options.longrope_factors) if options.longrope_factors else ""
    run = evaluate_lm(options.checkpoint, data, options.splits, names, factors)
    by_hand.report(run, options.out, data)


def _check_scaling(options: argparse.Namespace) -> None:
    """Raise a ValueError for options of context scaling that need another one."""
    scaling, scaled = options.context_scaling, options.context_factor != 1
    if (scaling == "none" and scaled) or not options.context_factor >= 1:
        raise ValueError("--context-factor needs --context-scaling, and must be at least 1")
    if scaling not in ("none", *BY_TEXT) and not scaled:
        raise ValueError(f"--context-scaling {scaling} needs --context-factor above 1")
    if options.longrope_factors and scaling != "longrope":
        raise ValueError("--longrope-factors needs --context-scaling longrope")


def longrope_factors(path: Path) -> str:
    """Return the option ``longrope_factors`` of a JSON file with the lists of transformers.

    ``short_factor`` and ``long_factor`` stand at its top level, or in the ``rope_scaling`` or
    ``rope_parameters`` of a model's config.json. Raises: UserError for another file.
    """
    try:
        known = json.loads(path.read_text())
        own = known.get("rope_scaling") or known.get("rope_parameters") or known
        return ",".join(str(float(n)) for n in (*own["short_factor"], *own["long_factor"]))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{path} is no JSON file with the lists short_factor and long_factor: give the "
            "config.json of a model with longrope"
        ) from error


def evaluate_lm(
    checkpoint: Path,
    data: Path,
    splits: list[str],
    names: Sequence[str] = PROTOCOLS,
    factors: str = "",
) -> Run:
    """Evaluate ``checkpoint`` on ``splits`` of a data folder and return the run file.

    factors: ``longrope_factors`` of protocols with longrope; empty: those of the training.
    Raises: ValueError for an unknown protocol, a damaged or diverged checkpoint, one of another
        model, or data with another dictionary; UserError for learned positions that are too few;
        RunFailed if an evaluation fails or is empty.
    """
    wanted = [Protocol.parse(name) for name in names]
    config = checkpoints.options(checkpoints.require_model(checkpoint, "lrpe_lm"))
    config |= {lm.FACTORS: factors} if factors else {}
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
