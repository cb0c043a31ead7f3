"""fairseq's commands log their configuration after they have checked it.

Stock fairseq logs all options first, several pages, so that the sentence about a wrong option
stands below them. Here the record waits until the model is built or loaded. It is dropped if an
option is refused, and logged before any other error.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import fairseq.models
import fairseq.tasks
from fairseq import checkpoint_utils
from omegaconf import DictConfig

from lrpe_fairseq.compat.patching import replace_once
from lrpe_fairseq.errors import Refusal

COMMANDS = ("train", "eval_lm", "generate", "interactive")
"""The commands that log their configuration first; their loggers are ``fairseq_cli.<command>``."""
LOADING = "loading model(s) from"
"""The record that follows the configuration in commands that read a checkpoint."""


class Held(logging.Filter):
    """Holds the record of a configuration, and that of :data:`LOADING` after it."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def filter(self, record: logging.LogRecord) -> bool:
        """True for a record that is logged now, after those that are held."""
        follows = self.records and str(record.msg).startswith(LOADING)
        if isinstance(record.msg, DictConfig) or follows:
            self.records.append(record)
            return False
        self.release()
        return True

    def release(self) -> None:
        """Log the records that are held."""
        # a handler may log, too, and comes back here
        while self.records:
            record = self.records.pop(0)
            # not handle(), which would ask this filter again
            logging.getLogger(record.name).callHandlers(record)


HELD = Held()


@functools.cache
def apply() -> None:
    """Hold the configuration back, in this process. A second call does nothing."""
    for command in COMMANDS:
        logging.getLogger(f"fairseq_cli.{command}").addFilter(HELD)
    replace_once(fairseq.tasks, "setup_task", _checked)
    replace_once(fairseq.models, "build_model", _built)
    replace_once(checkpoint_utils, "load_model_ensemble_and_task", _built)


def _checked(original: Callable, *arguments: Any, **keywords: Any) -> Any:
    """Call a function that checks options; drop what is held if it refuses one."""
    try:
        return original(*arguments, **keywords)
    except Refusal:
        HELD.records.clear()  # its sentence is enough
        raise
    except BaseException:
        HELD.release()
        raise


def _built(original: Callable, *arguments: Any, **keywords: Any) -> Any:
    """As :func:`_checked`, for the last of these functions: then log what is held."""
    result = _checked(original, *arguments, **keywords)
    HELD.release()
    return result
