"""A training saves a checkpoint and exits on SIGTERM or SIGUSR1, and resumes from it."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

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
    start,
    words,
)
from tests.end_to_end.test_language_model import assert_same_tensors

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
def undisturbed(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    run("fairseq_cli.train", *training(corpus, folder))
    return folder


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_training_that_is_told_to_end_saves_and_resumes_as_if_nothing_had_been(
    corpus: Corpus, undisturbed: Path, tmp_path: Path, number: signal.Signals
) -> None:
    command = training(corpus, tmp_path)
    process = start("fairseq_cli.train", *command, stderr=subprocess.STDOUT)
    wait_for(process, TOLD_AT)
    process.send_signal(number)
    assert finish(process).returncode == SAVED
    reached = saved(tmp_path / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"]
    assert TOLD_AT <= reached < UPDATES
    run("fairseq_cli.train", *command)
    for name in ("checkpoint_last.pt", "checkpoint_best.pt"):
        ours, theirs = saved(tmp_path / name), saved(undisturbed / name)
        assert_same_tensors(ours["model"], theirs["model"])
        assert ours["extra_state"]["best"] == theirs["extra_state"]["best"]


def test_of_two_processes_one_is_told_and_both_end_at_the_same_update(
    corpus: Corpus, tmp_path: Path
) -> None:
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
