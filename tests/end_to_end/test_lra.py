"""The tasks of the Long-Range Arena, from archives or a generator to run files."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lrpe_fairseq.experiments.records import fairseq_log
from tests.end_to_end.test_classification import classification_run, work
from tests.test_data_prep import load
from tests.test_lra_data import packed, small

listops, lra = load("listops"), load("lra")
pytestmark = pytest.mark.end_to_end

SHORT = (  # a small model that learns in seconds
    "model.encoder_layers=2",
    "model.encoder_embed_dim=32",
    "model.encoder_ffn_embed_dim=64",
    "model.dropout=0.0",
    "dataset.batch_size=16",
    "optimization.max_update=40",
    "lr_scheduler.warmup_updates=4",
    "optimization.lr=[0.01]",
    "common.log_interval=10",
)


def words(rng: random.Random, letters: str) -> str:
    return " ".join("".join(rng.choices(letters, k=4)) for _ in range(rng.randint(2, 4)))


def test_reviews_are_read_byte_by_byte_trained_and_evaluated(tmp_path: Path) -> None:
    rng = random.Random(1)
    members = {
        f"aclImdb/{part}/{feeling}/{number}_7.txt": words(rng, letters).encode()
        for part in ("train", "test")
        for feeling, letters in (("pos", "good"), ("neg", "bad"))
        for number in range(40)
    }
    checksum = packed(tmp_path, lra.TEXT.archive.file, members)
    lra.prepare(small(lra.TEXT, checksum, train=80, test=80), tmp_path / "text", tmp_path)
    made = classification_run(tmp_path / "text", tmp_path, config="lra-text", overrides=SHORT)
    found = work(made)
    assert made.finished()
    assert found["dataset"] == "lra-text"
    assert found["config"]["model.norm"] == "batch"
    assert found["metrics"]["test"]["accuracy"]["examples"] == 80
    assert found["metrics"]["test"]["accuracy"]["accuracy"] > 80
    assert "train 72, valid 8, test 80" in found["protocol"]["accuracy"]


def test_pairs_are_encoded_together_trained_and_evaluated(tmp_path: Path) -> None:
    rng = random.Random(2)
    letters = ("abc", "xyz")
    members = {}
    for part, count in {"train": 160, "eval": 16, "test": 64}.items():
        rows = []
        for _ in range(count):
            first, second = rng.randrange(2), rng.randrange(2)
            texts = words(rng, letters[first]), words(rng, letters[second])
            rows.append("\t".join([f"{int(first == second)}.0", "P1", "P2", *texts]) + "\n")
        members[f"lra_release/tsv_data/new_aan_pairs.{part}.tsv"] = "".join(rows).encode()
    packed(tmp_path, lra.RELEASE, members)
    task = small(lra.RETRIEVAL, train=160, eval=16, test=64)
    lra.prepare(task, tmp_path / "pairs", tmp_path)
    made = classification_run(tmp_path / "pairs", tmp_path, config="lra-retrieval", overrides=SHORT)
    found = work(made)
    assert found["dataset"] == "lra-retrieval"
    assert found["metrics"]["test"]["accuracy"]["examples"] == 64
    assert found["metrics"]["test"]["accuracy"]["accuracy"] > 80  # one text alone says nothing
    assert found["metrics"]["valid"]["accuracy"]["examples"] == 16


# --- images and ListOps ------------------------------------------------------------------------


def image(dest: Path) -> None:
    """CIFAR-10 whose images are of one brightness, which is their class."""
    shades = np.arange(80, dtype=np.uint8) % 10
    rows = np.repeat(shades[:, None], 1 + 3 * 32**2, 1)
    rows[:, 1:] *= 25
    parts = [*np.split(rows[:60], 5), rows[60:]]
    names = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
    members = {n: own.tobytes() for n, own in zip(names, parts, strict=True)}
    checksum = packed(dest, lra.IMAGE.archive.file, members)
    lra.prepare(small(lra.IMAGE, checksum, train=60, test=20), dest, dest)


def expressions(dest: Path) -> None:
    """Short expressions instead of those of 501 to 1,999 tokens."""
    sizes = {"train": 48, "valid": 6, "test": 20}
    recipe = listops.Recipe(10, 60, 4, 4, sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(listops.LENGTHS, "500-2000", recipe)
        listops.prepare(dest, "500-2000")


PIXELS = {"model.input": "pixels", "model.pixel_mean": 0.4808}


@pytest.mark.parametrize(
    ("config", "prepare", "sizes", "dataset", "model"),
    [
        ("lra-image", image, (54, 6, 20), "lra-image", PIXELS),
        ("lra-listops", expressions, (48, 6, 20), "listops-500-2000", {"model.input": "tokens"}),
    ],
    ids=["image", "listops"],
)
def test_images_and_expressions_are_trained_for_some_updates_and_evaluated(
    config: str,
    prepare: Callable[[Path], None],
    sizes: tuple[int, int, int],
    dataset: str,
    model: dict,
    tmp_path: Path,
) -> None:
    prepare(tmp_path / "data")
    few = (*SHORT, "optimization.max_update=12", "dataset.batch_size=8", "common.log_interval=1")
    made = classification_run(tmp_path / "data", tmp_path, config=config, overrides=few)
    found = work(made)
    assert found["dataset"] == dataset
    assert {"model.norm": "batch", **model}.items() <= found["config"].items()
    counted = "train {}, valid {}, test {}".format(*sizes)
    assert counted in found["protocol"]["accuracy"]
    for split, size in zip(("valid", "test"), sizes[1:], strict=True):
        assert found["metrics"][split]["accuracy"]["examples"] == size
    assert found["curve"][-1]["updates"] == 12
    logged = sorted(fairseq_log.read_training_log(made.log).inner.items())
    losses = [float(stats["loss"]) for _, stats in logged]
    assert sum(losses[-3:]) < 0.95 * sum(losses[:3]), losses
