"""Trainings that fairseq-hydra-train makes one after another in one process."""

import math
import re
from collections import Counter
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.end_to_end.commands import assert_same, saved, side_by_side, yaml_config
from tests.end_to_end.forked import run_forked

pytestmark = pytest.mark.end_to_end

RATES = ("0.01", "0.0001")
"""Of two trainings; the second learns less in its few updates."""
SAID = ("can fail on texts longer", "runs as", "training on 1 devices")
TIMES = ("previous_training_time", "metrics")


def configuration(corpus, folder, **checkpoint):
    """A YAML in ``folder`` whose outputs lie in a folder per rate, below the working directory."""
    home = Path("runs", "${optimization.lr[0]}")
    config = yaml_config(corpus, home, {"attention_type": "linear", "position_encoding": "rope"})
    config["common"] |= {"tensorboard_logdir": f"{home}/curves", "log_file": f"{home}/log.txt"}
    config["optimization"] |= {"max_update": 4}
    config["checkpoint"] |= checkpoint
    config["hydra"] = {
        "run": {"dir": "runs"},
        "sweep": {"dir": "runs", "subdir": "."},
        "job": {"chdir": False},
        "output_subdir": None,
        "callbacks": {"record": {"_target_": f"{__package__}.returned.Record", "path": "values"}},
    }
    for rate in RATES:
        (folder / "runs" / rate).mkdir(parents=True)  # of the log
    OmegaConf.save(OmegaConf.create(config), folder / "experiment.yaml")


def trained(folder, *typed):
    """What fairseq-hydra-train prints; it must succeed."""
    given = ["--config-dir", str(folder), "--config-name", "experiment", *typed]
    ended = run_forked("fairseq_cli.hydra_train", given, cwd=folder)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def curves(folder):
    """Step and loss of every split, as TensorBoard reads them."""
    found = {}
    for split in sorted(path.name for path in folder.iterdir()):
        events = EventAccumulator(str(folder / split))
        events.Reload()
        found[split] = [(event.step, event.value) for event in events.Scalars("loss")]
    return found


def left(home):
    """What a training leaves in its folder, without times."""
    names = Counter(re.sub(r"\d{9}.*", "", str(p.relative_to(home))) for p in home.rglob("*"))
    losses = re.findall(r"(\w+) \| loss ([\d.]+)", (home / "log.txt").read_text())
    states = {path.name: saved(path) for path in sorted(home.glob("*.pt"))}
    kept = {
        name: {k: v for k, v in state["extra_state"].items() if k not in TIMES}
        for name, state in states.items()
    }
    weights = {name: state["model"] for name, state in states.items()}
    return (names, losses, kept, curves(home / "curves")), weights


@pytest.fixture(scope="module")
def sweep_and_programs(corpus, tmp_path_factory):
    """Folders and outputs of a sweep over RATES, and of a program for each of them."""
    sweep, programs = (tmp_path_factory.mktemp(name) for name in ("sweep", "programs"))
    for folder in (sweep, programs):
        configuration(corpus, folder, patience=2)
    each = [lambda rate=rate: trained(programs, f"optimization.lr=[{rate}]") for rate in RATES]
    together = ",".join(f"[{rate}]" for rate in RATES)
    said, *alone = side_by_side(lambda: trained(sweep, "-m", f"optimization.lr={together}"), *each)
    return sweep, programs, said, "".join(alone)


@pytest.mark.parametrize("rate", RATES)
def test_a_sweep_of_two_jobs_leaves_what_two_programs_leave(sweep_and_programs, rate):
    sweep, programs, *_ = sweep_and_programs
    (of_job, weights), (of_program, expected) = (
        left(folder / "runs" / rate) for folder in (sweep, programs)
    )
    assert of_job == of_program
    assert_same(weights, expected)
    assert set(of_job[-1]) == {"train", "valid"}  # curves of this job's own


def test_a_sweep_says_in_every_job_what_a_program_says(sweep_and_programs):
    _, _, said, alone = sweep_and_programs
    counts = {text: (said.count(text), alone.count(text)) for text in SAID}
    assert counts == dict.fromkeys(SAID, (2, 2))


def test_a_training_returns_the_score_of_its_best_checkpoint(sweep_and_programs):
    for folder in sweep_and_programs[:2]:
        values = [float(line) for line in (folder / "values").read_text().split()]
        best = [saved(folder / "runs" / rate / "checkpoint_best.pt") for rate in RATES]
        assert sorted(values) == [state["extra_state"]["val_loss"] for state in best]
        assert all(map(math.isfinite, values))


def test_a_training_that_has_nothing_left_to_train_returns_the_same_value(sweep_and_programs):
    folder = sweep_and_programs[0]
    before = (folder / "values").read_text().split()
    trained(folder, f"optimization.lr=[{RATES[0]}]")
    assert (folder / "values").read_text().split() == [*before, before[0]]
