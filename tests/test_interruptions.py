"""kill -9 at any moment, of the runner or of what it started: nothing lost, nothing twice."""

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lrpe_fairseq.experiments.records.runs import read_runs, write_run
from tests.test_experiments import a_record
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
POINTS: dict[str, tuple[Callable[[Path], bool], bool]] = {  # moment -> is it there, all killed
    "after the first checkpoint": (lambda folder: reached(folder, FIRST, BEYOND), False),
    "as a finished training is evaluated": (
        lambda folder: log_of_run(folder, "eval-checkpoint_best-valid-blocks.log"),
        True,
    ),
}
KILLS = 10


def log_of_run(folder: Path, name: str) -> bool:
    """True if any run has started to write this log."""
    return any((folder / "runs").rglob(name))


def logs_of_finished_trainings(folder: Path) -> list[Path]:
    """Return the training logs of the runs whose evaluation had begun."""
    return [path.with_name("train.log") for path in (folder / "runs").rglob("eval-*.log")]


def after_random_seconds(rng: random.Random) -> Callable[[Path], bool]:
    """True from one to nine seconds on."""
    end = time.monotonic() + rng.uniform(1, 9)
    return lambda folder: time.monotonic() > end


def kill_at(folder: Path, there: Callable[[Path], bool], everything: bool) -> None:
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


def assert_survived(folder: Path, undisturbed: Path) -> None:
    """The next run of the table ends as if nothing had happened."""
    run_table(folder, "--jobs", "2")
    assert_same_results(folder, undisturbed)
    assert not list((folder / "results").rglob("*.tmp"))


def test_a_table_survives_kill_9_in_every_stage_of_a_run(corpus, undisturbed_table, tmp_path):
    folder, trained = repository(tmp_path / "checkout", corpus), {}
    for there, everything in POINTS.values():
        kill_at(folder, there, everything)
        trained |= {log: log.read_bytes() for log in logs_of_finished_trainings(folder)}
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


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path):
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)])
    if mounted.returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        big = a_record(curve=[{"updates": n, "tokens": n, "valid_ppl": 1.0} for n in range(5000)])
        with pytest.raises(OSError, match="cannot write this result: No space left"):
            write_run(tmp_path / "run.json", big)
        assert [path.name for path in tmp_path.iterdir()] == ["base-small.json"]  # whole
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
