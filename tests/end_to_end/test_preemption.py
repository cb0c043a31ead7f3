"""A training saves a checkpoint and exits on SIGTERM or SIGUSR1, and resumes from it."""

import contextlib
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
    Corpus,
    environment,
    finish,
    run,
    saved,
    words,
)
from tests.end_to_end.forked import run_forked
from tests.end_to_end.test_language_model import assert_same_tensors
from tests.tiny_table import wait_until

pytestmark = pytest.mark.end_to_end

TOLD_AT, UPDATES = 25, 45  # no update at which anything is saved anyway; an epoch has 33
LENGTH = f"--max-update {UPDATES} --save-interval-updates 20 --update-epoch-batch-itr True"
LOGGED = "--log-interval 1"


def training(corpus: Corpus, folder: Path, *more: object) -> list[object]:
    return [corpus.data, TRAINING, SMALL, LENGTH, LOGGED, *more, "--save-dir", folder]


def wait_for(process: subprocess.Popen, update: int) -> None:
    """Return when the log has come to ``update``."""
    for line in process.stdout:
        if f"num_updates={update}," in line.replace(" ", ""):
            return


def trainers(folder: Path) -> list[int]:
    """Processes that train into ``folder``, without those that started them."""
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            said = command.read_text().split("\0")
            if str(folder) in said and any(word.endswith("bin/fairseq-train") for word in said[:3]):
                found.append(int(command.parent.name))
    return found


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    run("fairseq_cli.train", *training(corpus, folder))
    return folder


def user_dir(folder: Path, code: str) -> str:
    """The option for a plugin that does more than ours."""
    folder.mkdir()
    (folder / "__init__.py").write_text(code)
    return f"--user-dir {folder}"


TOLD = f"""
import os, signal
import lrpe_fairseq.models
from fairseq.tasks.fairseq_task import FairseqTask
step, done = FairseqTask.train_step, []
def told(*given, **named):
    done.append(given)
    if len(done) == {TOLD_AT}:
        os.kill(os.getpid(), signal.SIGTERM)  # SIGUSR1: below
    return step(*given, **named)
FairseqTask.train_step = told
"""


def test_a_training_that_is_told_to_end_saves_and_resumes_as_if_nothing_had_been(
    corpus, undisturbed, tmp_path
):
    command = training(corpus, tmp_path)
    told = words([*command, user_dir(tmp_path / "told", TOLD)])
    assert run_forked("fairseq_cli.train", told).returncode == SAVED
    reached = saved(tmp_path / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"]
    assert reached == TOLD_AT
    run("fairseq_cli.train", *command)
    for name in ("checkpoint_last.pt", "checkpoint_best.pt"):
        ours, theirs = saved(tmp_path / name), saved(undisturbed / name)
        assert_same_tensors(ours["model"], theirs["model"])
        assert ours["extra_state"]["best"] == theirs["extra_state"]["best"]


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


def said(log: Path) -> str:
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


def test_of_two_processes_one_is_told_and_both_end_at_the_same_update(corpus, tmp_path):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = ["bash", str(LAUNCHER), *words(training(corpus, tmp_path))]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, env=environment(PROCS="2", PATH=path), **pipes)
    wait_for(process, 5)
    ranks = trainers(tmp_path)
    assert len(ranks) == 2
    os.kill(ranks[0], signal.SIGUSR1)
    assert finish(process).returncode != 0
    reached = saved(tmp_path / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"]
    assert 5 <= reached < UPDATES
