"""kill -9 at any moment, of the runner or of what it started: nothing lost, nothing twice."""

import contextlib
import os
import random
import signal
import subprocess
import time

import pytest

from lrpe_fairseq.experiments.records.runs import read_runs
from tests.tiny_table import (
    BEYOND,
    assert_same_results,
    command,
    environment,
    processes,
    reached,
    repository,
    run_table,
    wait_until,
)

FIRST = "tiny-Base-linear-seed1"
KILLS = 10


def after_random_seconds(rng):
    """True from one to nine seconds on."""
    end = time.monotonic() + rng.uniform(1, 9)
    return lambda folder: time.monotonic() > end


def kill_at(folder, there, everything):
    """Start the table and kill -9 its runner once ``there``; or all of its processes."""
    runner = subprocess.Popen(
        command(folder, "--jobs", "2"),
        env=environment(folder),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_until(lambda: there(folder) or runner.poll() is not None, 240)
    victims = processes(f"{folder}/") if everything else []
    for pid in {runner.pid, *victims}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    runner.wait()
    read_runs(folder / "results" / "runs")  # whole files only, each in its place


def assert_survived(folder, undisturbed):
    """The next run of the table ends as if nothing had happened."""
    run_table(folder, "--jobs", "2")
    assert_same_results(folder, undisturbed)
    assert not list((folder / "results").rglob("*.tmp"))


def test_a_table_survives_kill_9_in_every_stage_of_a_run(corpus, undisturbed_table, tmp_path):
    folder = repository(tmp_path / "checkout", corpus)
    kill_at(folder, lambda folder: reached(folder, FIRST, BEYOND), everything=False)
    evaluation = "eval-checkpoint_best-valid-blocks.log"
    kill_at(folder, lambda folder: any((folder / "runs").rglob(evaluation)), everything=True)
    logs = [path.with_name("train.log") for path in (folder / "runs").rglob("eval-*.log")]
    trained = {log: log.read_bytes() for log in logs}
    assert trained
    assert_survived(folder, undisturbed_table)
    assert {log: log.read_bytes() for log in trained} == trained  # nothing was trained again


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_a_table_survives_kill_9_at_ten_random_moments(corpus, undisturbed_table, tmp_path):
    folder, rng = repository(tmp_path / "checkout", corpus), random.Random(0)
    for _ in range(KILLS):
        kill_at(folder, after_random_seconds(rng), rng.random() < 0.5)
    assert_survived(folder, undisturbed_table)
