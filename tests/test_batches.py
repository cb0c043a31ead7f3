"""Several processes train updates of the size of one process, by every table at every scale."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lrpe_fairseq.experiments.families import family_of
from lrpe_fairseq.experiments.records.files import CONFIGS
from lrpe_fairseq.experiments.report import cells
from lrpe_fairseq.experiments.runner.training import TrainingRun
from tests.test_experiments import trained


def run_of(config: str, folder: Path, *overrides: str) -> TrainingRun:
    """A run of a configuration ``family/name`` on data that do not exist."""
    kind = family_of(CONFIGS / f"{config}.yaml")
    return kind(
        experiment="trial",
        label="Base",
        config=config.partition("/")[2],
        data=folder / "data",
        attention_type="linear",
        position_encoding="none",
        seed=1,
        scale="small",
        folder=folder / "work",
        result=folder / "run.json",
        overrides=overrides,
    )


NORMED = ("dataset.batch_size=128", "optimization.update_freq=[2]")


# --- runs that are the same --------------------------------------------------------------------


def together(run: TrainingRun, processes: int, **changes: object) -> dict[str, object]:
    """The options that a training on so many processes records."""
    return trained(run, distributed_world_size=processes, **changes)


def test_a_training_on_several_gpus_is_that_of_one(tmp_path: Path) -> None:
    texts = run_of("classification/lra-text", tmp_path)
    assert texts.differences(together(texts, 4, batch_size=64)) == set()
    assert texts.differences(together(texts, 4)) == {"update-freq"}
    assert texts.differences(together(texts, 4, batch_size=32)) == {"batch-size", "update-freq"}
    blocks = run_of("lm/wikitext2", tmp_path)
    assert blocks.differences(together(blocks, 4, max_tokens=256)) == set()
    assert blocks.differences(together(blocks, 2, max_tokens=256, update_freq=[2])) == set()
    assert blocks.differences(together(blocks, 1, batch_size=4)) == {"batch-size"}


def test_with_batch_norm_accumulated_batches_are_another_training(tmp_path: Path) -> None:
    halves = {"batch_size": 128, "update_freq": [2]}
    texts = run_of("classification/lra-text", tmp_path)
    assert texts.differences(together(texts, 1, **halves)) == {"batch-size", "update-freq"}
    two = replace(texts, overrides=NORMED)
    assert two.differences(together(two, 2, batch_size=64)) == set()
    assert two.differences(together(two, 2, update_freq=[1])) == {"update-freq"}
    pixels = run_of("classification/mnist5k", tmp_path)
    assert pixels.differences(together(pixels, 1, batch_size=16, update_freq=[2])) == set()


def test_tables_show_the_update_over_all_processes() -> None:
    def option(name: str, **config: object) -> object:
        return cells.option({"config": config}, name)

    assert option("batch-size", **{"batch-size": 256, "update-freq": [1]}) == 256
    parts = {"batch-size": 64, "update-freq": [1], "distributed-world-size": 4}
    assert option("batch-size", **parts) == 256
    assert option("max_tokens", max_tokens=4096, update_freq=[4], distributed_world_size=4) == 65536
    assert option("max-tokens", **parts, **{"max-tokens": None}) is None
    assert option("max-tokens", **parts) is None
    assert option("batch-size", **{"batch-size": 8, "update-freq": [1, 2]}) == [8, 16]
