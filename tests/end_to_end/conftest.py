"""A small language with some regularity, binarized once."""

import random

import pytest

from tests.end_to_end.commands import Corpus, run

WORDS = 20


def _sentence(rng: random.Random) -> str:
    """Words that count on, by one or by two, from anywhere."""
    first, step = rng.randrange(WORDS), rng.choice((1, 2))
    return " ".join(f"w{(first + i * step) % WORDS}" for i in range(rng.randint(3, 9)))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Some 4,000 tokens to train on, 200 to validate, 250 to test."""
    folder, rng = tmp_path_factory.mktemp("corpus"), random.Random(0)
    sizes = {"train": 600, "valid": 30, "test": 40}
    lines = {split: [_sentence(rng) for _ in range(size)] for split, size in sizes.items()}
    for split, text in lines.items():
        (folder / split).write_text("\n".join(text) + "\n")
    files = [word for split in sizes for word in (f"--{split}pref", folder / split)]
    run("fairseq_cli.preprocess", "--only-source --workers 1", *files, "--destdir", folder / "data")
    return Corpus(folder / "data", lines)


@pytest.fixture(scope="session")
def pairs(corpus, tmp_path_factory):
    """A folder with the two dictionaries of a translation task, and no text."""
    folder = tmp_path_factory.mktemp("dictionaries")
    for language in ("en", "de"):
        (folder / f"dict.{language}.txt").write_bytes((corpus.data / "dict.txt").read_bytes())
    return folder
