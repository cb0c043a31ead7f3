"""The training logs that the runner reads, in every format, and runs without statistics in them."""

import io
import logging
from collections import OrderedDict
from contextlib import redirect_stdout
from dataclasses import dataclass, replace

import pytest
from fairseq.logging import progress_bar
from fairseq.logging.meters import AverageMeter

from lrpe_fairseq.experiments.families.lm import LMRun
from lrpe_fairseq.experiments.records import checkpoints, fairseq_log
from lrpe_fairseq.experiments.records.runs import read_run
from lrpe_fairseq.experiments.runner import schedule
from lrpe_fairseq.experiments.runner.devices import Devices
from lrpe_fairseq.experiments.runner.processes import Children
from tests.trial import checkpoint, saved_config, trial

FORMATS = {
    "fairseq's": "%(asctime)s | %(levelname)s | %(name)s | %(message)s",
    "hydra's": "[%(asctime)s][%(name)s][%(levelname)s] - %(message)s",
}
TRAIN = ("loss", "ppl", "wps", "wpb", "num_updates", "lr", "train_wall", "gb_free", "wall")


def averaged(value):
    """A meter whose average is ``value``."""
    meter = AverageMeter()
    meter.update(value)
    return meter


def written(path, log_format, style):
    """Write a log with fairseq's own progress bars: two epochs of two updates."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter(style))
    logger = progress_bar.logger
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        for epoch in (1, 2):
            for tag, prefix in (("train_inner", None), ("valid", "valid on 'valid' subset")):
                with redirect_stdout(io.StringIO()):
                    bar = progress_bar.progress_bar(range(2), log_format, 1, None, epoch, prefix)
                    statistics(bar, tag, epoch)
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
        handler.close()
    return path


def statistics(bar, tag, epoch):
    """Log what fairseq logs of a training, or of a validation."""
    for place, _ in enumerate(bar, 1):
        update = 2 * (epoch - 1) + place
        values = [averaged(4.25), 19.03, 1000.0 * update, 2048.0, update, 3e-3, 0, 0.5, 7]
        stats = OrderedDict(zip(TRAIN, values, strict=True))
        if tag == "train_inner":
            bar.log(stats, tag=tag, step=update)
        elif place == 2:
            shown = {k: stats[k] for k in ("loss", "ppl", "wps", "num_updates")}
            bar.print(OrderedDict(shown | {"best_loss": 4.25}), tag=tag, step=update)


@pytest.mark.parametrize("style", FORMATS)
def test_a_log_in_the_simple_format_says_what_one_in_json_says(tmp_path, style):
    json, simple = (written(tmp_path / name, name, FORMATS[style]) for name in ("json", "simple"))
    assert "{" in json.read_text()
    assert "{" not in simple.read_text()
    expected = fairseq_log.read_training_log(json)
    found = fairseq_log.read_training_log(simple)
    assert found.curve("valid_ppl") == expected.curve("valid_ppl")
    assert [point["tokens"] for point in found.curve("valid_ppl")] == [4096, 8192]
    assert found.tokens_per_second() == expected.tokens_per_second() == 2500.0
    assert {n: v["loss"] for n, v in found.inner.items()} == dict.fromkeys(range(1, 5), "4.250")
    assert fairseq_log.last_update(simple) == fairseq_log.last_update(json) == 4


def test_a_log_whose_speeds_are_all_zero_has_no_speed():
    inner = {1: {"wps": "0"}, 1800: {"wps": "0"}}
    assert fairseq_log.TrainingLog(inner, {}).tokens_per_second() is None


def test_a_line_that_a_kill_truncated_is_left_out(tmp_path):
    log = written(tmp_path / "log", "simple", FORMATS["fairseq's"])
    whole = log.read_text()
    last = whole.splitlines()[-1]
    assert "num_updates 4" in last
    for kept in range(len(last)):
        killed = whole.removesuffix(last[kept:] + "\n")
        log.write_text(killed)
        assert fairseq_log.read_training_log(log).valid.keys() == {2}
        log.write_text(killed + "2026-01-01 10:00:00 | INFO | train | resumed\n" + whole)
        assert fairseq_log.read_training_log(log).valid.keys() == {2, 4}


@dataclass(frozen=True)
class Evaluated(LMRun):
    """Its training has ended before; its evaluation costs nothing."""

    def require_inputs(self):
        """Need no data."""

    def measure(self, run):
        """A number without a model."""
        return {"metrics": {"test": {"blocks": {"ppl": 9.0}}}, "protocol": {"blocks": "Blocks."}}


@pytest.fixture
def ended(tmp_path):
    """A run whose checkpoints have all its updates, and that has no run file."""
    run = trial(tmp_path, Evaluated, config="text", evaluations=(("test", "blocks"),))
    run = replace(run, overrides=("optimization.max_update=4",))
    wps = ["default", "wps", "TimeMeter", {"init": 2.0, "n": 8192, "round": None}]
    extra = {"previous_training_time": 2.0, "metrics": {"train": [wps]}}
    for name in (checkpoints.BEST, checkpoints.LAST):
        path = run.checkpoints / name
        checkpoint(path, 4, cfg=saved_config(run), extra_state=extra)
    return run


@pytest.mark.parametrize(
    ("log_format", "speed", "points"),
    [("simple", 2500.0, 2), ("json", 2500.0, 2), ("none", 4096.0, 0), ("deleted", 4096.0, 0)],
)
def test_a_training_that_has_ended_is_recorded_whatever_its_log_looks_like(
    ended, log_format, speed, points
):
    if log_format == "none":
        ended.log.write_text("2026-01-01 10:00:00 | INFO | fairseq_cli.train | done training\n")
    elif log_format != "deleted":
        written(ended.log, log_format, FORMATS["fairseq's"])
    events = schedule.Events(ended.folder / "events.log")
    assert schedule.Schedule([ended], [Devices()], events).run() == 0
    found = read_run(ended.result)
    assert (found["tokens_per_second"], len(found["curve"])) == (speed, points)
    assert ended.finished()


def test_the_runner_trains_with_json_logs_where_the_yaml_has_another_format(tmp_path):
    text, wikitext = (trial(tmp_path, config=name) for name in ("text", "wikitext2"))
    assert "++common.log_format=json" in text.command()
    assert not any("log_format" in word for word in wikitext.command())
    simple = replace(text, overrides=("common.log_format=simple",))
    assert "++common.log_format=simple" in simple.command()


class Shared:
    """A run of a table that two runners share; ``mine`` says who works on it."""

    def __init__(self, name, mine):
        self.name, self.mine, self.folder = name, mine, schedule.Path("nowhere")

    def finished(self):
        return False

    def progress(self):
        return 0, 1

    def work(self, children, devices, say):
        return self.mine


def test_two_runners_of_a_table_count_the_runs_that_they_finished(tmp_path, capsys):
    counted = []
    for runner in (0, 1):
        runs = [Shared(f"run{n}", mine=n == runner) for n in (0, 1)]
        events = schedule.Events(tmp_path / "events.log")
        work = schedule.Schedule(
            runs, [Devices()], events, Children(), finished=lambda run: counted.append(run.name)
        )
        assert work.run() == 0
        said = capsys.readouterr().out
        assert "1 runs finished, 0 failed, 1 finished by other processes\n" in said
    assert counted == ["run0", "run1"]


def test_a_checkpoint_without_a_speed_has_none():
    for tokens, seconds in ((0, 0.5), (5, 0)):
        meters = [["default", "wps", "TimeMeter", {"n": tokens, "init": seconds}]]
        assert checkpoints.speed({"extra_state": {"metrics": {"train": meters}}}) is None
