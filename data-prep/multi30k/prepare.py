"""Prepare Multi30k, task 1, English to German, for fairseq: download, verify, tokenize, binarize.

    python data-prep/multi30k/prepare.py --dest data/multi30k

See the README in this folder for source, terms, checksums and counts.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lrpe_fairseq.experiments.data import bitext
from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.data.pieces import run_sentencepiece
from lrpe_fairseq.experiments.records.console import UserError, command

URL = "https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw/"
LANGUAGES = ("en", "de")
FILES = {  # fairseq's split name -> published name
    "train": "train",
    "valid": "val",
    "test": "test_2016_flickr",
    "test1": "test_2017_flickr",
}
PAIRS = {"train": 29_000, "valid": 1_014, "test": 1_000, "test1": 1_000}
SHA256 = {  # of the plain files
    "train.en": "460a15fbd157e34a7a9957ee388c1ca247fe47af3ef25fb50442af6c274e0fc6",
    "train.de": "2c2b73fd2b548fbcde3a875e0a78d6ee94d498bfdee6bd3eae3945779e9ddf72",
    "val.en": "1f2a23d992769b5b3d209b0a10dd0b77c08cceb1f20dfb97ed0aafa49d107227",
    "val.de": "660e09eb7e1da2f856ea13ee5ad3cf6d36b3d5b0b733c857e94c5747a3dfc660",
    "test_2016_flickr.en": "399a4382932c1aadd3ceb9bef1008d388a64c76d4ae4e9d4728c6f4301cac182",
    "test_2016_flickr.de": "4be6b5b3236b79c25475c6bb829800a7ce559e9ba7a1f6c2394fe4d40be46d16",
    "test_2017_flickr.en": "ce1450ddc5ab0834502579d77a170849952e15a2938b34cc503bdc25ebb4fb98",
    "test_2017_flickr.de": "c3078bc3b36808bf9d20eb2347ed6137016179ef59ec0d2b9b8ecc3fb2880081",
}


def obtain(raw: Path, from_dir: Path | None, sha256: Mapping[str, str]) -> dict[str, Path]:
    """Return split -> verified text in ``raw``, without the language suffix."""
    for name in (f"{file}.{language}" for file in FILES.values() for language in LANGUAGES):
        prep.obtain(name, [f"{URL}{name}.gz"], sha256[name], raw, from_dir, packed=True)
    return {split: raw / file for split, file in FILES.items()}


def prepare(
    dest: Path,
    *,
    vocab_size: int = 4000,
    from_dir: Path | None = None,
    workers: int = 1,
    sha256: Mapping[str, str] = SHA256,
    pairs: Mapping[str, int] = PAIRS,
) -> dict:
    """Prepare ``dest`` and return its manifest; finished steps are skipped.

    Raises: UserError for sources that are missing or another version.
    """
    prep.say(f"Multi30k, English to German -> {dest}")
    steps = prep.Steps(dest, "multi30k", "bpe")
    texts = obtain(dest / "raw", from_dir, sha256)
    counted = bitext.require_pairs(texts, LANGUAGES)
    if counted != pairs:
        raise UserError(
            f"Multi30k has {pairs} pairs, but {counted} were found: fetch its files again."
        )
    train = bitext.sides({"train": texts["train"]}, LANGUAGES)
    tokenizer = run_sentencepiece(steps, train, vocab_size)
    bitext.run_pieces(steps, texts, LANGUAGES, tokenizer, workers)
    return steps.finish(lambda: bitext.count(dest, texts, LANGUAGES))


@command("data-prep/multi30k/prepare.py")
def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and prepare the corpus."""
    prepare(**bitext.arguments(__doc__, argv))


if __name__ == "__main__":
    sys.exit(main())
