"""All commands in one program: ``python -m lrpe_fairseq.experiments COMMAND …``."""

import importlib
import sys

from lrpe_fairseq.experiments.records.console import refused_without

COMMANDS = (
    "run_table",
    "train_row",
    "finetune_glue",
    "eval_lm",
    "eval_mt",
    "eval_classifier",
    "score_lm",
    "eval_glue",
    "prepare",
    "ngrams",
    "pairs",
    "drift",
    "quickstart",
    "doctor",
    "export",
    "convert",
    "import_roberta",
)
"""The modules of ``commands``; each has a function ``main``, which takes the arguments."""


def main(arguments: list[str]) -> int:
    """Run the command that ``arguments`` name first; return its exit status."""
    if not arguments or arguments[0] not in COMMANDS:
        known = ", ".join(COMMANDS)
        print(f"python -m lrpe_fairseq.experiments COMMAND …\ncommands: {known}", file=sys.stderr)
        return 2
    name, *words = arguments
    try:
        # Imported only now: each command needs other extras.
        module = importlib.import_module(f"lrpe_fairseq.experiments.commands.{name}")
    except ModuleNotFoundError as error:
        return refused_without(name, error)
    return module.main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
