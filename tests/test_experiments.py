"""Runs, their schedule and tables: what is trained, what counts as finished, what survives."""

import argparse
import copy
import functools
import json
import logging
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fairseq.data import Dictionary
from fairseq.models import MODEL_REGISTRY
from omegaconf import OmegaConf
from torch import nn

from lrpe_fairseq.experiments import families
from lrpe_fairseq.experiments.commands import run_table
from lrpe_fairseq.experiments.data import folders, synthetic
from lrpe_fairseq.experiments.data.corpus import SPLITS
from lrpe_fairseq.experiments.data.synthetic import Recipe
from lrpe_fairseq.experiments.families import FAMILIES, family_of, finetuning, lm, load_named
from lrpe_fairseq.experiments.families.finetuning import FinetuningRun
from lrpe_fairseq.experiments.families.lm import LMRun
from lrpe_fairseq.experiments.records import bases, checkpoints, fairseq_log, keys, machine, methods
from lrpe_fairseq.experiments.records import runs as run_files
from lrpe_fairseq.experiments.records.console import UserError
from lrpe_fairseq.experiments.records.files import CONFIGS, ROOT, load_config
from lrpe_fairseq.experiments.records.runs import read_run, write_run
from lrpe_fairseq.experiments.records.tables import load_table, load_tables
from lrpe_fairseq.experiments.report import docs
from lrpe_fairseq.experiments.runner import devices, identity, processes, schedule, slurm
from lrpe_fairseq.experiments.runner.processes import RunFailed
from lrpe_fairseq.kernels import loader
from tests.test_data_prep import multi30k, newstest, wmt14
from tests.tiny_table import wait_until
from tests.trial import a_record, checkpoint, configurations, saved_config, trained, trial

TABLES = [load_table(path) for path in sorted((ROOT / "configs" / "tables").glob("*.yaml"))]
CONFIGS_BUILT = sorted(  # test_classifier builds the others
    {path for kind in FAMILIES.values() for path in configurations(CONFIGS / kind.configs)
     if path.parent.name != "classification" or path.stem.startswith(("vit-", "cct-"))}
)  # fmt: skip
INNER = (
    '2026-01-01 10:00:00 | INFO | train_inner | {{"wps": "{}", "wpb": "2048", "num_updates": "{}"}}'
)
VALID = 'INFO:valid:{{"valid_ppl": "{}", "valid_num_updates": "{}"}}'


@pytest.fixture
def one_run(tmp_path):
    return trial(tmp_path, evaluations=(("test", lm.BLOCKS),))


@pytest.fixture
def events(tmp_path):
    return schedule.Events(tmp_path / "events.log")


TEST_SETS = {  # of data with other splits than train, valid and test
    "multi30k": set(multi30k.FILES),
    "mixed-en-de": {"train", *newstest.HELD_OUT, "test1"},
    "wmt14-en-de": {"train", *wmt14.HELD_OUT},
    **{f"synthetic-{t}-small": set(Recipe(t, "small").splits) for t in synthetic.TASKS},
    **{f"synthetic-{t}-many": set(Recipe(t, "many").splits) for t in ("mqar", "mqrar")},
}


@functools.cache
def known(config):
    """The options of a training with the file ``config``."""
    return identity.options(identity.resolved(load_config(config))).keys()


@pytest.mark.parametrize(
    ("table", "scale"), [pytest.param(t, s, id=f"{t.name}-{s}") for t in TABLES for s in t.scales]
)
def test_a_planned_run_sets_known_keys_for_prepared_splits_and_has_the_key_of_its_cell(
    table, scale
):
    table, met = table.at(scale), set()
    for cell in keys.cells(table):
        values = {cell.label, cell.config, cell.dataset, cell.attention, *map(str, cell.changed)}
        values |= {(cell.dataset, cell.config, split) for split, _ in cell.evaluations}
        if values <= met:  # every row and every value of a column, not their product
            continue
        met |= values
        config = ROOT / (cell.config or table.scales[scale])
        (run, *_) = family_of(config).of_cell(table, cell, scale, config, 1)
        assert run.chosen().keys() <= known(config)
        assert {split for split, _ in run.evaluations} <= TEST_SETS.get(run.data.name, set(SPLITS))
        if isinstance(run, FinetuningRun):  # the checkpoint has the options of the model
            continue
        planned = run_files.settings_of(trained(run))
        found = keys.key(table, {**planned, "dataset": cell.dataset, "scale": scale})
        assert found == cell.key, run.name
        if cell.encoding == "none":  # the name on pages says whether there are positions
            bare = run.settings().model.get("no_token_positional_embeddings", False)
            kept = "none, sinusoidal", "none, learned positions"
            said = "none, no positions" if bare else kept
            assert methods.names(table)[cell.label].startswith(said)


@pytest.mark.parametrize("path", CONFIGS_BUILT, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_every_configuration_builds_its_model(path):
    settings = load_config(path)
    words = Dictionary()
    for number in range(96):
        words.add_symbol(str(number))
    named = ("source_dictionary", "target_dictionary", "dictionary")
    task = SimpleNamespace(**dict.fromkeys(named, words), max_positions=lambda: 512)
    task.cfg = task.args = settings.task
    task.num_classes, task.image_size = map(settings.task.get, ("num_classes", "image_size"))
    task.pairs = False
    options = OmegaConf.create(identity.resolved(settings)["model"])
    kind = MODEL_REGISTRY[settings.model._name]
    with torch.device("cpu" if path.parent.name == "roberta" else "meta"):  # its start needs values
        model = kind.build_model(options, task)
    built = {len(m) for m in model.modules() if isinstance(m, nn.ModuleList)}
    wanted = [options.get("decoder_layers") or options.get("encoder_layers")]
    if "decoder" in options:
        wanted = [options.encoder.layers, options.decoder.layers]
    assert built >= set(wanted)


def test_a_split_that_is_not_there_is_noticed_before_anything_is_trained(one_run):
    (one_run.data / "bin").mkdir(parents=True)
    (one_run.data / "bin" / "dict.txt").write_text("word 1\n")
    one_run.require_inputs()  # without a manifest nothing is known
    (one_run.data / "manifest.json").write_text(json.dumps({"splits": {"train": {}, "valid": {}}}))
    with pytest.raises(UserError, match="has no split test to evaluate"):
        one_run.require_inputs()


def test_a_cell_that_another_table_has_too_is_trained_there():
    runs = families.runs(families.load_named("table5"), "small", [1])
    homes = {run.position_encoding: run.experiment for run in runs}
    assert homes["lrpe-type2"] == homes["lrpe-type6"] == "table2"
    assert homes["lrpe:identity:rotation-learned"] == "table5"
    results = {run.result for run in families.runs(families.load_named("table2"), "small", [1])}
    assert {run.result for run in runs if run.experiment == "table2"} <= results


def test_what_a_row_changes_reaches_the_command():
    runs = families.runs(families.load_named("table2"), "paper", [3])
    type8 = next(run for run in runs if run.label == "Type8")
    assert "++optimization.clip_norm=1.0" in type8.command()
    assert "++common.seed=3" in type8.command()


def test_a_value_that_hydra_would_misread_is_quoted():
    assert devices.hydra_override("a.b", "lrpe:identity:rotation") == "++a.b=lrpe:identity:rotation"
    assert devices.hydra_override("a.b", "my data, 'new'") == r"++a.b='my data, \'new\''"


def test_columns_choose_runs_which_keep_all_their_evaluations():
    given = ["extrapolation", "--rows", "RoPE", "--attention", "linear", "--seeds", "1"]
    (whole,), (part,) = chosen(given), chosen([*given, "--columns", "paired 256"])
    assert part.name == whole.name
    assert part.evaluations == whole.evaluations
    given = ["images", "--rows", "RoPE", "--attention", "softmax", "--seeds", "1"]
    (flat,) = chosen([*given, "--columns", "flat"])
    assert [run for run in chosen(given) if "position-grid" not in run.name] == [flat]


def chosen(arguments):
    options = run_table._parse(arguments)
    table = families.load_named(options.table)
    options.scale = run_table.usual_scale(table)
    return run_table._select(table, options)


@pytest.mark.parametrize("name", ["contrast", "medium"])
def test_a_selection_trains_each_row_with_every_rate_and_a_seed_that_is_not_reported(name):
    def settings(run):
        """What a row sets, apart from what the selection decides."""
        model = run.settings().model
        return run.attention_type, run.position_encoding, model.get("attention_normalizer")

    reported, tried = chosen([name, "--seeds", "2"]), chosen([f"{name}-selection", "--seeds", "2"])
    assert {run.seed for run in reported} == {1, 2}
    assert {run.seed for run in tried} == {0}
    rates: dict = {}
    for run in tried:
        rates.setdefault(settings(run), set()).update(run.settings().optimization.lr)
    assert rates.keys() == {settings(run) for run in reported}
    assert set(map(frozenset, rates.values())) == {frozenset([0.002, 0.004, 0.008])}
    assert max(run.max_update() for run in tried) < min(run.max_update() for run in reported)


def test_missing_data_is_reported_with_the_command_that_makes_it():
    data = Path("nowhere/wikitext-2-bpe")
    with pytest.raises(UserError, match=r"run .*data-prep/wikitext/prepare.py wikitext-2 --level"):
        folders.require(data, lm.LMRun.preparation_of(data))
    with pytest.raises(UserError, match=r"fairseq-preprocess --destdir nowhere/mine/bin$"):
        folders.require(Path("nowhere/mine"), [])


def test_an_evaluation_needs_the_whole_split_and_spreads_the_loss_over_words_and_lines(tmp_path):
    log = tmp_path / "eval.log"
    said = "Evaluated {} tokens in 1s\nLoss (base 2): 5.0625, Perplexity: 33.42"
    counts = {"tokens": 1000, "words_with_eos": 500}
    (tmp_path / "manifest.json").write_text(json.dumps({"splits": {"test": counts}}))
    log.write_text(said.format("1,000"))
    found = lm.read_evaluation(log, tmp_path, "test")
    assert found == {"loss": 5.0625, "ppl": 2**5.0625, "tokens": 1000, "word_ppl": 2**10.125}
    log.write_text(said.format("900"))
    with pytest.raises(RunFailed, match="900 of 1000 tokens"):
        lm.read_evaluation(log, tmp_path, "test")
    log.write_text(said.format("0"))
    with pytest.raises(ValueError, match="evaluated 0 tokens, so its perplexity means nothing"):
        lm.read_evaluation(log, tmp_path, "test")


@pytest.mark.parametrize("name", ["pg19", "pg19-first-3"])
def test_word_perplexity_of_pg19_does_not_count_line_ends(tmp_path, name):
    known = {"corpus": name, "splits": {"test": {"tokens": 1000, "words": 250}}}
    (tmp_path / "manifest.json").write_text(json.dumps(known))
    assert lm.with_words({"loss": 2.5, "tokens": 1000}, tmp_path, "test")["word_ppl"] == 2**10


def test_parameters_are_those_that_fairseq_counts(tmp_path):
    log = tmp_path / "train.log"
    log.write_text("num. shared model params: 22,036,456 (num. trained: 20)\nnum. expert params")
    assert fairseq_log.million_parameters(log) == 22.036456
    log.write_text("killed before that")
    assert fairseq_log.million_parameters(log) is None


def test_a_log_says_which_forms_computed_each_attention(tmp_path, monkeypatch):
    """In the formats of fairseq and of hydra; a new process of a resumed training logs again."""
    monkeypatch.setattr(loader, "SERVED", {})
    log, logger = tmp_path / "train.log", loader.logger
    for form in ("%(asctime)s | %(levelname)s | %(name)s | ", "[%(asctime)s][%(name)s] - "):
        handler = logging.FileHandler(log)
        handler.setFormatter(logging.Formatter(f"{form}%(message)s"))
        monkeypatch.setattr(logger, "handlers", [handler])
        monkeypatch.setattr(logger, "level", logging.INFO)
        for device in ("cpu", "cuda", "cuda"):
            loader.log_served("softmax attention of gated:lrpe:p:q", "triton", device)
        loader.SERVED.clear()
    assert len(log.read_text().splitlines()) == 4
    found = {"softmax attention of gated:lrpe:p:q": ["triton on cpu", "triton on cuda"]}
    assert fairseq_log.served(log) == found
    loader.log_served("linear attention", "c++", "cpu")
    served = {**found, "linear attention": ["c++ on cpu"]}
    assert machine.environment([log])["kernels"]["served"] == served


def test_a_resumed_training_has_one_curve_and_the_speed_of_its_steady_part(tmp_path):
    log = tmp_path / "train.log"
    first = [INNER.format(100, 10), INNER.format(900, 20), VALID.format(80, 20)]
    killed = [INNER.format(910, 30), VALID.format(70, 40), INNER.format(5, 40)[:60]]
    again = [INNER.format(920, 30), INNER.format(50, 40), VALID.format(69, 40)]
    log.write_text("\n".join([*first, *killed, *again]))
    found = fairseq_log.read_training_log(log)
    assert found.curve("valid_ppl") == [
        {"updates": 20, "tokens": 20 * 2048, "valid_ppl": 80.0},
        {"updates": 40, "tokens": 40 * 2048, "valid_ppl": 69.0},
    ]
    assert found.tokens_per_second() == 500.0  # of 50, 100, 900, 920
    assert fairseq_log.last_update(log) == 40


def test_a_run_is_finished_when_its_run_file_validates_not_when_a_folder_exists(one_run):
    one_run.folder.mkdir()
    assert not one_run.finished()
    assert schedule.state(one_run) == "pending"
    one_run.result.write_text('{"experiment": "trial"')  # as no writer of ours would leave it
    assert not one_run.finished()
    write_run(one_run.result, a_record(config=trained(one_run)))
    assert one_run.finished()
    assert schedule.state(one_run) == "done, test blocks ppl 50.00"


@pytest.mark.parametrize("base", ["", "{", '{"model._name": "another"}'])
def test_a_run_whose_base_is_lost_is_not_trained_again(one_run, base):
    write_run(one_run.result, a_record(config=trained(one_run)))
    path = one_run.result.with_name("base-small.json")
    path.write_text(base) if base else path.unlink()
    with pytest.raises(bases.BaseError, match=r"base-small\.json.*: restore"):
        one_run.finished()


INCIDENTAL = {  # where a run writes, how it logs and loads
    "checkpoint.save_dir": "x",
    "common.tensorboard_logdir": "y",
    "common.log_interval": 3,
    "dataset.num_workers": 9,
    "distributed_training.ddp_backend": "no_c10d",
    "distributed_training.device_id": 3,
}
DECIDING = {  # options of a training that make it another one
    "optimization.max_update": 5,
    "optimization.update_freq": [4],
    "model._name": "lrpe_lm",
    "common.fp16": True,
    "dataset.max_tokens": 512,
    "dataset.train_subset": "valid",
    "task.data": "data/mine/bin",
    "checkpoint.restore_file": "other.pt",
    "optimizer.weight_decay": 0.3,
    "lr_scheduler.warmup_updates": 7,
}


def test_every_table_shows_the_state_of_its_runs():
    for table in load_tables(ROOT / "configs" / "tables"):
        for scale, config in table.scales.items():
            cell = keys.cells(table.at(scale))[0]
            family = family_of(ROOT / config)
            run = family.of_cell(table, cell, scale, ROOT / config, 1)[0]
            assert schedule.state(run).startswith(("pending", "done", "half done", "trained"))


def test_a_fine_tuned_run_is_finished_while_its_data_are_not_prepared(monkeypatch):
    monkeypatch.setattr(finetuning, "manifest", lambda data: {})
    table = load_named("table3")
    config = ROOT / table.scales["small"]
    runs = [
        run
        for cell in keys.cells(table.at("small"))
        for run in family_of(config).of_cell(table, cell, "small", config, 1)
        if run.result.exists()
    ]
    assert runs
    assert all(run.finished() for run in runs)


def test_a_run_of_other_settings_is_not_finished(one_run):
    write_run(one_run.result, a_record(config=trained(one_run, **INCIDENTAL)))
    assert one_run.finished()
    for option, value in DECIDING.items():
        changes = {option: value}
        assert option in one_run.differences(trained(one_run, **changes))
    write_run(one_run.result, a_record(config=trained(one_run, **changes)))
    assert not one_run.finished()


def test_options_that_were_deleted_from_the_yaml_are_compared_by_their_defaults(
    one_run, monkeypatch
):
    deleted, before = {"optimizer.weight_decay", "model.dropout"}, copy.deepcopy(one_run.yaml())
    OmegaConf.set_readonly(before, False)
    config = trained(one_run, **dict.fromkeys(deleted, 0.25))
    for section, name in (option.split(".") for option in deleted):
        del before[section][name]
    monkeypatch.setattr(LMRun, "yaml", lambda run: before)
    assert one_run.differences(config) == deleted


def test_an_option_that_a_training_did_not_know_had_its_default(one_run):
    config = trained(one_run)
    del config["model.memory_length"]
    assert one_run.differences(config) == set()
    with_memory = replace(one_run, overrides=("model.memory_length=64",))
    assert with_memory.differences(config) == {"model.memory_length"}


def test_the_state_of_a_run_is_seen_from_another_process(one_run):
    one_run = replace(one_run, overrides=("optimization.max_update=900",))
    one_run.folder.mkdir()
    one_run.log.write_text(INNER.format(100, 450))
    assert schedule.state(one_run) == "half done 450/900"
    (one_run.folder / schedule.ERROR).write_text("out of memory\n")
    assert schedule.state(one_run) == "failed: out of memory"
    with processes.locked(one_run.folder):
        assert schedule.state(one_run) == "running 450/900"


def test_the_seconds_of_a_group_of_processes_are_a_tensor_in_their_checkpoint():
    for seconds in (30.06, torch.tensor(30.06)):
        assert checkpoints.seconds({"extra_state": {"previous_training_time": seconds}}) == 30.1
    assert checkpoints.seconds({"extra_state": {"previous_training_time": 0.02}}) == 0.1


def test_checkpoints_of_other_settings_are_not_resumed(one_run):
    said = []
    cfg = saved_config(one_run)
    checkpoint(one_run.checkpoints / checkpoints.LAST, 30, cfg=cfg)
    assert one_run.ready_to_resume(pytest.fail) == 30
    cfg["model"]["dropout"] = 0.7
    checkpoint(one_run.checkpoints / checkpoints.LAST, 30, cfg=cfg)
    assert one_run.ready_to_resume(said.append) == 0
    assert said == ["model.dropout changed, so training starts over"]
    assert not list(one_run.checkpoints.glob("*.pt"))


def test_the_mean_of_checkpoints_is_that_of_their_weights_and_needs_equal_permutations(tmp_path):
    def save(update, weight, order):
        model = {"weight": torch.tensor(weight), "order": torch.tensor(order)}
        checkpoint(tmp_path / f"checkpoint_1_{update}.pt", update, model=model)

    save(9, [1.0, 2.0], [1, 0])
    save(100, [3.0, 5.0], [1, 0])
    save(20, [8.0, 8.0], [1, 0])
    newest = checkpoints.newest(tmp_path, 2)
    assert [path.name for path in newest] == ["checkpoint_1_20.pt", "checkpoint_1_100.pt"]
    checkpoints.average(newest, tmp_path / "mean.pt")
    with pytest.raises(ValueError, match="is a folder; name a checkpoint in it"):
        checkpoints.load(tmp_path)
    mean = checkpoints.load(tmp_path / "mean.pt")
    assert mean["model"]["weight"].tolist() == [5.5, 6.5]
    assert checkpoints.updates(mean) == 100
    save(101, [0.0, 0.0], [0, 1])
    with pytest.raises(ValueError, match="differ in order"):
        checkpoints.average(checkpoints.newest(tmp_path, 2), tmp_path / "bad.pt")
    assert not (tmp_path / "bad.pt").exists()


def test_metrics_of_numpy_load_in_a_runner_without_fairseq(tmp_path):
    meters = [np.array([4, 3]), np.float64(0.5), argparse.Namespace(lr=1)]
    checkpoint(tmp_path / "checkpoint_last.pt", 10, meters=meters)
    code = f"""if True:
        import sys, pathlib
        from lrpe_fairseq.experiments.commands import run_table
        from lrpe_fairseq.experiments.records import checkpoints
        assert checkpoints.ready_to_resume(pathlib.Path({str(tmp_path)!r}), sys.exit) == 10
        assert "fairseq" not in sys.modules"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert checkpoints.load(tmp_path / "checkpoint_last.pt")["meters"][0].tolist() == [4, 3]


def test_after_a_truncated_checkpoint_the_newest_one_that_loads_is_resumed(tmp_path):
    said = []
    (tmp_path / checkpoints.LAST).write_bytes(b"of another program")
    assert checkpoints.ready_to_resume(tmp_path, said.append) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_last.pt.refused"]
    for name, updates in {"1_20": 20, "best": 10, "1_30": 30, "last": 40}.items():
        path = checkpoint(tmp_path / f"checkpoint_{name}.pt", updates)
        age = 50 - updates if updates > 10 else 15  # updates count, not the age
        os.utime(path, (time.time() - age,) * 2)
        if updates >= 30:
            path.write_bytes(path.read_bytes()[:1000])
    assert checkpoints.ready_to_resume(tmp_path, said.append) == 20
    assert checkpoints.updates(checkpoints.load(tmp_path / "checkpoint_last.pt")) == 20
    assert said[-1] == "resuming from checkpoint_1_20.pt, update 20"
    assert all("\n" not in line for line in said)


def validated(path, updates, loss, best):
    """A checkpoint whose validation has this loss, after a best one of ``best``."""
    extra = {"val_loss": loss, "best": best, "previous_training_time": 1.0}
    return checkpoint(path, updates, extra_state=extra)


@pytest.mark.parametrize("best", ["older", "truncated", "absent"])
@pytest.mark.parametrize("later", [False, True])
def test_a_best_checkpoint_that_a_kill_left_behind_is_the_best_one_after_resuming(
    tmp_path, best, later
):
    """fairseq was killed after checkpoint_1_900.pt, before its copies; or, once, resumed since."""
    path = validated(tmp_path / checkpoints.BEST, 450, 5.5, 5.5)
    if best == "truncated":
        path.write_bytes(path.read_bytes()[:1000])
    if best == "absent":
        path.unlink()
    validated(tmp_path / "checkpoint_1_900.pt", 900, 5.0, 5.0)
    last = (1350, 5.2, 5.0) if later else (450, 5.5, 5.5)
    validated(tmp_path / checkpoints.LAST, *last)
    said = []
    assert checkpoints.ready_to_resume(tmp_path, said.append) == (1350 if later else 900)
    assert said[-1] == (
        "checkpoint_best.pt was not the best: it is checkpoint_1_900.pt now, update 900"
    )
    assert checkpoints.updates(checkpoints.load_sound(path)) == 900
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("value", [(5.2, 5.0), (None, 5.0), (None, None)])
def test_a_best_checkpoint_stays_if_no_later_one_is_better(tmp_path, value):
    validated(tmp_path / checkpoints.BEST, 450, 5.0, 5.0)
    validated(tmp_path / "checkpoint_1_450.pt", 450, 5.0, 5.0)
    validated(tmp_path / checkpoints.LAST, 900, *value)
    assert checkpoints.ready_to_resume(tmp_path, pytest.fail) == 900
    assert checkpoints.updates(checkpoints.load(tmp_path / checkpoints.BEST)) == 450


class FakeJob:
    """Runs ``script`` with Python in its folder; finished once that has written ``done``."""

    def __init__(self, folder, script):
        self.folder, self.script, self.name = folder, script, folder.name
        self.result = folder / "run.json"
        folder.mkdir()

    def outcome(self):
        return "ppl 1.00"

    def finished(self):
        return (self.folder / "done").exists()

    def progress(self):
        return (10 if self.finished() else 0), 10

    def work(self, children, devices, say):
        with processes.locked(self.folder) as lock:
            if self.finished():
                return False
            command = [sys.executable, "-c", self.script]
            log, env = self.folder / "log", devices.environment
            children.run(command, log, environment=env, lock=lock, cwd=self.folder)
            return True


def fakes(folder, **scripts):
    return [FakeJob(folder / name, script) for name, script in scripts.items()]


DONE = "open('done', 'w').close()"
TWICE = f"""
import os
if os.path.exists("tried"): {DONE}
else: open("tried", "w").close(); raise SystemExit("no luck")
"""


def test_a_crashed_run_is_retried_once_and_its_neighbors_go_on(tmp_path, events, capsys):
    bad = "print('before'); open('tries', 'a').write('x'); raise ValueError('bad luck')"
    jobs = fakes(tmp_path, lucky=TWICE, bad=bad, good=DONE)
    assert schedule.Schedule(jobs, schedule.shares(2), events).run() == 1
    assert [job.finished() for job in jobs] == [True, False, True]
    assert (tmp_path / "bad" / "tries").read_text() == "xx"
    assert schedule.state(jobs[1]).startswith("failed: ValueError: bad luck (exit status 1, ")
    said = capsys.readouterr().out
    assert "lucky: crashed, trying again: no luck" in said
    assert "bad: FAILED: ValueError: bad luck" in said
    assert "2 runs finished, 1 failed" in said


def run_fakes(monkeypatch, root, jobs, **options):
    """What ``run_table`` does with ``jobs`` under ``root``: the exit status."""
    monkeypatch.setattr(run_table, "ROOT", root)
    monkeypatch.setattr(run_table.report, "render", lambda *_: 0)
    given = {"table": "table2", "scale": "small", "seeds": 1, "jobs": 2, "gpus": None}
    unset = {"minutes": None, "pack": None}
    options = argparse.Namespace(**{**given, **unset, **options})
    return run_table._run_here(jobs, options, time.monotonic() - 100)


def test_an_array_keeps_the_numbers_of_its_runs(tmp_path, monkeypatch):
    submitted = []
    monkeypatch.setattr(run_table.slurm, "load_site", lambda *_: slurm.Site())
    monkeypatch.setattr(run_table.slurm, "submit", lambda plan: submitted.extend(plan.array))
    jobs = fakes(tmp_path, **dict.fromkeys("abcd", DONE))
    (jobs[1].folder / "done").touch()
    options = argparse.Namespace(table="table2", **dict.fromkeys(run_table.SITE_OPTIONS))
    assert run_table._submit(jobs, options, ["table2", "--slurm"]) == 0
    assert submitted[0] == "--array=0,2,3"


def test_at_the_deadline_all_is_stopped_and_counts_as_left(tmp_path, events, capsys):
    late = "import time; time.sleep(60)"
    jobs = fakes(tmp_path, a=DONE, b=late, c=late)
    begun, seen = time.monotonic(), []
    given = {"seconds": 2, "finished": lambda job: seen.append(job.name)}
    assert schedule.Schedule(jobs, schedule.shares(2), events, **given).run() == 0
    assert time.monotonic() - begun < 30
    assert seen == ["a"]
    assert "1 runs finished, 0 failed, 2 left for the next call" in capsys.readouterr().out
    assert not any(processes.is_locked(job.folder) for job in jobs)


def test_a_run_is_started_only_if_the_longest_one_would_fit(tmp_path, events, capsys):
    slow = f"import time; time.sleep(1); {DONE}"
    jobs = fakes(tmp_path, a=slow, b=DONE)
    assert schedule.Schedule(jobs, schedule.shares(1), events, seconds=1.8).run() == 0
    assert [job.finished() for job in jobs] == [True, False]
    assert "1 left for the next call" in capsys.readouterr().out


def packed(root, target):
    """The paths in a pack of runs under ``root``."""
    with tarfile.open(target) as tar:
        return {Path(name).relative_to(str(root)[1:]).as_posix() for name in tar.getnames()}


def test_the_pack_has_the_results_of_finished_runs_and_all_logs(tmp_path, events, monkeypatch):
    jobs = fakes(tmp_path, a=DONE, b="exit(1)")
    for job in jobs:
        write_run(job.result, a_record())
        (job.folder / "train.log").write_text(job.name)
    target = tmp_path / "out" / "new.tar"
    assert run_fakes(monkeypatch, tmp_path, jobs, pack=target) == 1
    assert packed(tmp_path, target) == {"a/run.json", "a/train.log", "b/train.log"}


def test_the_pack_of_a_later_call_has_the_runs_of_earlier_ones_too(tmp_path, monkeypatch):
    jobs = fakes(tmp_path, a=DONE, b=DONE)
    for job in jobs:
        write_run(job.result, a_record())
    target = tmp_path / "out" / "new.tar"
    (jobs[0].folder / "done").touch()
    for _ in range(2):  # one call trains b, the next one nothing
        assert run_fakes(monkeypatch, tmp_path, jobs, pack=target) == 0
        assert packed(tmp_path, target) == {"a/run.json", "b/run.json"}


def test_packs_of_machines_with_other_bases_are_read_together_and_stored_as_differences(
    tmp_path, monkeypatch
):
    kept = {}
    for name in ("one", "two"):
        path = tmp_path / name / "results" / "runs" / "trial" / f"{name}.json"
        # The first run of each machine is its base.
        write_run(path, a_record(config={"model._name": name, "optimization.clip_norm": 1.0}))
        kept[f"trial/{name}.json"] = read_run(path)
        monkeypatch.setattr(run_table, "relative", lambda p, at=tmp_path / name: p.relative_to(at))
        run_table._pack(tmp_path / f"{name}.tar", [path])
        with tarfile.open(tmp_path / f"{name}.tar") as tar:
            tar.extractall(tmp_path / "checkout", filter="data")
    runs = tmp_path / "checkout" / "results" / "runs"
    assert run_files.read_runs(runs) == kept
    docs.write(tmp_path / "checkout", (), dict)
    assert run_files.read_runs(runs) == kept
    stored = {path.name: json.loads(path.read_text()) for path in run_files.run_files(runs)}
    assert [run["config"] for run in stored.values()] == [{}, {"model._name": "two"}]


def test_a_run_that_another_process_trains_is_waited_for(tmp_path, events, monkeypatch, capsys):
    monkeypatch.setattr(schedule, "BUSY_SECONDS", 0.1)
    job = FakeJob(tmp_path / "shared", DONE)
    with processes.locked(job.folder) as lock:
        other = subprocess.Popen(["sleep", "0.5"], pass_fds=(lock,))
    assert schedule.Schedule([job], schedule.shares(1), events).run() == 0
    assert other.wait() == 0
    assert job.finished()
    assert capsys.readouterr().out.count("another process trains this run") == 1


def test_sigterm_ends_the_children_and_leaves_no_lock(tmp_path, events):
    script = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    job = FakeJob(tmp_path / "long", script)
    log = job.folder / "log"

    def terminate():
        wait_until(lambda: log.exists() and log.read_text().strip(), 60)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    threading.Thread(target=terminate).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            schedule.Schedule([job], schedule.shares(1), events).run()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not processes.is_locked(job.folder)
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text()), 0)
