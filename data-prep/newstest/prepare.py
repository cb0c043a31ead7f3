"""Prepare a small English-German news corpus from WMT's test sets of 2008 to 2018.

    python data-prep/newstest/prepare.py --dest data/newstest

newstest2013 is the validation set and newstest2014 (full, 3,003 pairs) the test set, as for WMT'14;
the other years are the training set. This is a smoke test of the WMT'14 pipeline, not the paper's
data; see the README in this folder.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from lrpe_fairseq.experiments.data import bitext
from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.data.pieces import run_sentencepiece
from lrpe_fairseq.experiments.records.console import UserError, command
from lrpe_fairseq.experiments.records.files import written_whole

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


def obtain(
    raw: Path, from_dir: Path | None, pairs: Mapping[str, int], sha256: Mapping[str, str]
) -> None:
    """Return every set in ``raw``, verified, in both languages."""
    for name in pairs:
        for ours, theirs in LANGUAGES.items():
            file = f"{name}.{ours}"
            prep.obtain(file, [f"{URL}{name}.{theirs}"], sha256[file], raw, from_dir)
    found = bitext.require_pairs({name: raw / name for name in pairs}, list(LANGUAGES))
    if found != pairs:
        raise UserError(
            f"The test sets have {pairs} pairs, but {found} were found: fetch them again."
        )


def join(raw: Path, names: Iterable[str], target: Path) -> None:
    """Write the train split: all sets that are not held out, in order."""
    for language in LANGUAGES:
        with written_whole(bitext.side(target, language)) as out:
            for name in names:
                out.write((raw / f"{name}.{language}").read_text(encoding="utf-8"))


def prepare(
    dest: Path,
    *,
    vocab_size: int = 4000,
    from_dir: Path | None = None,
    workers: int = 1,
    sha256: Mapping[str, str] = SHA256,
    pairs: Mapping[str, int] = PAIRS,
) -> dict:
    """Prepare ``dest`` and return its manifest; finished steps are skipped."""
    prep.say(f"WMT's news test sets, English to German -> {dest}")
    steps, raw, train = prep.Steps(dest, "newstest", "bpe"), dest / "raw", dest / "text" / "train"
    obtain(raw, from_dir, pairs, sha256)
    rest = [name for name in pairs if name not in HELD_OUT.values()]
    reads = {f"{n}.{language}": raw / f"{n}.{language}" for n in rest for language in LANGUAGES}
    writes = [bitext.side(train, language) for language in LANGUAGES]
    steps.run("join", reads, writes, lambda: join(raw, rest, train))
    texts = {"train": train, **{split: raw / name for split, name in HELD_OUT.items()}}
    languages = list(LANGUAGES)
    own = bitext.sides({"train": train}, languages)
    tokenizer = run_sentencepiece(steps, own, vocab_size)
    bitext.run_pieces(steps, texts, languages, tokenizer, workers)
    return steps.finish(lambda: bitext.count(dest, texts, languages))


@command("data-prep/newstest/prepare.py")
def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and prepare the corpus."""
    prepare(**bitext.arguments(__doc__, argv))


if __name__ == "__main__":
    sys.exit(main())
