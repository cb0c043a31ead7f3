"""How every command ends: 0 success, 1 work that failed, 2 bad input, 130 Ctrl-C, 141 no reader."""

import datetime
import functools
import os
import sys
from collections.abc import Callable

from lrpe_fairseq.errors import BAD_INPUT, missing_extra

STARTED_IN = "LRPE_STARTED_IN"
"""Environment variable: the folder from which the user called a script, before its cd."""

FAILED, INTERRUPTED, NO_READER = 1, 130, 141
Main = Callable[..., int | None]


class UserError(Exception):
    """Something that the user can put right; the text is one sentence that says how."""


def command(name: str) -> Callable[[Main], Callable[..., int]]:
    """Decorate the ``main`` of a command: errors for users become one line and status 2.

    Errors for users are UserError, ValueError, OSError and a module that an extra of this package
    installs. Any other exception keeps its traceback. ``main`` returns its exit status; None counts
    as 0. A command whose reader has ended, such as ``head``, ends silently.
    """

    def decorate(main: Main) -> Callable[..., int]:
        @functools.wraps(main)
        def guarded(*arguments: object, **named: object) -> int:
            try:
                # Children do not inherit it: their relative paths count from the root.
                if folder := os.environ.pop(STARTED_IN, ""):
                    os.chdir(folder)
                status = main(*arguments, **named) or 0
                sys.stdout.flush()
                return status
            except BrokenPipeError:
                # Otherwise Python fails again at exit, when it flushes standard output.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return NO_READER
            except ModuleNotFoundError as error:
                return refused_without(name, error)
            except (UserError, ValueError, OSError) as error:
                sentence = " ".join(str(error).split()) or type(error).__name__
                print(f"{name}: {sentence}", file=sys.stderr)
                return BAD_INPUT
            except KeyboardInterrupt:
                return INTERRUPTED

        return guarded

    return decorate


def refused_without(name: str, error: ModuleNotFoundError) -> int:
    """Say which extra the command ``name`` needs; return its exit status.

    Raises: the error itself, for a module that belongs to no extra.
    """
    sentence = missing_extra(error)
    if not sentence:
        raise error
    print(f"{name}: {sentence}", file=sys.stderr)
    return BAD_INPUT


def format_duration(seconds: float) -> str:
    """A duration as h:mm:ss, after days if there are some."""
    return str(datetime.timedelta(seconds=round(seconds)))
