"""The log of a training begins with what a reader needs."""

import logging

import pytest
from torch import nn

from lrpe_fairseq.compat import short_log


def logged(name, message, caplog):
    caplog.set_level(logging.INFO)
    caplog.clear()
    logging.getLogger(name).info(message)
    return bool(caplog.records)


def test_a_model_is_not_printed_and_its_size_is(caplog):
    assert not logged("fairseq_cli.train", nn.Linear(2, 2), caplog)
    assert logged("fairseq_cli.train", "num. shared model params: 664,332", caplog)


@pytest.mark.parametrize(
    ("name", "message"),
    [(n, start) for n, starts in short_log.LEFT_OUT.items() for start in starts],
)
def test_what_says_nothing_about_a_training_is_left_out(name, message, caplog):
    assert not logged(name, f"{message} = True", caplog)
    assert logged(name, f"Loaded checkpoint, {message}", caplog)


def test_the_level_debug_shows_everything(monkeypatch):
    monkeypatch.setenv("LOGLEVEL", "debug")
    monkeypatch.setattr(short_log, "LEFT_OUT", {"fairseq_cli.other": ("a",)})
    short_log.shorten_the_log()
    assert logging.getLogger("fairseq_cli.other").filters == []
