"""What a run is used for: equal methods, columns with their own configuration, evaluations that a
table asks for after the training."""

import json
from dataclasses import dataclass, replace

import pytest

from lrpe_fairseq.experiments import families
from lrpe_fairseq.experiments.families.lm import LMRun
from lrpe_fairseq.experiments.families.translation import TranslationRun
from lrpe_fairseq.experiments.records import checkpoints, keys
from lrpe_fairseq.experiments.records.files import commit
from lrpe_fairseq.experiments.records.runs import Run, read_run, write_run
from lrpe_fairseq.experiments.records.tables import load_table
from lrpe_fairseq.experiments.report.sheets import require_same
from lrpe_fairseq.experiments.runner import by_hand, schedule
from lrpe_fairseq.experiments.runner.devices import Devices
from lrpe_fairseq.experiments.runner.processes import Children, RunFailed
from tests.trial import a_record, checkpoint, saved_config, trained, trial

UPDATES, SECONDS = 5, 12.5
TABLE = """
title: Lengths
text: Small models.
experiments: [lengths]
scales: {small: configs/lm/wikitext2.yaml}
baseline: Base
better: lower
options: {model.attention_normalizer: rotated}
same: [task.tokens_per_sample]
columns:
  - {key: valid, title: valid, attention: linear, split: valid, protocol: blocks, metric: ppl,
     dataset: wikitext-2-bpe}
  - {key: long, title: long, attention: linear, split: valid, protocol: blocks-512, metric: ppl,
     dataset: wikitext-2-bpe}
  - {key: words, title: words, attention: linear, split: test, protocol: blocks, metric: ppl,
     dataset: wikitext-103-word, config: configs/lm/wikitext103.yaml}
rows:
  - {label: Base, encoding: none, attention: [linear]}
  - {label: Type2, encoding: lrpe-type2, attention: [linear]}
  - {label: TMLR-Type2, encoding: lrpe-tmlr-type2, attention: [linear]}
"""


@pytest.fixture
def table(tmp_path):
    """Load TABLE with some text replaced."""

    def loaded(old="", new=""):
        path = tmp_path / "lengths.yaml"
        assert old in TABLE
        path.write_text(TABLE.replace(old, new))
        return load_table(path)

    return loaded


def test_rows_of_equal_methods_are_trained_once(table):
    runs = families.runs(table(), "small", [1])
    labels = [(run.label, run.config) for run in runs]
    both = ("wikitext2", "wikitext103")
    assert labels == [(label, config) for label in ("Base", "Type2") for config in both]


def warmed_up(table, **by_label):
    """Runs of rows with these updates of warm-up, in columns of 200 and 300 and in one without."""
    option = "lr_scheduler.warmup_updates"
    base, first = table().row("Base"), table().columns[0]
    columns = [replace(first, key=f"{n}", overrides={option: n}) for n in (200, 300)]
    rows = [replace(base, label=k, overrides={option: n}) for k, n in by_label.items()]
    changed = replace(table(), rows=rows, columns=[*columns, first], options={option: 200})
    return families.runs(changed, "small", [1])


def test_columns_that_override_an_option_of_their_row_have_runs_of_their_own(table):
    runs = warmed_up(table, Slow=400)
    assert {run.folder.name: run.settings().lr_scheduler.warmup_updates for run in runs} == {
        "small-Slow-linear-warmup-updates=200-seed1": 200,
        "small-Slow-linear-warmup-updates=300-seed1": 300,
        "small-Slow-linear-seed1": 400,
    }


def test_cells_of_different_settings_do_not_share_a_run(table):
    with pytest.raises(
        ValueError, match="would share the run lengths/small-A_B-linear-seed1: give"
    ):
        warmed_up(table, **{"A B": 400, "A+B": 500})


def test_a_run_of_another_name_of_its_method_is_finished(tmp_path):
    run = a_run(tmp_path, position_encoding="lrpe-tmlr-type3")
    config = trained(run)
    assert run.differences({**config, "model.position_encoding": "lrpe-type4"}) == set()
    other = {**config, "model.position_encoding": "lrpe-type2"}
    assert run.differences(other) == {"model.position_encoding"}


def test_a_column_trains_with_its_own_configuration_and_is_what_its_run_evaluates(table):
    small, large = families.runs(replace(table(), rows=table().rows[:1]), "small", [1])
    assert (small.config, small.data.name) == ("wikitext2", "wikitext-2-bpe")
    assert (large.config, large.data.name) == ("wikitext103", "wikitext-103-word")
    assert small.folder.name == "small-Base-linear-seed1"
    assert large.folder.name == "small-Base-linear-wikitext-103-word-seed1"
    assert small.evaluations == (("valid", "blocks"), ("valid", "blocks-512"))
    assert large.evaluations == (("test", "blocks"),)


def test_a_shared_run_has_the_evaluations_of_both_tables(table):
    own = table()
    columns = [replace(column, dataset="") for column in own.columns[:2]]
    both = replace(own, experiments=["lengths", "table2"], columns=columns, rows=own.rows[:1])
    (run,) = families.runs(both, "small", [1])
    assert run.experiment == "table2"
    assert run.evaluations == (("valid", "blocks"), ("test", "blocks"), ("valid", "blocks-512"))


def test_a_table_whose_runs_cannot_be_told_apart_is_refused(table):
    with pytest.raises(ValueError, match="words has the runs of another one, but another config"):
        table("dataset: wikitext-103-word, config", "dataset: wikitext-2-bpe, config")


def test_a_column_without_a_data_set_shows_those_that_no_other_column_names(table):
    given = table()
    columns = [replace(column, dataset="") for column in given.columns[:2]]
    own = replace(given, columns=[*columns, given.columns[2]])
    valid, _, words = own.columns

    def filled(dataset):
        run = a_record(experiment="lengths", dataset=dataset)
        return {column for row, column in keys.filled(own, run) if row == "Base"}

    assert filled("wikitext-2-bpe") == {valid.key, "long"}
    assert filled("wikitext-103-word") == {words.key}


def test_a_column_whose_data_are_not_its_configurations_is_refused(table, monkeypatch):
    other = table("dataset: wikitext-103-word", "dataset: wikitext-103-gpt2")
    families.runs(other, "small", [1])  # unknown until the data are prepared
    monkeypatch.setattr(families.folders, "is_prepared", lambda data: True)
    monkeypatch.setattr(families.folders, "dataset_name", lambda data: data.name)
    said = "trains on wikitext-103-word, but its column has the data"
    with pytest.raises(ValueError, match=said):
        families.runs(other, "small", [1])


def test_options_are_shared_within_a_data_set(table):
    runs = {
        f"lengths/{n}.json": a_record(dataset=data, config={"task.tokens_per_sample": tokens})
        for n, (data, tokens) in enumerate([("a", 256), ("a", 256), ("b", 512)])
    }
    require_same(table(), runs)
    runs["lengths/2.json"]["config"]["task.tokens_per_sample"] = 256
    require_same(table(), runs)
    runs["lengths/1.json"]["config"]["task.tokens_per_sample"] = 128
    with pytest.raises(ValueError, match=r"differ in task\.tokens_per_sample: 256 and 128"):
        require_same(table(), runs)


@dataclass(frozen=True)
class Recorded(LMRun):
    """A run that measures without a model, and counts what it does in ``done``."""

    done: tuple[list[str], ...] = ([],)

    def require_inputs(self):
        pass

    def measure(self, run):
        self.done[0].extend(f"{split} {protocol}" for split, protocol in self.evaluations)
        metrics: Run = {}
        for split, protocol in self.evaluations:
            metrics.setdefault(split, {})[protocol] = {"ppl": 7.0, "tokens": 1000}
        return {"metrics": metrics, "protocol": {p: "Anew." for _, p in self.evaluations}}

    def train(self, children, devices, lock, say):
        self.done[0].append("train")
        save(self)

    def record(self, measured, threads):
        return {**a_record(), **measured, "config": trained(self), "wall_seconds": 99.0}


def a_run(folder, **changes):
    asked = (("test", "blocks"), ("valid", "tail-512"))
    return trial(folder, Recorded, **{"evaluations": asked, "done": ([],), **changes})


def save(run, updates=UPDATES, seconds=SECONDS):
    more = {"cfg": saved_config(run), "extra_state": {"previous_training_time": seconds}}
    for name in (checkpoints.BEST, checkpoints.LAST):
        checkpoint(run.checkpoints / name, updates, **more)


@pytest.fixture
def finished(tmp_path):
    """A finished run that lacks an evaluation, with its checkpoints."""
    run = a_run(tmp_path)
    save(run)
    about = {"evaluated_update": UPDATES, "wall_seconds": SECONDS, "commit": "1" * 40}
    write_run(run.result, a_record(config=trained(run), **about))
    return run


def work(run):
    said: list[str] = []
    return run.work(Children(), Devices(), said.append), said


def test_a_missing_evaluation_is_measured_without_training(finished):
    before = read_run(finished.result)
    assert not finished.finished()
    worked, said = work(finished)
    after = read_run(finished.result)
    assert (worked, finished.done[0]) == (True, ["valid tail-512"])
    assert work(finished) == (False, [])
    assert said == ["evaluating valid tail-512; nothing is trained"]
    assert finished.finished()
    assert after["metrics"]["test"] == before["metrics"]["test"]
    assert after["metrics"]["valid"]["tail-512"]["ppl"] == 7.0
    assert after["protocol"]["blocks"] == before["protocol"]["blocks"]
    assert after["evaluated_later"] == {"valid.tail-512": commit()}
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed == {"metrics", "protocol", "evaluated_later", "machines"}
    assert [x["hardware"]["cpu"] == "A CPU" for x in after["machines"]] == [True, False]


@pytest.mark.parametrize("now", [None, {"seconds": SECONDS + 1}, {"updates": UPDATES + 1}])
def test_without_its_checkpoint_a_finished_run_is_not_replaced_by_another_training(finished, now):
    if now:  # the checkpoint of another training
        save(finished, **now)
    else:
        (finished.checkpoints / checkpoints.BEST).unlink()
    before = finished.result.read_bytes()
    with pytest.raises(RunFailed, match=r"lacks valid tail-512, and .* move the run file away$"):
        work(finished)
    assert finished.done[0] == []
    assert finished.result.read_bytes() == before
    finished.result.unlink()
    assert work(finished) == (True, [])
    assert finished.done[0] == ["train", "test blocks", "valid tail-512"]


def test_a_run_of_other_settings_is_not_only_evaluated(finished):
    other = replace(finished, overrides=("model.dropout=0.3",))
    trained, said = work(other)
    assert (trained, said) == (True, [])
    assert other.done[0] == ["train", "test blocks", "valid tail-512"]


def test_a_finished_translation_run_is_evaluated_with_the_average_that_it_left(tmp_path):
    run = trial(tmp_path, TranslationRun)
    for updates in (10, 20):
        checkpoint(run.checkpoints / f"checkpoint_1_{updates}.pt", updates)
    kept, decoding = run._averaged()
    assert (kept.name, decoding.average) == (checkpoints.AVERAGED, 2)
    before = kept.read_bytes()
    checkpoints.remove(run.checkpoints, "checkpoint_*_*.pt")
    assert run._averaged() == (kept, run.decoding)
    assert kept.read_bytes() == before


def test_the_state_of_a_run_that_lacks_an_evaluation_says_so(finished):
    assert schedule.state(finished) == "pending"  # as far as this folder knows
    finished.log.write_text('train_inner | {"wps": "1", "num_updates": "1800"}')
    assert schedule.state(finished) == "trained, to be evaluated"
    work(finished)
    assert schedule.state(finished).startswith("done, ")


BEFORE = {"test": {"blocks": 1.0, "sliding": 2.0}, "valid": {"blocks": 3.0}}
AGAIN = {"test": {"blocks": 4.0, "blocks-512": 5.0}}


def evaluated(**by_split):
    """A run file of an evaluation, as by_hand.record makes it."""
    metrics = {s: {n: {"ppl": v} for n, v in own.items()} for s, own in by_split.items()}
    protocol = {name: f"{name}." for own in by_split.values() for name in own}
    data = {"dictionary": "d", **{split: split for split in by_split}}
    return a_record(checkpoint="c", metrics=metrics, protocol=protocol, data=data)


@pytest.mark.parametrize(
    ("difference", "expected"),
    [
        ("none", {"test": {**BEFORE["test"], **AGAIN["test"]}, "valid": BEFORE["valid"]}),
        ("protocol", {"test": {"sliding": 2.0, **AGAIN["test"]}}),
        ("checkpoint", AGAIN),
        ("data of another split", AGAIN),
        ("damaged", AGAIN),
    ],
)
def test_a_run_file_keeps_earlier_evaluations_of_the_same_checkpoint_and_data_only(
    difference, expected, tmp_path, monkeypatch
):
    out, before, now = tmp_path / "best.json", evaluated(**BEFORE), {"dictionary": "d"}
    now |= {"test": "test", "valid": "valid"}
    if difference == "protocol":
        before["protocol"]["blocks"] = "blocks of another length."
    if difference == "checkpoint":
        before["checkpoint"] = "of a training under the same name"
    if difference == "data of another split":
        now["valid"] = "prepared again"
    out.write_text("{" if difference == "damaged" else json.dumps(before))
    monkeypatch.setattr(by_hand.folders, "checksums", lambda data, splits: now)
    by_hand.report(evaluated(**AGAIN), out, tmp_path)
    after = read_run(out)
    found = {s: {n: v["ppl"] for n, v in own.items()} for s, own in after["metrics"].items()}
    assert found == expected
    assert after["protocol"].keys() == {name for own in expected.values() for name in own}
    assert after["protocol"]["blocks"] == "blocks."
