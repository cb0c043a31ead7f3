"""The family of transduction runs: from a table's cell to a run file."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lrpe_fairseq.experiments.data import transduction as data
from lrpe_fairseq.experiments.data.transduction import Recipe
from lrpe_fairseq.experiments.families import transduction as family
from lrpe_fairseq.experiments.families.transduction import METRICS, TransductionRun
from lrpe_fairseq.experiments.records import checkpoints
from lrpe_fairseq.experiments.records.files import CONFIGS
from lrpe_fairseq.experiments.records.keys import cells, option
from lrpe_fairseq.experiments.records.runs import read_run
from lrpe_fairseq.experiments.records.tables import load_table
from lrpe_fairseq.experiments.runner.devices import Devices
from lrpe_fairseq.experiments.runner.processes import RunFailed
from tests.end_to_end.forked import ForkedChildren

TABLE = """
title: Trees
text: A table.
experiments: [toy]
scales: {small: configs/transduction/tree-small.yaml}
baseline: Sinusoidal
better: lower
options: {task.node_positions: false, model.no_token_positional_embeddings: false,
          model.*.ape_init: rope, model.cross.position_encoding: none}
columns:
  - {key: rotate, title: rotate, attention: softmax, dataset: tree-rotate-depth, split: test,
     protocol: teacher, metric: ppl}
  - {key: decoded, title: decoded, attention: softmax, dataset: reverse, split: test,
     protocol: generate, metric: exact_match}
  - {key: reverse, title: reverse, attention: softmax, dataset: reverse, split: test,
     protocol: teacher, metric: ppl}
rows:
  - {label: Sinusoidal, encoding: none, attention: [softmax]}
  - {label: APE tree, encoding: ape-tree, attention: [softmax],
     overrides: {task.node_positions: true, model.no_token_positional_embeddings: true,
                 model.*.ape_init: identity, model.cross.position_encoding: ape-tree}}
"""
SMALLER = (
    *(
        f"model.{half}.{size}"
        for half in ("encoder", "decoder")
        for size in ("embed_dim=16", "ffn_embed_dim=16", "layers=1")
    ),
    "optimization.max_update=8",
    "lr_scheduler.warmup_updates=2",
    "lr_scheduler.lr_period_updates=6",
    "common.log_interval=1",
)


@pytest.fixture
def runs(tmp_path):
    path = tmp_path / "toy.yaml"
    path.write_text(TABLE)
    table, config = load_table(path), CONFIGS / "transduction" / "tree-small.yaml"
    made = [TransductionRun.of_cell(table, cell, "small", config, 3) for cell in cells(table)]
    return {run.folder.name: run for of_cell in made for run in of_cell}


def test_a_cell_names_its_data_set_and_sets_both_halves(runs):
    assert list(runs) == [
        f"small-{name}-softmax-seed3"
        for name in ("tree-rotate-depth-Sinusoidal", "reverse-Sinusoidal",
                     "tree-rotate-depth-APE_tree", "reverse-APE_tree")
    ]  # fmt: skip
    run = runs["small-tree-rotate-depth-APE_tree-softmax-seed3"]
    chosen = run.settings()
    assert chosen.task.data == "data/tree-rotate-depth-small/bin"
    assert (chosen.task.node_positions, chosen.task.scored_tokens) == (True, "no-end")
    for half in (chosen.model.encoder, chosen.model.decoder, chosen.model.cross):
        assert (half.position_encoding, half.attention_type) == ("ape-tree", "softmax")
        assert (half.ape_init, half.encoding_seed) == ("identity", 3)
    other = runs["small-reverse-Sinusoidal-softmax-seed3"]
    assert other.settings().task.scored_tokens == "inner"
    assert other.result.name == "small-reverse-Sinusoidal-softmax-seed3.json"
    always = (("valid", "teacher"), ("test", "teacher"))
    assert other.evaluations == (*always, ("test", "generate"))
    assert run.evaluations == always


@pytest.mark.parametrize(
    "name", ["copy-small", "reverse-paper", "repeat-tiny", "tree-c3-depth-small"]
)
def test_the_paper_scores_other_tokens_in_every_kind_of_task(name):
    wanted = {"copy": "all", "reverse": "inner", "repeat": "inner", "tree": "no-end"}
    assert family.scored_tokens(Path(name)) == wanted[name.partition("-")[0]]


def test_a_log_without_a_metric_is_refused_and_one_that_is_not_finite_diverged(tmp_path):
    log = tmp_path / "log"
    log.write_text('INFO | test | {"epoch": 1, "test_teacher_ppl": "2.5"}')
    with pytest.raises(RunFailed, match="printed no ppl_published for test"):
        family.read_validation(log, "test")
    values = ", ".join(f'"test_{name}": "nan"' for name in METRICS["teacher"].values())
    log.write_text(f"INFO | test | {{{values}}}")
    assert family.read_validation(log, "test") == {"diverged": 1}
    with pytest.raises(RunFailed, match="printed no decoded_token_accuracy for test"):
        family.read_validation(log, "test", "generate")


def test_a_run_trains_and_is_measured_from_data_to_run_file(runs, tmp_path):
    folder = tmp_path / "tree-rotate-depth-small"
    data.prepare(folder, Recipe("tree-rotate", "tiny", "depth"))
    run = runs["small-tree-rotate-depth-APE_tree-softmax-seed3"]
    places = {"data": folder, "folder": tmp_path / "work", "result": tmp_path / "toy" / "run.json"}
    run = replace(run, **places, overrides=(*run.overrides, *SMALLER))
    assert run.work(ForkedChildren(), Devices(1), print)
    assert run.finished()
    found = read_run(run.result)
    for split in ("valid", "test"):
        measured = found["metrics"][split]["teacher"]
        assert set(measured) == set(METRICS["teacher"])
        assert 1 < measured["ppl_published"] <= measured["ppl"] < 30
        assert 0 <= measured["exact_match"] <= measured["token_accuracy"] <= 1
    assert set(found["protocol"]) == {"teacher"}
    assert found["curve"][-1]["updates"] == 8
    best = min(point["valid_teacher_ppl"] for point in found["curve"])
    assert best == pytest.approx(found["metrics"]["valid"]["teacher"]["ppl"], rel=1e-3)
    assert found["position_encoding"] == {"encoder": "ape-tree", "decoder": "ape-tree"}
    assert option(found["config"], "model.*.ape_init") == "identity"
    assert option(found["config"], "model.cross.position_encoding") == "ape-tree"
    assert option(found["config"], "task.node_positions") is True
    weights = checkpoints.load(run.checkpoints / checkpoints.BEST)["model"]
    one, *others = [w for name, w in weights.items() if name.endswith("generator.entries")]
    assert [torch.equal(one, other) for other in others] == [True, True]
