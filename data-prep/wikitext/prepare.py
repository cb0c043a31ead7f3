"""Prepare WikiText-2 or WikiText-103 for fairseq: download, verify, tokenize, binarize.

    python data-prep/wikitext/prepare.py wikitext-2 --level bpe --dest data/wikitext-2-bpe

See the README in this folder for sources, license, checksums and counts.
"""

from __future__ import annotations

import functools
import itertools
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.data.pieces import obtain_gpt2, run_pieces, run_sentencepiece
from lrpe_fairseq.experiments.records.console import UserError, command


@dataclass(frozen=True)
class WikiText:
    """The expected contents of a WikiText release; ``tokens`` include one </s> per line."""

    archive: str
    archive_sha256: str
    checksums: Mapping[str, str]
    tokens: Mapping[str, int]
    word_types: int  # in the train split, including <unk>, without </s>
    dictionary_size: int  # in fairseq: word types, <s>, <pad>, </s>, padded to a multiple of 8


MIRRORS = (
    "https://wikitext.smerity.com/",  # run by the author of the data set
    "https://s3.amazonaws.com/research.metamind.io/wikitext/",  # original location; closed
)
CORPORA = {
    "wikitext-2": WikiText(
        archive="wikitext-2-v1.zip",
        archive_sha256="92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
        checksums={
            "train": "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
            "valid": "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
            "test": "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
        },
        tokens={"train": 2_088_628, "valid": 217_646, "test": 245_569},
        word_types=33_277,
        dictionary_size=33_280,
    ),
    "wikitext-103": WikiText(
        archive="wikitext-103-v1.zip",
        archive_sha256="242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
        checksums={
            "train": "b7497e2dfe77e72cfef5e3dbc61b7b53712ac211",  # sha1: see the README
            "valid": "9aee9f52d6e77de6c7751fc5e7c44287db3ec0eaf15477098acc6b93c1c4250b",
            "test": "56db52eb157b1ab5c89646eef70510c1eca6e12a3bfdb99f0d6b05b4eacb75b9",
        },
        tokens={"train": 103_227_021, "valid": 217_646, "test": 245_569},
        word_types=267_734,
        dictionary_size=267_744,
    ),
}


def obtain_splits(
    corpus: WikiText, raw: Path, from_dir: Path | None, mirrors: Sequence[str] = MIRRORS
) -> dict[str, Path]:
    """Return split -> verified ``wiki.*.tokens`` in ``raw``.

    ``from_dir`` contains either the published archive or the three files, plain or compressed.
    """
    files = {split: f"wiki.{split}.tokens" for split in prep.SPLITS}
    known = {file: corpus.checksums[split] for split, file in files.items()}
    missing = [file for file in known if not prep.has_checksum(raw / file, known[file])]
    archive = (from_dir or raw) / corpus.archive
    if missing and from_dir is None:
        urls = [mirror + corpus.archive for mirror in mirrors]
        prep.obtain(corpus.archive, urls, corpus.archive_sha256, raw)
    for file in missing:
        # --from may have the archive or the plain files
        if archive.is_file():
            member = functools.partial(prep.zip_member, archive, file)
            prep.unpack(member, raw / file, known[file])
        else:
            prep.obtain(file, (), known[file], raw, from_dir)
    (raw / corpus.archive).unlink(missing_ok=True)  # all of it is unpacked and verified
    return {split: raw / file for split, file in files.items()}


def find_articles(text: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number from 0, title) of every article.

    An article starts at `` = Title = `` with an empty line before and after it. The empty lines
    are required because tables and formulas have lines that look like headings.
    """
    lines = prep.read_lines(text)
    before = ""
    line = next(lines, "")
    for number, after in enumerate(itertools.chain(lines, [""])):
        if not before and not after and re.fullmatch(r"= (?!= ).+ =", line):
            yield number, line[2:-2]
        before = line
        line = after


def run_documents(steps: prep.Steps, texts: Mapping[str, Path]) -> None:
    """Step: write ``documents/<split>.tsv``, the line number from 0 and title of every article."""
    writes = {split: steps.dest / "documents" / f"{split}.tsv" for split in texts}

    def make() -> None:
        for split, text in texts.items():
            articles = find_articles(text)
            prep.write_lines(writes[split], (f"{number}\t{title}" for number, title in articles))

    steps.run("documents", texts, list(writes.values()), make)


def verify(corpus: WikiText, level: str, results: Mapping[str, dict]) -> None:
    """Raise UserError if the counts differ from those of the published corpus."""
    key = "tokens" if level == "word" else "words_with_eos"
    counted = {split: counts[key] for split, counts in results["splits"].items()}
    expected = dict(corpus.tokens)
    if level == "word":
        counted["dictionary size"] = results["dictionary"]["size"]
        # <unk> is a special symbol of fairseq, and a word of the corpus
        counted["word types"] = results["dictionary"]["symbols"] + 1
        expected |= {"dictionary size": corpus.dictionary_size, "word types": corpus.word_types}
    wrong = [
        f"{name} {counted[name]:,} (not {count:,})"
        for name, count in expected.items()
        if counted[name] != count
    ]
    if wrong:
        raise UserError(
            f"The counts differ from the published corpus: {', '.join(wrong)}; "
            f"delete the --dest folder and run the same command again."
        )


def prepare(
    name: str,
    level: str,
    dest: Path,
    *,
    vocab_size: int = 4000,
    from_dir: Path | None = None,
    workers: int = 1,
    corpora: Mapping[str, WikiText] = CORPORA,
    mirrors: Sequence[str] = MIRRORS,
) -> dict:
    """Prepare ``dest`` and return its manifest; finished steps are skipped."""
    corpus = corpora[name]
    prep.say(f"{name}, {level} level -> {dest}")
    steps = prep.Steps(dest, name, level)
    texts = obtain_splits(corpus, dest / "raw", from_dir, mirrors)
    run_documents(steps, texts)
    if level == "word":
        steps.binarize(texts, workers=workers)
    else:
        train = {"train": texts["train"]}
        tokenizer = (
            obtain_gpt2(dest, from_dir)
            if level == "gpt2"
            else run_sentencepiece(steps, train, vocab_size)
        )
        run_pieces(steps, texts, tokenizer, workers)

    def results() -> dict:
        counted = prep.count_corpus(dest, texts)
        try:
            verify(corpus, level, counted)
        except UserError:
            # otherwise a second run would find it finished
            shutil.rmtree(dest / "bin")
            raise
        return counted

    return steps.finish(results)


@command("data-prep/wikitext/prepare.py")
def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and prepare one corpus."""
    parser = prep.parser(__doc__, "folder with the source files")
    parser.add_argument("corpus", choices=sorted(CORPORA))
    parser.add_argument("--level", choices=("word", "bpe", "gpt2"), required=True)
    parser.add_argument(
        "--vocab-size", type=int, default=4000, help="number of pieces at level bpe"
    )
    parser.add_argument("--workers", type=int, default=1, help="worker processes")
    args = parser.parse_args(argv)
    prepare(
        args.corpus,
        args.level,
        args.dest,
        vocab_size=args.vocab_size,
        from_dir=args.from_dir,
        workers=args.workers,
    )


if __name__ == "__main__":
    sys.exit(main())
