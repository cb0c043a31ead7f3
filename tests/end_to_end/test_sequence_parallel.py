"""``--sequence-parallel 2``: two processes that share every text train as one does."""

import shlex
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.end_to_end.cases import sampled
from tests.end_to_end.commands import (
    SMALL,
    TRAINING,
    at_once,
    build,
    environment,
    run_here,
    saved,
    user_dir,
    words,
)
from tests.end_to_end.forked import run_forked

pytestmark = pytest.mark.end_to_end

UPDATES = 6
MODELS = {
    "hybrid": "--attention-type linear,softmax --position-encoding gated:lrpe-type2",
    "documents": "--attention-type linear --position-encoding path --document-boundary w1 "
    "--attention-normalizer layernorm",
    "selective": "--attention-type linear,softmax --position-encoding selective:rope "
    "--checkpoint-activations --decoder-learned-pos",
    "spe": "--attention-type linear,softmax --position-encoding spe",
    "lines": "--attention-type linear --position-encoding fox --sample-break-mode eos",
}
DEFAULT = [(name,) for name in ("hybrid", "documents")]


def command(corpus, folder, model, updates=UPDATES, *more):
    """The options of a training by plain gradient steps, in which rounding stays rounding."""
    by_steps = f"--optimizer nag --lr 0.2 --clip-norm 1 --max-update {updates} --save-dir {folder}"
    length = "--tokens-per-sample 31 --dropout 0.1 --activation-dropout 0.1"
    return [corpus.data, TRAINING, SMALL, MODELS[model], by_steps, length, *more]


def by_two(given, group, processes=2):
    """Train in processes over gloo, of which two share a text; what they returned."""
    more = f"--distributed-world-size {processes} --distributed-backend gloo "
    more += "--distributed-no-spawn --ddp-backend legacy_ddp --sequence-parallel 2 "
    more += f"--distributed-init-method file://{group}"
    started = [words([*given, more, "--distributed-rank", rank]) for rank in range(processes)]
    return at_once(*(partial(run_forked, "fairseq_cli.train", rank) for rank in started))


def succeeded(ended):
    for process in ended:
        assert process.returncode == 0, process.stdout + process.stderr


def state(folder, name="checkpoint_last"):
    """The weights, and the means of the last values that were logged."""
    found = saved(folder / f"{name}.pt")
    meters = found["extra_state"]["metrics"]
    means = {
        f"{kind} {key}": float(meter["val"])
        for kind in ("train", "valid")
        for _, key, _, meter in meters[kind]
        if key in ("loss", "nll_loss") and "val" in meter
    }
    return found["model"], means


@pytest.mark.parametrize("model", sampled([(name,) for name in MODELS], DEFAULT))
def test_two_processes_train_as_one_with_its_dropout_and_its_loss(corpus, tmp_path, model):
    alone, together = tmp_path / "alone", tmp_path / "together"
    run_here("fairseq_cli.train", *command(corpus, alone, model))
    succeeded(by_two(command(corpus, together, model), tmp_path / "group"))
    (ours, logged), (theirs, expected) = state(together), state(alone)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-6)
    assert logged == pytest.approx(expected, rel=1e-5)
    assert "train loss" in logged


def test_two_groups_of_two_processes_train_as_one_process_with_twice_the_batches(corpus, tmp_path):
    alone, together = tmp_path / "alone", tmp_path / "together"
    # each group draws its own dropout
    plain = "--dropout 0 --activation-dropout 0"
    run_here("fairseq_cli.train", *command(corpus, alone, "hybrid"), plain, "--update-freq 2")
    succeeded(by_two([*command(corpus, together, "hybrid"), plain], tmp_path / "group", 4))
    (ours, logged), (theirs, expected) = state(together), state(alone)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-6)
    assert logged["train loss"] == pytest.approx(expected["train loss"], rel=1e-5)
    losses = (saved(f / "checkpoint_last.pt")["extra_state"]["val_loss"] for f in (together, alone))
    assert next(losses) == pytest.approx(next(losses), abs=1e-3)  # fairseq rounds it


def test_a_killed_training_resumes_to_the_weights_of_the_uninterrupted_one(corpus, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    succeeded(by_two(command(corpus, whole, "hybrid"), tmp_path / "one"))
    killed = f"""
import os, signal
import lrpe_fairseq.models
from fairseq.trainer import Trainer
step = Trainer.train_step
def lost(trainer, *given, **named):
    if trainer.get_num_updates() == {UPDATES // 2} and trainer.data_parallel_rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(trainer, *given, **named)
Trainer.train_step = lost
"""
    given = command(corpus, cut, "hybrid", UPDATES, "--save-interval-updates 1")
    plugin = user_dir(tmp_path / "killed", killed)
    first, second = by_two([*given, plugin], tmp_path / "two")
    assert second.returncode == -signal.SIGKILL
    assert first.returncode == 1
    assert "another process of this training ended or does not answer" in first.stderr
    succeeded(by_two(given, tmp_path / "three"))
    torch.testing.assert_close(state(cut)[0], state(whole)[0], rtol=0, atol=0)


def refused(*given):
    """What a command that must not train says."""
    ended = run_forked("fairseq_cli.train", words(given))
    assert ended.returncode == 2, ended.stdout + ended.stderr
    (said,) = [line for line in ended.stderr.splitlines() if line.startswith("lrpe_fairseq: ")]
    return said


def test_one_process_cannot_share_a_text(corpus, tmp_path):
    given = command(corpus, tmp_path / "saved", "hybrid", 1, "--sequence-parallel 2")
    assert "--sequence-parallel 2 needs 2 processes or a multiple" in refused(*given)


def test_a_memory_of_segments_and_a_bad_number_are_refused(corpus, tmp_path):
    given = command(corpus, tmp_path / "saved", "hybrid", 1)
    more = "--sequence-parallel 2 --attention-type softmax --memory-length 4 "
    more += "--no-token-positional-embeddings"
    assert "cannot split a text with a memory of earlier segments" in refused(*given, more)
    assert "--sequence-parallel must be at least 1" in refused(*given, "--sequence-parallel 0")


def test_a_checkpoint_of_several_processes_is_evaluated_by_one(corpus, tmp_path):
    given = command(corpus, tmp_path / "saved", "hybrid", 1)
    succeeded(by_two(given, tmp_path / "group"))
    checkpoint = shlex.quote(str(tmp_path / "saved" / "checkpoint_last.pt"))
    said = run_here(
        "fairseq_cli.eval_lm", corpus.data, TRAINING.split(" --task")[0], f"--path {checkpoint}",
        "--tokens-per-sample 31 --batch-size 4",
    )  # fmt: skip
    assert said is not None


def test_a_model_that_is_built_for_several_processes_computes_a_whole_text_alone(corpus):
    tokens = torch.randint(20, 24, (2, 12), generator=torch.Generator().manual_seed(0))
    outs = []
    for ranks in (1, 2):
        model, _, _ = build(corpus, SMALL, MODELS["hybrid"], f"--sequence-parallel {ranks}")
        outs.append(model.eval()(tokens)[0])
    torch.testing.assert_close(*outs, rtol=0, atol=0)


@pytest.mark.exhaustive
def test_torchrun_starts_one_training_whose_processes_share_a_text(corpus, tmp_path):
    alone, together = tmp_path / "alone", tmp_path / "together"
    run_here("fairseq_cli.train", *command(corpus, alone, "hybrid"))
    programs = Path(sys.executable).parent
    launch = [programs / "torchrun", "--standalone --nproc-per-node 2", programs / "fairseq-train"]
    given = words([*launch, *command(corpus, together, "hybrid"), "--sequence-parallel 2"])
    ended = subprocess.run(given, env=environment(), capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    torch.testing.assert_close(state(together)[0], state(alone)[0], rtol=1e-4, atol=2e-6)
