"""A training saves a checkpoint and exits on SIGINT, SIGTERM or SIGUSR1, and resumes from it."""

import functools
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
from fairseq.tasks import FairseqTask

from lrpe_fairseq.compat import preemption
from lrpe_fairseq.compat.preemption import SAVED, TOGETHER
from lrpe_fairseq.experiments.runner.processes import Children, Stopped
from tests.end_to_end.commands import (
    LAUNCHER,
    SMALL,
    TRAINING,
    assert_same,
    environment,
    hydra,
    run,
    run_here,
    saved,
    side_by_side,
    signalled,
    user_dir,
    words,
    yaml_config,
)
from tests.end_to_end.forked import PATIENCE, run_forked
from tests.tiny_table import processes, wait_until

pytestmark = pytest.mark.end_to_end

TOLD_AT, UPDATES = 25, 45  # no update at which anything is saved anyway; an epoch has 33
LENGTH = f"--max-update {UPDATES} --save-interval-updates 20 --update-epoch-batch-itr True"
LOGGED = "--log-interval 1"
TOLD_TWICE = """
import os, signal, time
import lrpe_fairseq.models
from fairseq.tasks.fairseq_task import FairseqTask
step, done = FairseqTask.train_step, []
def told(*given, **named):
    done.append(given)
    if len(done) == 3:
        os.kill(os.getpid(), {number})
        time.sleep({seconds})
        os.kill(os.getpid(), {number})
    return step(*given, **named)
FairseqTask.train_step = told
"""


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


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
def test_a_training_that_is_told_to_end_saves_and_resumes_as_if_nothing_had_been(
    corpus, undisturbed, tmp_path, number
):
    command = training(corpus, tmp_path)
    told = words([*command, signalled(tmp_path / "told", TOLD_AT, number)])
    ended = run_forked("fairseq_cli.train", told)
    assert ended.returncode == SAVED
    assert f"lrpe_fairseq: {number}: saving a checkpoint after this update" in ended.stderr
    reached = saved(tmp_path / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"]
    assert reached == TOLD_AT
    run("fairseq_cli.train", *command)
    for name in ("checkpoint_last.pt", "checkpoint_best.pt"):
        ours, theirs = saved(tmp_path / name), saved(undisturbed / name)
        assert_same(ours["model"], theirs["model"])
        assert ours["extra_state"]["best"] == theirs["extra_state"]["best"]


def of_hydra(corpus, folder, plugin, **more):
    """Arguments of ``fairseq-hydra-train`` for a training with ``plugin``."""
    model = {"decoder_layers": 1, "decoder_embed_dim": 32, "decoder_ffn_embed_dim": 32}
    config = yaml_config(corpus, folder / "saved", model)
    config["common"] |= {"user_dir": str(plugin), "log_interval": 1}
    config["optimization"]["max_update"] = UPDATES
    config["checkpoint"]["save_interval_updates"] = 0
    config["dataset"] |= more
    return words(hydra(folder / "config", config))


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
def test_a_training_of_hydra_saves_when_it_is_told_to_end(corpus, tmp_path, number):
    signalled(tmp_path / "told", TOLD_AT, number)
    ended = run_forked("fairseq_cli.hydra_train", of_hydra(corpus, tmp_path, tmp_path / "told"))
    assert ended.returncode == SAVED, ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr
    last = saved(tmp_path / "saved" / "checkpoint_last.pt")
    assert last["optimizer_history"][-1]["num_updates"] == TOLD_AT


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_training_at_once(corpus, tmp_path, number):
    user_dir(tmp_path / "told", TOLD_TWICE.format(seconds=TOGETHER + 0.1, number=int(number)))
    ended = run_forked("fairseq_cli.hydra_train", of_hydra(corpus, tmp_path, tmp_path / "told"))
    assert ended.returncode == -number
    assert "a second signal stops at once" in ended.stderr
    assert not (tmp_path / "saved" / "checkpoint_last.pt").exists()


def test_a_signal_that_is_sent_twice_is_one_signal(corpus, tmp_path):
    user_dir(tmp_path / "told", TOLD_TWICE.format(seconds=0, number=int(signal.SIGINT)))
    ended = run_forked("fairseq_cli.hydra_train", of_hydra(corpus, tmp_path, tmp_path / "told"))
    assert ended.returncode == SAVED
    assert (tmp_path / "saved" / "checkpoint_last.pt").exists()


def test_ctrl_c_reaches_every_process_of_a_terminal_and_the_training_saves(corpus, tmp_path):
    """It goes to the processes that load data as well, of training and of validation."""
    user_dir(tmp_path / "slow", SLOW)
    plugin = tmp_path / "slow"
    command = of_hydra(corpus, tmp_path, plugin, num_workers=1, validate_interval_updates=4)
    command = [sys.executable, "-m", "fairseq_cli.hydra_train", *command]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, env=environment(), start_new_session=True, **pipes)
    wait_for(process, 5)
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == SAVED, said
    assert "Traceback" not in said
    assert (tmp_path / "saved" / "checkpoint_last.pt").exists()


def test_handlers_and_signals_do_not_outlive_a_training(corpus, tmp_path):
    before = [signal.getsignal(number) for number in preemption.SIGNALS]
    short = [*training(corpus, tmp_path), "--disable-validation"]
    step = FairseqTask.train_step

    def told(*given, **named):
        os.kill(os.getpid(), signal.SIGINT)
        return step(*given, **named)

    with mock.patch.object(FairseqTask, "train_step", told), pytest.raises(SystemExit) as ended:
        run_here("fairseq_cli.train", *short)
    assert ended.value.code == SAVED
    run_here("fairseq_cli.train", *short, "--max-update 2")
    reached = saved(tmp_path / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"]
    assert reached == 2
    assert [signal.getsignal(number) for number in preemption.SIGNALS] == before


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


@pytest.mark.parametrize(
    "number", [signal.SIGUSR1, pytest.param(signal.SIGINT, marks=pytest.mark.exhaustive)]
)
def test_processes_of_several_gpus_save_although_the_signal_ends_their_parent(
    corpus, tmp_path, number
):
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
        if number == signal.SIGINT:  # as of a terminal, to all
            (group,) = children._alive
            os.killpg(group, signal.SIGINT)
            wait_until(lambda: "received a signal" in log.read_text(), 60)
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


def test_a_process_that_loses_another_one_says_so_in_one_sentence(corpus, tmp_path):
    killed = """
import os, signal
import lrpe_fairseq.models
from fairseq.trainer import Trainer
step = Trainer.train_step
def lost(trainer, *given, **named):
    if trainer.get_num_updates() == 3 and trainer.data_parallel_rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(trainer, *given, **named)
Trainer.train_step = lost
"""
    plugin = user_dir(tmp_path / "killed", killed)
    group = f"--distributed-init-method file://{tmp_path}/group --distributed-no-spawn "
    group += "--distributed-world-size 2 --distributed-backend gloo --ddp-backend legacy_ddp"
    command = training(corpus, tmp_path / "saved", plugin, group, "--disable-validation")
    ranks = [words([*command, "--distributed-rank", rank]) for rank in range(2)]
    first, second = side_by_side(
        *(functools.partial(run_forked, "fairseq_cli.train", rank) for rank in ranks)
    )
    assert second.returncode == -signal.SIGKILL
    assert first.returncode == 1
    assert "Traceback" not in first.stdout + first.stderr
    said = [line for line in first.stderr.splitlines() if line.startswith("lrpe_fairseq: ")]
    assert len(said) == 1
    assert "another process of this training ended or does not answer" in said[0]


@pytest.mark.exhaustive
def test_ctrl_c_on_the_launcher_saves_although_it_may_come_twice(corpus, tmp_path):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = ["bash", str(LAUNCHER), *words(training(corpus, tmp_path))]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    given = {"env": environment(PROCS="2", PATH=path), "start_new_session": True, **pipes}
    process = subprocess.Popen(command, **given)
    wait_for(process, 5)
    ranks = processes(str(tmp_path), "bin/fairseq-train")[-2:]
    for number in (process.pid, *ranks):  # as a terminal does; the launcher sends it on
        os.kill(number, signal.SIGINT)
    said, _ = process.communicate(timeout=PATIENCE)
    reached = saved(tmp_path / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"]
    assert f"received a signal: saved at update {reached}" in said
    assert 5 <= reached < UPDATES
