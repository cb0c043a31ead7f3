"""All commands in one program: ``python -m lrpe_fairseq.experiments COMMAND …``."""

import importlib
import sys

from lrpe_fairseq.experiments.records.console import refused_without

COMMANDS = {
    "run_table": "run_table:main",
    "train_row": "train_row:main",
    "finetune_glue": "train_row:finetune",
    "eval_lm": "evaluate:lm",
    "eval_mt": "evaluate:mt",
    "eval_classifier": "evaluate:classifier",
    "score_lm": "evaluate:score_lm",
    "eval_glue": "evaluate:eval_glue",
    "ngrams": "ngrams:main",
    "quickstart": "quickstart:main",
    "doctor": "doctor:main",
    "export": "export:main",
    "import_roberta": "import_roberta:main",
    "convert": "convert:main",
}
"""Name -> module of ``commands``, and its function, which takes the arguments."""


def main(arguments: list[str]) -> int:
    """Run the command that ``arguments`` name first; return its exit status."""
    if not arguments or arguments[0] not in COMMANDS:
        known = ", ".join(COMMANDS)
        print(f"python -m lrpe_fairseq.experiments COMMAND …\ncommands: {known}", file=sys.stderr)
        return 2
    module, _, function = COMMANDS[arguments[0]].partition(":")
    try:
        found = importlib.import_module(f"lrpe_fairseq.experiments.commands.{module}")
    except ModuleNotFoundError as error:
        return refused_without(arguments[0], error)
    return getattr(found, function)(arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
