"""Errors that a user can correct: one sentence, no traceback, exit status 2.

This module imports nothing of this package, of torch or of fairseq.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import NoReturn

BAD_INPUT = 2
"""Exit status after bad input, as argparse has it."""


class ChoiceError(ValueError):
    """An option, name or size given by the user is invalid.

    Its message is one sentence that says what to do. Commands print it without a traceback. All
    other errors keep their traceback.
    """


class Refusal(SystemExit):
    """Exits with status 2. ``str(refusal)`` is the sentence; raise it with :func:`refuse`."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)
        self.code = BAD_INPUT


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint at the nearest of the ``known`` names; empty if none is near.

    >>> did_you_mean("max_epch", ["max_epoch", "max_update"])
    "; did you mean 'max_epoch'?"
    """
    close = get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


EXTRAS = {
    "fairseq": (
        "fairseq",
        "fairseq_cli",
        "bitarray",
        "hydra",
        "omegaconf",
        "regex",
        "sacrebleu",
        "sentencepiece",
        "tensorboard",
        "tqdm",
        "yaml",
    ),
    "experiments": ("jinja2", "matplotlib", "pandas", "scipy"),
    "images": ("mlxtend", "sklearn", "PIL"),
    "vision": ("timm", "torchvision"),
}
"""Extra of this package -> the modules that it installs."""
OF_MAKE = ("fairseq", "experiments")
"""The extras that ``make install`` installs."""


def missing_extra(error: ModuleNotFoundError) -> str:
    """Return the sentence that names the extra of a missing module; empty if it has none.

    >>> missing_extra(ModuleNotFoundError(name="yaml"))
    "yaml is not installed: run make install in the checkout of lrpe_fairseq"
    """
    module = (error.name or "").partition(".")[0]
    extra = next((extra for extra, modules in EXTRAS.items() if module in modules), "")
    return f"{module} is not installed: {install_command(extra)}" if extra else ""


def install_command(extra: str) -> str:
    """Return how to install an extra of this package, which no package index has.

    >>> install_command("hf")
    "run pip install -e '.[hf]' in the checkout of lrpe_fairseq"
    """
    # pip alone would build fairseq against a second torch
    command = "make install" if extra in OF_MAKE else f"pip install -e '.[{extra}]'"
    return f"run {command} in the checkout of lrpe_fairseq"


def refuse(sentence: str) -> NoReturn:
    """Print ``lrpe_fairseq: SENTENCE`` to standard error and exit with status 2.

    For fairseq's commands, which would print a traceback for an exception. Commands of this
    package use :func:`lrpe_fairseq.experiments.records.console.command`.
    Raises: Refusal, always.
    """
    said = f"lrpe_fairseq: {sentence}"
    print(said, file=sys.stderr, flush=True)
    raise Refusal(said)


@contextmanager
def one_sentence_errors() -> Iterator[None]:
    """Turn an error about an option into one sentence on standard error and exit status 2.

    Raises: Refusal for a ChoiceError, and for an error of fairseq about an option.
    """
    try:
        yield
    except ValueError as error:
        if isinstance(error, ChoiceError) or str(error).startswith("--"):  # fairseq's own sentences
            refuse(str(error))
        raise
