"""All commands in one program: ``python -m lrpe_fairseq.experiments COMMAND …``."""

import ast
import importlib
import sys
from pathlib import Path

from lrpe_fairseq.experiments.records.console import refused_without

COMMANDS = (
    "run_table",
    "compare",
    "train_row",
    "finetune_glue",
    "eval_lm",
    "eval_mt",
    "eval_classifier",
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
INTERNAL = ("score_lm", "eval_glue")
"""Commands that others start in a process of their own."""


def usage() -> str:
    """Return how the program is called, with one line for each command."""
    lines = [f"  {name:16}{_purpose(name)}" for name in COMMANDS]
    return "\n".join(["python -m lrpe_fairseq.experiments COMMAND …", "commands:", *lines])


def _purpose(name: str) -> str:
    """Return the beginning of a command's docstring, without an import: each needs other extras."""
    text = Path(__file__).with_name("commands").joinpath(f"{name}.py").read_text(encoding="utf-8")
    first = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    return first.partition(": ``")[0].replace("``", "").removesuffix(".")


def main(arguments: list[str]) -> int:
    """Run the command that ``arguments`` name first; return its exit status."""
    asked = arguments[:1] in (["-h"], ["--help"])
    if not arguments or arguments[0] not in (*COMMANDS, *INTERNAL):
        print(usage(), file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    name, *words = arguments
    try:
        # Imported only now: each command needs other extras.
        module = importlib.import_module(f"lrpe_fairseq.experiments.commands.{name}")
    except ModuleNotFoundError as error:
        return refused_without(name, error)
    return module.main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
