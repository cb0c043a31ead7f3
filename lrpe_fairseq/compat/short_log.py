"""The log of a training begins with what a reader needs."""

import logging
import os
import warnings

from torch import nn

LEFT_OUT = {
    "fairseq_cli.train": (
        "begin dry-run validation",
        "num. expert model params: 0",
        "Start iterating over samples",
    ),
    "fairseq.data.iterators": ("grouped total_num_itrs",),
    "fairseq.tasks.fairseq_task": (
        "can_reuse_epoch_itr",
        "creating new batches",
        "reuse_dataloader",
        "rebuild_batches",
    ),
    "fairseq.trainer": ("begin training epoch", "detected shared parameter", "Preparing to load"),
}
"""Logger -> the starts of its messages that are left out."""


class Short(logging.Filter):
    """Leaves out messages by their starts, and the print of a model's modules."""

    def __init__(self, starts: tuple[str, ...]) -> None:
        super().__init__()
        self.starts = starts

    def filter(self, record: logging.LogRecord) -> bool:
        """True for a record that is logged."""
        return not (isinstance(record.msg, nn.Module) or str(record.msg).startswith(self.starts))


def shorten_the_log() -> None:
    """Leave out of a log what says nothing about a training; ``LOGLEVEL=DEBUG`` shows it.

    Break: fairseq prints every module of a model and what it decides about its batches, so that the
    first update stands below 60 to 100 lines. torch warns there of calls that fairseq makes.
    """
    if os.environ.get("LOGLEVEL", "").upper() == "DEBUG":
        return
    for name, starts in LEFT_OUT.items():
        logger = logging.getLogger(name)
        if not any(isinstance(known, Short) for known in logger.filters):
            logger.addFilter(Short(starts))
    warnings.filterwarnings("ignore", "'pin_memory' argument is set as true", UserWarning)
    warnings.filterwarnings("ignore", r"`torch\.cuda\.amp\.autocast", FutureWarning)
