"""Cells of tables that no other test trains: from generated data to the run file."""

from dataclasses import replace

import pytest

from lrpe_fairseq.experiments import families
from lrpe_fairseq.experiments.data import synthetic
from lrpe_fairseq.experiments.records.runs import read_run
from lrpe_fairseq.experiments.runner.devices import Devices
from tests.end_to_end.forked import ForkedChildren
from tests.test_cifar_data import SIZES, cifar, jpegs
from tests.test_data_prep import load, unpacked
from tests.test_lra_data import lra, pathfinder
from tests.test_lra_data import small as with_sizes

pytestmark = pytest.mark.end_to_end
retrieval = load("retrieval")

SHORT = (
    "optimization.max_update=6",
    "lr_scheduler.warmup_updates=2",
    "dataset.batch_size=8",
    "dataset.num_workers=0",
    "common.log_interval=2",
)


def reviews(dest):
    """Twenty reviews of each class and part, half of them longer than 1,000 bytes."""
    members = {}
    for number in range(20):
        for part in ("train", "test"):
            for feeling in ("pos", "neg"):
                body = f"{feeling} {number} " * (10 + 200 * (number % 2))
                members[f"aclImdb/{part}/{feeling}/{number}_7.txt"] = body.encode()
    lra.prepare(with_sizes(lra.TEXT, train=40, test=40), dest, unpacked(dest / "given", members))


def pairs(dest):
    recipe = retrieval.Recipe(sizes={"train": 64, "valid": 16, "test": 16})
    retrieval.prepare(dest, recipe=recipe)


def paths(dest):
    pathfinder.main(["--dest", str(dest), "--size", "16", "--images", "160"])


def images(dest):
    cifar.prepare(dest, jpegs(dest / "given"), jpeg=True, sizes=SIZES)


CELLS = {
    "lra-text": ("tmlr-table4", reviews, 40),
    "retrieval-78-130": ("tmlr-table4", pairs, 16),
    "pathfinder16": ("tmlr-table4", paths, 16),
    "cifar10-jpeg": ("ape-cifar10", images, 10),
}
"""Folder of the data -> table, the function that makes a small form, and its test examples."""


def finished(run, data, folder, *overrides):
    """Train and measure a planned run on other data in a folder of its own; return its record."""
    places = {"data": data, "folder": folder / "work", "result": folder / "run.json"}
    run = replace(run, **places, overrides=(*run.overrides, *overrides))
    assert run.work(ForkedChildren(), Devices(), print)
    assert run.finished()
    return read_run(run.result)


@pytest.mark.parametrize("dataset", CELLS)
def test_a_cell_of_images_or_long_texts_is_trained_and_tested_on_every_example(dataset, tmp_path):
    name, make, examples = CELLS[dataset]
    data = tmp_path / dataset
    make(data)
    planned = families.runs(families.load_named(name), "small", [1])
    run = next(run for run in planned if run.data.name == dataset)
    found = finished(run, data, tmp_path, *SHORT)
    tested = found["metrics"]["test"]["accuracy"]
    assert tested["examples"] == examples
    assert 0 <= tested["accuracy"] <= 100
    assert found["curve"][-1]["updates"] == 6


def test_a_cell_of_long_contexts_is_measured_at_every_length_and_depth(tmp_path):
    table = families.load_named("long-context")
    planned = families.runs(replace(table, rows=[table.row("RoPE")]), "small", [1])
    run = next(run for run in planned if run.data.name == "synthetic-passkey-small")
    data = tmp_path / "synthetic-passkey-small"
    synthetic.prepare(data, synthetic.Recipe("passkey", "tiny"))
    found = finished(run, data, tmp_path, *SHORT, "lr_scheduler.lr_period_updates=4")
    for length in synthetic.LONG_MULTIPLES:
        for depth in synthetic.DEPTHS:
            measured = found["metrics"][f"test{length}-depth{depth}"]
            scaled = {f"whole+yarn-{length}"} if length > 1 else set()
            assert set(measured) == {"whole"} | scaled
            assert all(0 <= one["answer_accuracy"] <= 1 for one in measured.values())
