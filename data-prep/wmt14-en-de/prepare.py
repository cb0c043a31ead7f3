"""Prepare WMT'14, English to German, for fairseq: download, verify, clean, tokenize, binarize.

    python data-prep/wmt14-en-de/prepare.py --dest data/wmt14-en-de --workers 8

See the README in this folder for sources, checksums, cleaning and counts.
"""

import contextlib
import functools
import io
import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from lrpe_fairseq.experiments.data import bitext
from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.data.pieces import SentencePiece, run_sentencepiece
from lrpe_fairseq.experiments.records.console import UserError, command
from lrpe_fairseq.experiments.records.files import atomic_write

LANGUAGES = ("en", "de")
VOCAB_SIZE = 40_000
LONGEST = 250  # pieces of each side of a clean pair
RATIO = 1.5  # of the longer side of a clean pair to its shorter one
TRAIN_LINES = 4_000_000  # maximum number of lines, both languages, to train sentencepiece on


@dataclass(frozen=True)
class Archive:
    """A published archive. members: our name -> file name of the member, in any folder."""

    url: str
    checksum: str
    members: Mapping[str, str]

    @property
    def file(self) -> str:
        """Its name."""
        return PurePosixPath(self.url).name


def _both(ours: str, theirs: str) -> dict[str, str]:
    return {f"{ours}.{language}": theirs.format(language) for language in LANGUAGES}


ARCHIVES = (
    Archive(
        "http://www.statmt.org/wmt13/training-parallel-europarl-v7.tgz",
        "0224c7c710c8a063dfd893b0cc0830202d61f4c75c17eb8e31836103d27d96e7",
        _both("europarl-v7", "europarl-v7.de-en.{}"),
    ),
    Archive(
        "http://www.statmt.org/wmt13/training-parallel-commoncrawl.tgz",
        "c7a74e2ea01ac6c920123108627e35278d4ccb5701e15428ffa34de86fa3a9e5",
        _both("commoncrawl", "commoncrawl.de-en.{}"),
    ),
    Archive(
        "http://www.statmt.org/wmt14/training-parallel-nc-v9.tgz",
        "cb8953f292298e6877ae433c98912b927cb0766b303f4540512ddd286c748485",
        _both("news-commentary-v9", "news-commentary-v9.de-en.{}"),
    ),
    Archive(
        "http://data.statmt.org/wmt19/translation-task/dev.tgz",
        "7a7deccf82ebb05ba508dba5eb21356492224e8f630ec4f992132b029b4b25e7",
        {
            "newstest2013.en": "newstest2013-src.en.sgm",
            "newstest2013.de": "newstest2013-ref.de.sgm",
        },
    ),
    Archive(
        "https://www.statmt.org/wmt14/test-full.tgz",
        "a8cd784e006feb32ac6f3d9ec7eb389a",
        {
            "newstest2014.en": "newstest2014-deen-src.en.sgm",
            "newstest2014.de": "newstest2014-deen-ref.de.sgm",
        },
    ),
)
TRAIN = ("europarl-v7", "commoncrawl", "news-commentary-v9")
HELD_OUT = {"valid": ("newstest2013", 3_000), "test": ("newstest2014", 3_003)}


# ---------------------------------------------------------------------------------------- obtain


def obtain(raw: Path, from_dir: Path | None, archives: Sequence[Archive] = ARCHIVES) -> None:
    """Write every text in both languages to ``raw``, from plain files or from the archives.

    Raises: UserError if a file is missing, truncated or another version.
    """
    for archive in archives:
        if from_dir is not None:
            for ours in archive.members:
                _take_plain(ours, raw, from_dir)
        missing = [ours for ours in archive.members if not (raw / ours).is_file()]
        if missing:
            packed = prep.obtain(archive.file, [archive.url], archive.checksum, raw, from_dir)
            _unpack(packed, {archive.members[ours]: ours for ours in missing}, raw)
            packed.unlink()  # gigabytes, of which the texts were taken


def _take_plain(ours: str, raw: Path, from_dir: Path) -> None:
    source = from_dir / ours
    if source.is_file():
        prep.unpack(functools.partial(open, source, "rb"), raw / ours)


def _unpack(packed: Path, members: Mapping[str, str], raw: Path) -> None:
    """Write members (file name -> our name); SGML is reduced to its segments, one per line."""
    with prep.readable(packed):
        for match, stream in prep.tar_members(packed, "|".join(map(re.escape, members))):
            text = segments(stream.read()) if match[0].endswith(".sgm") else stream
            prep.unpack(functools.partial(contextlib.nullcontext, text), raw / members[match[0]])
    for theirs, ours in members.items():
        if not (raw / ours).is_file():
            raise UserError(f"{packed} contains no {theirs}: fetch it again.")


def segments(content: bytes) -> IO[bytes]:
    """Return the segments of an SGML file as lines; entities are kept, as in sacrebleu."""
    sentences = re.findall(r"<seg[^>]*>(.*?)</seg>", content.decode("utf-8"), flags=re.DOTALL)
    return io.BytesIO("".join(f"{' '.join(segment.split())}\n" for segment in sentences).encode())


# --------------------------------------------------------------------------------------- prepare


def join(raw: Path, target: Path, stride: int = 1) -> None:
    """Write every ``stride``-th line of the concatenated training texts."""
    for language in LANGUAGES:
        with atomic_write(bitext.side(target, language)) as out:
            for name in TRAIN:
                for number, line in enumerate(prep.read_lines(raw / f"{name}.{language}")):
                    if number % stride == 0:
                        out.write(f"{line}\n")


def prepare(
    dest: Path,
    *,
    vocab_size: int = VOCAB_SIZE,
    from_dir: Path | None = None,
    workers: int = 1,
    archives: Sequence[Archive] = ARCHIVES,
    held_out: Mapping[str, tuple[str, int]] = HELD_OUT,
) -> dict:
    """Prepare ``dest`` and return its manifest; finished steps are skipped."""
    prep.say(f"WMT'14, English to German -> {dest}")
    steps = prep.Steps(dest, "wmt14-en-de", "bpe")
    raw = dest / "raw"
    text = dest / "text"
    # cleaning counts pieces, so that these are trained on a sample of the text before it
    obtain(raw, from_dir, archives)
    counts = _require_counts(raw, held_out)
    train = _run_join(steps, "join", raw, text / "joined" / "train")
    lines = len(LANGUAGES) * sum(counts[name] for name in TRAIN)
    stride = -(-lines // TRAIN_LINES)  # rounded up
    sample = _run_join(steps, "sample", raw, text / "sample" / "train", stride)
    sampled = bitext.sides({"train": sample}, LANGUAGES)
    tokenizer = run_sentencepiece(steps, sampled, vocab_size)
    texts = {"train": _run_clean(steps, train, text / "clean" / "train", tokenizer, workers)}
    texts |= {split: raw / name for split, (name, _) in held_out.items()}
    bitext.run_pieces(steps, texts, LANGUAGES, tokenizer, workers)

    def results() -> dict:
        counted = bitext.count(dest, texts, LANGUAGES)
        kept = counted["splits"]["train"]["pairs"]
        return {**counted, "sources": counts, "joined": sum(map(counts.get, TRAIN)), "clean": kept}

    manifest = steps.finish(results)
    prep.say(f"  train: {manifest['clean']:,} of {manifest['joined']:,} pairs are clean")
    return manifest


def _require_counts(raw: Path, held_out: Mapping[str, tuple[str, int]]) -> dict[str, int]:
    names = [*TRAIN, *(name for name, _ in held_out.values())]
    counts = bitext.require_pairs({name: raw / name for name in names}, LANGUAGES)
    for name, official in held_out.values():
        if counts[name] != official:
            raise UserError(
                f"{raw / name} has {counts[name]:,} pairs instead of {official:,}: fetch it again."
            )
    return counts


def _run_join(steps: prep.Steps, step: str, raw: Path, target: Path, stride: int = 1) -> Path:
    files = [f"{name}.{language}" for name in TRAIN for language in LANGUAGES]
    reads = {**{file: raw / file for file in files}, "stride": stride}
    writes = [bitext.side(target, language) for language in LANGUAGES]
    steps.run(step, reads, writes, lambda: join(raw, target, stride))
    return target


def _run_clean(
    steps: prep.Steps, train: Path, target: Path, tokenizer: SentencePiece, workers: int
) -> Path:
    reads = bitext.sides({"train": train}, LANGUAGES)
    reads |= {file.name: file for file in tokenizer.files}
    writes = [bitext.side(target, language) for language in LANGUAGES]
    steps.run("clean", reads, writes, lambda: clean(train, target, tokenizer, workers))
    return target


def clean(source: Path, target: Path, tokenizer: SentencePiece, threads: int) -> None:
    """Copy the pairs that pass the length filter: neither side is empty, longer than LONGEST
    pieces, or more than RATIO times as long as the other."""
    with contextlib.ExitStack() as stack:
        lines = [prep.read_lines(bitext.side(source, name)) for name in LANGUAGES]
        outs = [stack.enter_context(atomic_write(bitext.side(target, n))) for n in LANGUAGES]
        # many lines at once, which the tokenizer cuts in threads
        while batch := list(itertools.islice(zip(*lines, strict=True), 20_000)):
            columns = zip(*batch, strict=True)
            lengths = [[len(p.split()) for p in tokenizer.cut(c, threads)] for c in columns]
            for pair, sizes in zip(batch, zip(*lengths, strict=True), strict=True):
                if min(sizes) > 0 and max(sizes) <= min(LONGEST, RATIO * min(sizes)):
                    for out, text in zip(outs, pair, strict=True):
                        out.write(f"{text}\n")


@command("data-prep/wmt14-en-de/prepare.py")
def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and prepare the corpus."""
    prepare(**bitext.arguments(__doc__, argv, VOCAB_SIZE))


if __name__ == "__main__":
    sys.exit(main())
