"""What a run of fairseq leaves in module globals, and the value that it returns."""

import logging
import math
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("fairseq")

import fairseq_cli.train
import torch
from fairseq import checkpoint_utils
from fairseq.distributed import utils as distributed_utils
from fairseq.logging import metrics, progress_bar

import lrpe_fairseq.models
from lrpe_fairseq.compat import run_state
from lrpe_fairseq.kernels import loader

ALONE = {"distributed_init_method": None, "distributed_no_spawn": False}
SPAWNED = {"distributed_init_method": "tcp://localhost:1", "distributed_no_spawn": False}
JOINED = {"distributed_init_method": "env://", "distributed_no_spawn": True}


def configured(folder, *, maximize=False, distributed=ALONE):
    """The parts of fairseq's configuration that :mod:`run_state` reads."""
    checkpoint = {"maximize_best_checkpoint_metric": maximize, "best_checkpoint_metric": "bleu"}
    return SimpleNamespace(
        checkpoint=SimpleNamespace(save_dir=str(folder), **checkpoint),
        distributed_training=SimpleNamespace(**distributed),
    )


def returned():
    """What fairseq-hydra-train reads after a training."""
    return metrics.get_smoothed_value("valid", "bleu")


@pytest.fixture
def training(monkeypatch):
    """Make fairseq's function for a training do something else."""

    def make(action):
        def main(cfg):
            action()

        main.__module__ = "fairseq_cli.train"
        return main

    monkeypatch.setattr(distributed_utils, "call_main", lambda cfg, main: main(cfg))
    run_state.give_every_run_a_state_of_its_own()
    return make


@pytest.mark.parametrize(
    ("known", "maximize", "distributed", "value"),
    [
        (3.5, False, ALONE, 3.5),
        (None, False, ALONE, math.inf),
        (None, True, ALONE, -math.inf),
        (math.nan, True, ALONE, -math.inf),
        (None, False, SPAWNED, 2.5),  # that of the checkpoint
        (None, False, JOINED, math.inf),
        (4.5, False, JOINED, 4.5),
    ],
)
def test_a_training_returns_its_best_score_or_the_worst_number(
    training, tmp_path, known, maximize, distributed, value
):
    torch.save({"extra_state": {"best": 2.5}}, tmp_path / "checkpoint_last.pt")

    def train():
        if known is not None:
            checkpoint_utils.save_checkpoint.best = known
        with metrics.aggregate("valid"):  # fairseq's mean of all validations
            metrics.log_scalar("loss", 7.5)
            metrics.log_derived("bleu", lambda meters: meters["loss"].avg)

    cfg = configured(tmp_path, maximize=maximize, distributed=distributed)
    distributed_utils.call_main(cfg, training(train))
    assert returned() == value


def test_a_training_that_fails_returns_the_worst_number_and_keeps_its_error(training, tmp_path):
    (tmp_path / "checkpoint_last.pt").write_bytes(b"damaged")

    def train():
        checkpoint_utils.save_checkpoint.best = 3.5
        raise FloatingPointError("gradients are Nan/Inf")

    with pytest.raises(FloatingPointError, match="gradients are Nan/Inf"):
        distributed_utils.call_main(configured(tmp_path, distributed=SPAWNED), training(train))
    assert returned() == math.inf


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_a_run_is_left_for_the_next_one(training, tmp_path, monkeypatch, fails):
    closed = []
    loggers = [logging.getLogger(name) for name in run_state.LOGGERS]
    handlers = [list(logger.handlers) for logger in loggers]

    def train():
        checkpoint_utils.save_checkpoint.best = 3.5
        fairseq_cli.train.should_stop_early.best = 3.5
        fairseq_cli.train.should_stop_early.num_runs = 2
        writer = SimpleNamespace(close=lambda: closed.append("curves"))
        progress_bar._tensorboard_writers["train"] = writer
        loader.SERVED["softmax attention"] = ["pytorch on cpu"]
        for logger in loggers:
            logger.addHandler(logging.FileHandler(tmp_path / "log.txt"))
        if fails:
            raise KeyboardInterrupt

    def finish(exit_code):
        closed.append(exit_code)

    tracked = SimpleNamespace(cache_clear=lambda: closed.append("aim"))
    monkeypatch.setattr(progress_bar, "wandb", SimpleNamespace(finish=finish))
    monkeypatch.setattr(progress_bar, "get_aim_run", tracked)
    try:
        distributed_utils.call_main(configured(tmp_path), training(train))
    except KeyboardInterrupt:
        assert fails
    assert not hasattr(checkpoint_utils.save_checkpoint, "best")
    assert not vars(fairseq_cli.train.should_stop_early)
    assert not progress_bar._tensorboard_writers
    assert not loader.SERVED
    assert [list(logger.handlers) for logger in loggers] == handlers
    assert sorted(map(str, closed)) == [str(int(fails)), "aim", "curves"]


def test_every_function_that_says_something_once_is_known():
    assert lrpe_fairseq.models
    ours = [module for name, module in sys.modules.items() if name.startswith("lrpe_fairseq.")]
    found = {
        (module.__name__, name)
        for module in ours
        for name, value in vars(module).items()
        if hasattr(value, "cache_clear") and ("warn" in name or "once" in name)
    }
    assert found == set(run_state.SAID_ONCE)


def test_an_evaluation_has_no_value_and_no_tracker(training, tmp_path, monkeypatch):
    monkeypatch.setattr(progress_bar, "wandb", None)
    monkeypatch.setattr(run_state, "_record", lambda *_: pytest.fail("it has a value"))
    main = training(lambda: None)
    main.__module__ = "fairseq_cli.eval_lm"
    distributed_utils.call_main(configured(tmp_path), main)


def test_the_fix_is_applied_once():
    before = distributed_utils.call_main
    run_state.give_every_run_a_state_of_its_own()
    assert distributed_utils.call_main is before
