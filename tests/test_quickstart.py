"""The quickstart: its table, the orders that it states, and children forked from a warm server."""

import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from lrpe_fairseq.experiments.commands import quickstart
from lrpe_fairseq.experiments.report import quickstart as report
from lrpe_fairseq.experiments.report.quickstart import Row
from lrpe_fairseq.experiments.runner import processes
from lrpe_fairseq.experiments.runner.processes import ChildFailed, Children, Stopped, locked
from lrpe_fairseq.experiments.runner.warm import WarmChildren, warm_up

INNER = '2026-01-01 10:00:00 | INFO | train_inner | {"wpb": "1024", "num_updates": "20"}\n'
VALIDATION = (
    '2026-01-01 10:00:00 | INFO | valid | {{"valid_ppl": "{}", "valid_num_updates": "{}"}}\n'
)


def row(encoding: str, *ppl: float, attention: str = "linear") -> Row:
    """A row whose seeds are 1, 2, ..."""
    return Row(attention, encoding, dict(enumerate(ppl, start=1)))


# --- the table and the order --------------------------------------------------------------------


def test_a_row_is_compared_with_base_of_the_same_attention():
    found = [
        row("none", 100.0, 102.0),
        row("rope", 90.0, 91.8),
        row("none", 80.0, 80.0, attention="softmax"),
        row("lrpe-type2", 60.0, 60.0, attention="softmax"),
    ]
    lines = [" ".join(line.split()) for line in report.table(found).splitlines()]
    assert lines[2].startswith("| linear | none (Base) | 101.00 ± 1.41 | — ")
    assert lines[3].startswith("| linear | rope | 90.90 ± 1.27 | -10 % |")
    assert lines[5].startswith("| softmax | lrpe-type2 | 60.00 ± 0.00 | -25 % |")


def test_one_seed_has_no_deviation_and_supports_no_order():
    found = [row("none", 100.0), row("rope", 1.0)]
    assert "±" not in report.table(found[:1])
    assert report.order(found) == ["linear attention: rope ≈ Base"]


def test_the_order_names_neighbors_that_are_not_separated():
    found = [row("none", 10.0, 10.1, 10.2), row("rope", 8.0, 8.2, 8.3)]
    found.append(row("lrpe-type2", 8.1, 8.2, 8.4))
    assert report.order(found) == ["linear attention: rope ≈ lrpe-type2 < Base"]


def test_a_run_is_checked_against_the_published_order():
    published = [row("none", 10.0, 10.1, 10.2), row("rope", 8.0, 8.2, 8.3)]
    published.append(row("lrpe-type2", 8.1, 8.2, 8.4))
    assert (
        report.contradicted([row("none", 9), row("rope", 8), row("lrpe-type2", 7)], published) == []
    )
    contradicting = [row("none", 9), row("rope", 9.5), row("lrpe-type2", 7)]
    assert report.contradicted(contradicting, published) == [
        "linear attention: rope does not beat Base"
    ]


# --- what is committed --------------------------------------------------------------------------


def test_every_row_is_published_with_the_same_three_seeds():
    found = report.rows(report.published(quickstart.RUNS))
    assert [(r.attention, r.encoding) for r in found] == quickstart.METHODS
    assert {tuple(r.ppl) for r in found} == {(1, 2, 3)}


def test_the_published_runs_have_the_settings_of_the_configuration():
    runs = [run for run in report.published(quickstart.RUNS) if run["seed"] == 1]
    published = {(run["attention_type"], run["position_encoding"]): run for run in runs}
    for method in quickstart.methods(1):
        run = published[method.attention_type, method.position_encoding]
        assert method.differences(run["config"]) == set()


def test_every_relative_encoding_beats_base_in_the_published_runs():
    found = report.rows(report.published(quickstart.RUNS))
    stated = {(a.attention, a.encoding, b.encoding) for a, b in report.stated(found)}
    expected = {(a, e, "none") for a, e in quickstart.METHODS if e != "none"}
    assert expected <= stated


# --- progress -----------------------------------------------------------------------------------


def test_validations_are_reported_once_each_as_they_appear(tmp_path):
    log, said = tmp_path / "train.log", []
    log.write_text(INNER + VALIDATION.format(90, 100))  # of an earlier, interrupted call
    with quickstart.validations_reported(log, 400, said.append):
        with open(log, "a") as growing:
            growing.write(VALIDATION.format(80.125, 200))
        deadline = time.monotonic() + 30
        while not said and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(2 * quickstart.LOOK_SECONDS)
    assert said == ["200 of 400 updates, validation perplexity 80.12"]


# --- children that need no new interpreter ------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> None:
    """The fork server, which imports fairseq once for these tests."""
    warm_up()


@pytest.fixture
def arguments(server: None, tmp_path: Path) -> dict:
    """Where a child runs."""
    return {"cwd": tmp_path, "environment": {"OMP_NUM_THREADS": "1"}}


def test_a_warm_child_runs_a_console_script_and_reports_its_memory(tmp_path, arguments):
    log = tmp_path / "log"
    with locked(tmp_path / "run") as lock:
        memory = WarmChildren().run(["bin/pytest", "--version"], log, lock=lock, **arguments)
    assert "pytest" in log.read_text()
    assert memory > 1


INSIDE = """
import multiprocessing, os
def test_a_training_sees_what_it_would_see_in_a_new_interpreter():
    assert multiprocessing.get_start_method() == multiprocessing.get_all_start_methods()[0]
    assert os.getpgid(0) == os.getpid()
    assert os.getpgid(os.getppid()) == os.getppid()  # signals to the runner miss the server
"""


def test_a_warm_child_and_the_server_have_groups_of_their_own(tmp_path, arguments):
    (tmp_path / "test_inside.py").write_text(INSIDE)
    WarmChildren().run(["pytest", "test_inside.py"], tmp_path / "log", **arguments)


def test_a_child_that_starts_while_the_runner_stops_is_killed():
    children = WarmChildren()

    class Starting:
        def start(self) -> None:
            self.process = subprocess.Popen(["sleep", "60"])
            self.pid = self.process.pid
            children.stop()  # does not wait for the start

    starting = Starting()
    children._begin(starting, Path())
    assert starting.process.wait(10) == -signal.SIGKILL


def test_a_fork_without_a_group_of_its_own_gets_signals_too():
    with subprocess.Popen(["sleep", "60"]) as process:
        processes._send(process.pid, signal.SIGTERM)
        assert process.wait(10) == -signal.SIGTERM
        processes._send(process.pid, signal.SIGTERM)  # it has ended


@pytest.mark.parametrize(("gpus", "kind"), [(0, WarmChildren), (1, Children), (4, Children)])
def test_trainings_on_gpus_are_not_forked(monkeypatch, gpus, kind):
    monkeypatch.setattr(quickstart.torch.cuda, "device_count", lambda: gpus)
    assert type(quickstart.trainings()) is kind


def test_the_commit_of_warm_children_is_that_of_the_imported_code(monkeypatch):
    cold, warm = Children(), WarmChildren()
    first = cold.code()
    monkeypatch.setattr(processes, "commit", lambda: "later")
    assert (cold.code(), warm.code()) == ("later", first)


def test_a_warm_child_that_fails_says_so(tmp_path, arguments):
    with pytest.raises(ChildFailed) as failed:
        WarmChildren().run(["pytest", "no-such-file.py"], tmp_path / "log", **arguments)
    assert failed.value.status == 4  # pytest's status for wrong usage
    assert "no-such-file.py" in (tmp_path / "log").read_text()


def test_stopping_ends_a_warm_child_and_starts_no_other(tmp_path, arguments):
    (tmp_path / "test_sleep.py").write_text("import time\ndef test_it():\n    time.sleep(600)\n")
    children, ended = WarmChildren(), threading.Event()

    def run() -> None:
        with pytest.raises(Stopped):
            children.run(["pytest", "test_sleep.py"], tmp_path / "log", **arguments)
        ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    deadline = time.monotonic() + 60
    while not (tmp_path / "log").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    children.stop()
    thread.join(60)
    assert ended.is_set()
    with pytest.raises(Stopped):
        children.run(["pytest", "--version"], tmp_path / "log", **arguments)
