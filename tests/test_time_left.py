"""The sentence that a training says first."""

import logging
from types import SimpleNamespace

import pytest
import torch
from fairseq.trainer import Trainer
from torch import nn

from lrpe_fairseq.compat import time_left
from tests.end_to_end.commands import configured


class Counting(SimpleNamespace):
    """A trainer of a model with 1.5 M parameters that counts its updates."""

    is_data_parallel_master = True

    def get_num_updates(self):
        return self.updates


def trainer(updates=0, last=600):
    model = nn.Embedding(15_000, 100)
    cfg = SimpleNamespace(optimization=SimpleNamespace(max_update=last))
    return Counting(updates=updates, cfg=cfg, model=model)


def train(one, count, seconds, monkeypatch):
    """Train ``count`` updates of so many seconds each."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(time_left.time, "monotonic", lambda: clock.now)

    def step(trainer):
        trainer.updates += 1
        clock.now += seconds if trainer.updates % 100 > 3 else 60  # the first ones are slow

    for _ in range(count):
        time_left._trained(step, one)


@pytest.mark.parametrize(
    ("seconds", "last", "sentence"),
    [
        (
            0.5,
            600,
            "1.5 M parameters; update 10 of 600; 2.0 updates per second; about 5 minutes left",
        ),
        (
            4.0,
            16_010,
            "1.5 M parameters; update 10 of 16010; 4.0 s per update; about 17.8 hours left",
        ),
        (0.5, 0, "1.5 M parameters; 2.0 updates per second; no last update is set (max_update)"),
    ],
)
def test_after_ten_updates_a_training_says_how_long_it_takes(
    seconds, last, sentence, monkeypatch, caplog
):
    caplog.set_level(logging.INFO)
    train(trainer(last=last), 30, seconds, monkeypatch)
    assert [record.getMessage() for record in caplog.records] == [sentence]


def test_a_resumed_training_says_what_is_left(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    train(trainer(updates=500), 12, 1.0, monkeypatch)
    assert "update 510 of 600; 1.0 updates per second; about 90 seconds left" in caplog.text


@pytest.mark.parametrize("half", ["bf16", "fp16", ""])
def test_a_configuration_for_a_gpu_warns_where_there_is_none(half, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cfg = SimpleNamespace(common={"bf16": half == "bf16", "fp16": half == "fp16"})
    time_left._started(lambda *arguments: None, None, cfg)
    assert ("this configuration is for a GPU" in caplog.text) == bool(half)


def test_fairseqs_trainer_says_it():
    configured("data", "--task language_modeling", "--arch lrpe_lm_tiny")
    assert Trainer.train_step.replacement is time_left._trained
    assert Trainer.__init__.replacement is time_left._started
