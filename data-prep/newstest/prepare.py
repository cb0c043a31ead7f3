"""Prepare a small English-German news corpus from WMT's test sets of 2008 to 2018.

    python data-prep/newstest/prepare.py --dest data/newstest
    python data-prep/newstest/prepare.py --mixed --vocab-size 10000 --from FOLDER \\
        --dest data/mixed-en-de

newstest2013 is the validation set and newstest2014 (full, 3,003 pairs) the test set, as for WMT'14;
the other years are the training set, with --mixed together with Multi30k, Tatoeba and software.
This is not the paper's data; see the README in this folder.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lrpe_fairseq.experiments.data import bitext
from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.data.pieces import run_sentencepiece
from lrpe_fairseq.experiments.records.console import UserError, command
from lrpe_fairseq.experiments.records.files import atomic_write

URL = "https://raw.githubusercontent.com/Helsinki-NLP/OPUS-MT-testsets/master/testsets/eng-deu/"
LANGUAGES = {"en": "eng", "de": "deu"}  # our code -> the repository's code
HELD_OUT = {"valid": "newstest2013", "test": "newstest2014"}
PAIRS = {
    "news-test2008": 2_051,
    "newstest2009": 2_525,
    "newstest2010": 2_489,
    "newstest2011": 3_003,
    "newstest2012": 3_003,
    "newstest2013": 3_000,
    "newstest2014": 3_003,
    "newstest2015": 2_169,
    "newstest2016": 2_999,
    "newstest2017": 3_004,
    "newstest2018": 2_998,
}
SHA256 = {
    "news-test2008.en": "134e1140848bb0d05e774dbe35b8b69602faf401250c03dbb437bdbe38c37b6f",
    "news-test2008.de": "6d86c805e6cd008c11143816daac272fdf5a3afea816983c43005717d6fe3ae2",
    "newstest2009.en": "3fc92718e7b994ca0a5dc57e63b68d5c80244a56e5bb1cec11d2e8dd10b3ff3c",
    "newstest2009.de": "41f7d4a766a99f78646474dbd21af0dd0285a5dad5c48d1b627334c11a1771d9",
    "newstest2010.en": "1ebece77e333965cbc66fde735a6f17e026b4d6690f4f7fdaba839b7bdadac3b",
    "newstest2010.de": "4f4b02d3abe150ca47a745d138d90f688edb20dd2d2fedca16aa05fd1e2018b1",
    "newstest2011.en": "d387569743c0fa9097df4d4e2c1dd9e6ba9ef3cee6e0f473da3204c887dcf8fd",
    "newstest2011.de": "033bc05659f61c5e51170973267d21e23a9a968557b866f3842c92e416a60e1b",
    "newstest2012.en": "f9e51f85c4948033fc7d77ef427f4d88908a8dd3f778970f62d0baafac3ff97e",
    "newstest2012.de": "946b9587b79271b0f3ce9cc8c0e5b310e3021ef598e1ba5dc2a24fef8960de30",
    "newstest2013.en": "ace268a1d9724ca76f6d8e5c720ffdc08f01bdce45630ed8b269dc7918e1c16e",
    "newstest2013.de": "d7ea35ab91ff3709e03ad9cb6bf5b4f2cc775cd2d72efd5254c4aec5e69663ca",
    "newstest2014.en": "7294bccf2879a97b3706b95c9595f1459617a8ee7130d5d8581c910e69736971",
    "newstest2014.de": "ae5d110486bc33d7175e9e28c7d0051eb3e5fcd2166dd93371089852c091a20e",
    "newstest2015.en": "422fbb5a274c7aae1a0890381cd4516307ca7bc957604220d4871a91664121e5",
    "newstest2015.de": "796cce52ab248469187b60f60715a738a0b92944dc010a69a0083de7fae1b513",
    "newstest2016.en": "cd5c112a358d9c99b9557eb358e16d7a94f8fa93ad7aa61bf5f1141f2e1f8854",
    "newstest2016.de": "738ca1ced4099937127be3208ba70d46e7a93550cd57cfd645f3d35e0e52a254",
    "newstest2017.en": "11adaec47477928dab9cb3fc9279d99dbbbfec7161f3abf6fddd759668fcd703",
    "newstest2017.de": "675e4f7e6045dacf56507e29b24106d771a571e0eb58d822806b086cdcf892f4",
    "newstest2018.en": "721b207ca2b4e4689f978e17ee5edb0988d7c901acd651fd666bcd9c1950233b",
    "newstest2018.de": "c53059fc440b3771aef2a83b15fddd8d2b3490c55b552dcae245f9a2df126c9c",
}


# folders of --from with --mixed
NEWS = "wmt-newstest-en-de"
MULTI30K = "multi30k"
TATOEBA = "tatoeba-en-de"
SOFTWARE = "software-en-de"
FOLDERS = (NEWS, MULTI30K, TATOEBA, SOFTWARE)
MORE = {  # file below its folder -> sha256 of the plain file
    f"{MULTI30K}/train.en": "460a15fbd157e34a7a9957ee388c1ca247fe47af3ef25fb50442af6c274e0fc6",
    f"{MULTI30K}/train.de": "2c2b73fd2b548fbcde3a875e0a78d6ee94d498bfdee6bd3eae3945779e9ddf72",
    f"{MULTI30K}/test_2016_flickr.en": (
        "399a4382932c1aadd3ceb9bef1008d388a64c76d4ae4e9d4728c6f4301cac182"
    ),
    f"{MULTI30K}/test_2016_flickr.de": (
        "4be6b5b3236b79c25475c6bb829800a7ce559e9ba7a1f6c2394fe4d40be46d16"
    ),
    f"{TATOEBA}/train.en": "0ce2bfcf8e42183506bfd21b025b5643dc522a2881418130941c31624ca0206d",
    f"{TATOEBA}/train.de": "228d885c6f43239b31a564fa0fdf64235a979707b1de53dfcceebc992ca17069",
    f"{SOFTWARE}/train.tsv": "fff6e5329058117cc230578230256e6a6caab103af3f625cdc3a02e0a6a1a670",
    f"{SOFTWARE}/README.md": "9ffb4b428f39474efd33fdb39b01861e80c1ed87f2c5cb46f36945a0cefa80cd",
}
SHORTEST = 5  # words of an English segment of software


def obtain(
    raw: Path, from_dir: Path | None, pairs: Mapping[str, int], sha256: Mapping[str, str]
) -> None:
    """Write every set to ``raw``, verified, in both languages.

    Raises: UserError for a set that is missing or another version.
    """
    for name in pairs:
        for ours, theirs in LANGUAGES.items():
            file = f"{name}.{ours}"
            prep.obtain(file, [f"{URL}{name}.{theirs}"], sha256[file], raw, from_dir)
    counted = bitext.require_pairs({name: raw / name for name in pairs}, list(LANGUAGES))
    if counted != pairs:
        raise UserError(
            f"The test sets have {pairs} pairs, but {counted} were found: fetch them again."
        )


def add(steps: prep.Steps, raw: Path, from_dir: Path, sha256: Mapping[str, str]) -> list[Path]:
    """Write Multi30k, Tatoeba and software to ``raw``; return their training texts."""
    for name, checksum in sha256.items():
        folder, file = name.split("/")
        prep.obtain(file, (), checksum, raw / folder, from_dir / folder)
    table = raw / SOFTWARE / "train.tsv"
    chosen = raw / SOFTWARE / "sentences"
    writes = [bitext.side(chosen, language) for language in LANGUAGES]
    reads = {"table": table, "shortest": SHORTEST}
    steps.run("choose", reads, writes, lambda: choose(table, chosen))
    return [raw / MULTI30K / "train", raw / TATOEBA / "train", chosen]


def choose(table: Path, target: Path) -> None:
    """Write the pairs of a table of origin, English and German with enough English words."""
    # not splitlines, which also splits at characters within a sentence
    rows = [line.split("\t") for line in table.read_bytes().decode().rstrip("\n").split("\n")]
    kept = [row for row in rows if len(row[1].split()) >= SHORTEST]
    for column, language in enumerate(LANGUAGES, start=1):
        prep.write_lines(bitext.side(target, language), (row[column] for row in kept))


def join(texts: Sequence[Path], target: Path) -> None:
    """Write the train split: all texts, in order."""
    for language in LANGUAGES:
        with atomic_write(bitext.side(target, language), "wb") as out:
            for text in texts:
                out.write(bitext.side(text, language).read_bytes())


def prepare(
    dest: Path,
    *,
    vocab_size: int = 4000,
    from_dir: Path | None = None,
    workers: int = 1,
    mixed: bool = False,
    sha256: Mapping[str, str] = SHA256,
    pairs: Mapping[str, int] = PAIRS,
    more: Mapping[str, str] = MORE,
) -> dict:
    """Prepare ``dest`` and return its manifest; finished steps are skipped.

    Raises: UserError for --mixed without --from, and for sources that are missing.
    """
    name = "mixed-en-de" if mixed else "newstest"
    prep.say(f"{name}, English to German -> {dest}")
    if mixed and not from_dir:
        raise UserError(f"--mixed needs --from with the folders {', '.join(FOLDERS)}.")
    steps = prep.Steps(dest, name, "bpe")
    raw = dest / "raw"
    train = dest / "text" / "train"
    obtain(raw, from_dir / NEWS if mixed else from_dir, pairs, sha256)
    # the training texts: every year that is not held out
    rest = [raw / name for name in pairs if name not in HELD_OUT.values()]
    texts = {"train": train, **{split: raw / name for split, name in HELD_OUT.items()}}
    if mixed:
        rest += add(steps, raw, from_dir, more)
        texts["test1"] = raw / MULTI30K / "test_2016_flickr"
    languages = list(LANGUAGES)
    reads = bitext.sides({str(text.relative_to(raw)): text for text in rest}, languages)
    writes = [bitext.side(train, language) for language in languages]
    steps.run("join", reads, writes, lambda: join(rest, train))
    chosen_texts = bitext.sides({"train": train}, languages)
    tokenizer = run_sentencepiece(steps, chosen_texts, vocab_size)
    bitext.run_pieces(steps, texts, languages, tokenizer, workers)
    return steps.finish(lambda: bitext.count(dest, texts, languages))


@command("data-prep/newstest/prepare.py")
def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and prepare the corpus."""
    text = "with Multi30k, Tatoeba and software; --from has a folder of each"
    prepare(**bitext.arguments(__doc__, argv, mixed=text))


if __name__ == "__main__":
    sys.exit(main())
