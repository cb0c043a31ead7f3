"""The tasks of the Long-Range Arena, from archives or a generator to run files."""

from __future__ import annotations

import random

import pytest

from tests.end_to_end.test_classification import classification_run, work
from tests.test_data_prep import load
from tests.test_lra_data import packed, small

lra = load("lra")
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


def test_reviews_are_read_byte_by_byte_trained_and_evaluated(tmp_path):
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


def test_pairs_are_encoded_together_trained_and_evaluated(tmp_path):
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
