"""A disk without space and two runners: nothing counts as done that is not."""

import errno
import io
import sys
from pathlib import Path

from lrpe_fairseq.experiments.commands import run_table
from lrpe_fairseq.experiments.runner import schedule
from lrpe_fairseq.experiments.runner.training import TrainingRun
from tests.test_experiments import DONE, FakeJob, events, run_fakes  # noqa: F401

FULL = Path("/dev/full")  # every write to it fails: no space left on device


class FullJob(FakeJob):
    """Its error cannot be written, nor its training log."""

    def __init__(self, folder):
        super().__init__(folder, DONE)
        for name in ("log", schedule.ERROR):
            (folder / name).symlink_to(FULL)

    def work(self, children, devices, say):
        (self.folder / "log").write_text("no space for this line")


def test_on_a_full_disk_every_run_fails_and_no_time_is_kept(tmp_path, monkeypatch, capsys):
    jobs = [FullJob(tmp_path / name) for name in "abc"]
    log = tmp_path / "runs" / "table2" / "events.log"
    log.parent.mkdir(parents=True)
    log.symlink_to(FULL)
    monkeypatch.setattr(run_table.report, "render", lambda *_: 0)
    assert run_fakes(monkeypatch, tmp_path, jobs) == 1
    said = capsys.readouterr().out
    assert "0 runs finished, 3 failed" in said
    assert all(f"{name}: FAILED: [Errno 28] No space left" in said for name in "abc")


class FullScreen(io.StringIO):
    """A screen that is a file on a full disk."""

    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_other_runs_go_on_where_the_screen_is_a_file_on_a_full_disk(tmp_path, monkeypatch, events):  # noqa: F811
    jobs = [FullJob(tmp_path / "full"), FakeJob(tmp_path / "good", DONE)]
    monkeypatch.setattr(sys, "stdout", FullScreen())
    assert schedule.Schedule(jobs, schedule.shares(1), events).run() == 1
    assert jobs[1].finished()


def test_runs_on_a_read_only_disk_are_one_sentence_and_status_2(monkeypatch, capsys):
    def read_only(path, *_, **__):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "mkdir", read_only)
    monkeypatch.setattr(TrainingRun, "prepare_data", lambda *_: None)
    assert run_table.main(["table2", "--rows", "Base", "--attention", "linear"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "Read-only file system" in said
