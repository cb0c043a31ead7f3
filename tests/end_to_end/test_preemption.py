"""A training saves a checkpoint and exits on SIGTERM or SIGUSR1, and resumes from it."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lrpe_fairseq.experiments.runner.processes import Children, Stopped
from lrpe_fairseq.preemption import SAVED
from tests.end_to_end.commands import (
    LAUNCHER,
    SMALL,
    TRAINING,
    assert_same,
    environment,
    run,
    saved,
    signalled,
    user_dir,
    words,
)
from tests.end_to_end.forked import PATIENCE, run_forked
from tests.tiny_table import processes, wait_until

pytestmark = pytest.mark.end_to_end

TOLD_AT, UPDATES = 25, 45  # no update at which anything is saved anyway; an epoch has 33
LENGTH = f"--max-update {UPDATES} --save-interval-updates 20 --update-epoch-batch-itr True"
LOGGED = "--log-interval 1"


def training(corpus, folder, *more):
    return [corpus.data, TRAINING, SMALL, LENGTH, LOGGED, *more, "--save-dir", folder]


def wait_for(process, update):
    """Return when the log has come to ``update``."""
    for line in process.stdout:
        if f"num_updates={update}," in line.replace(" ", ""):
            return


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    run("fairseq_cli.train", *training(corpus, folder))
    return folder


def test_a_training_that_is_told_to_end_saves_and_resumes_as_if_nothing_had_been(
    corpus, undisturbed, tmp_path
):
    command = training(corpus, tmp_path)
    told = words([*command, signalled(tmp_path / "told", TOLD_AT, "SIGTERM")])
    assert run_forked("fairseq_cli.train", told).returncode == SAVED
    reached = saved(tmp_path / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"]
    assert reached == TOLD_AT
    run("fairseq_cli.train", *command)
    for name in ("checkpoint_last.pt", "checkpoint_best.pt"):
        ours, theirs = saved(tmp_path / name), saved(undisturbed / name)
        assert_same(ours["model"], theirs["model"])
        assert ours["extra_state"]["best"] == theirs["extra_state"]["best"]


def test_a_finished_training_is_left_as_it_is(corpus, undisturbed):
    paths = sorted(undisturbed.glob("*.pt"))
    before = [path.read_bytes() for path in paths]
    done = run_forked("fairseq_cli.train", words(training(corpus, undisturbed)))
    assert f"the checkpoint has {UPDATES} of {UPDATES} updates" in done.stdout + done.stderr
    assert sorted(undisturbed.glob("*.pt")) == paths
    assert [path.read_bytes() for path in paths] == before


SPAWNED = """
import sys, torch
torch.cuda.device_count = lambda: 2  # fairseq starts a process for each, here on the CPU
import fairseq_cli.train
fairseq_cli.train.cli_main()
"""
SLOW = """
import time
import lrpe_fairseq.models
from fairseq.tasks.fairseq_task import FairseqTask
step = FairseqTask.train_step
FairseqTask.train_step = lambda *given, **named: time.sleep(0.4) or step(*given, **named)
"""


def said(log):
    return log.read_text().replace(" ", "")


def test_processes_of_several_gpus_save_although_the_signal_ends_their_parent(corpus, tmp_path):
    # a fast update ends before its process is interrupted
    group = user_dir(tmp_path / "slow", SLOW)
    group += f" --distributed-init-method file://{tmp_path}/group"
    group += " --distributed-world-size 2 --distributed-backend gloo --ddp-backend legacy_ddp"
    command = [sys.executable, "-c", SPAWNED, *words(training(corpus, tmp_path, group))]
    children, log = Children(), tmp_path / "log"
    given = {"cwd": tmp_path, "environment": environment()}
    with ThreadPoolExecutor() as pool:
        ended = pool.submit(children.run, command, log, **given)
        wait_until(lambda: ended.done() or (log.exists() and "num_updates=5," in said(log)), 120)
        time.sleep(0.2)  # into the next update
        children.stop()
        with pytest.raises(Stopped):
            ended.result()
    reached = saved(tmp_path / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"]
    assert f"received a signal: saved at update {reached}" in log.read_text()


@pytest.mark.exhaustive  # by the launcher; above, both are told
def test_of_two_processes_one_is_told_and_both_end_at_the_same_update(corpus, tmp_path):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = ["bash", str(LAUNCHER), *words(training(corpus, tmp_path))]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, env=environment(PROCS="2", PATH=path), **pipes)
    wait_for(process, 5)
    rank = processes(str(tmp_path), "bin/fairseq-train")[-1]  # after those that started it
    os.kill(rank, signal.SIGUSR1)
    process.communicate(timeout=PATIENCE)
    assert process.returncode != 0
    reached = saved(tmp_path / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"]
    assert 5 <= reached < UPDATES
