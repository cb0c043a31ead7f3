"""The official files of GLUE: download, check and read them."""

import csv
import functools
import gzip
import io
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.data.glue import TASKS, GlueTask
from lrpe_fairseq.experiments.records.console import UserError

GLUE = "https://dl.fbaipublicfiles.com/glue/data/"
ARCHIVES = {
    "CoLA": "CoLA.zip",
    "SST-2": "SST-2.zip",
    "STS-B": "STS-B.zip",
    "QQP": "QQP-clean.zip",
    "MNLI": "MNLI.zip",
    "QNLI": "QNLIv2.zip",
    "RTE": "RTE.zip",
}
MRPC_PAIRS = "https://dl.fbaipublicfiles.com/senteval/senteval_data/msr_paraphrase_train.txt"
MRPC_DEV_IDS = GLUE + "mrpc_dev_ids.tsv"
SHA256 = {  # of the official files, if known
    "CoLA/train.tsv": "cb368ebeb9f27d7ad03720d27ddc95687a311bdb100781a2fe59a5f5b1bc0624",
    "CoLA/dev.tsv": "8c013e21dc39957cac37378d87bebe225b694a0d5fe13eded66c2856628833fd",
    "RTE/train.tsv": "41e3a9b063433392343fad9e962cf2f58b681c78d8f71592f4186f0837246c5c",
    "RTE/dev.tsv": "80230dfa1347282e7b532b06a1004a76a710087541189bf874223ddf0e3819fb",
    "SST-2/train.tsv": "48eac26399f8456935f81dd9e3a745c1430adb6c62e233ccfe22db4a0d15d1d1",
    "SST-2/dev.tsv": "54a9c12c77e402fc14d6a66a506f24d999f596b0176eb777c972cccc2f9cc4b0",
    "STS-B/train.tsv": "41c4d978b6162abdcada7e49a982211954cca5459c228db478af333124b257a2",
    "STS-B/dev.tsv": "fe7dc0632a5033562f3cadff991f6e8d9b9b6311861660e78c3c82eb7db67f59",
    "QNLI/dev.tsv": "ac19409dcb04631eaaa094bdebdcf621086bc352503dfb6a1a648b614986f4fd",
}
SCORES = (0.0, 5.0)  # of STS-B
OPTIONAL = ("valid1",)  # MNLI's mismatched half may be absent from --from

Example = tuple[list[str], str]  # the sentences, the label as in the file


# ---------------------------------------------------------------------------------------- obtain


def obtain(name: str, raw: Path, from_dir: Path | None) -> dict[str, Path]:
    """Return split -> TSV file in ``raw``. Raises: UserError if one is missing or corrupt."""
    if from_dir is not None:
        return _take(name, raw, from_dir / name)
    files = {split: raw / f"{file}.tsv" for split, file in TASKS[name].files.items()}
    if not all(file.is_file() for file in files.values()):
        fetch_mrpc(raw) if name == "MRPC" else fetch_archive(name, raw)
    return files


def fetch_archive(name: str, raw: Path) -> None:
    """Download and unpack the official archive of one task."""
    archive = prep.download(ARCHIVES[name], [GLUE + ARCHIVES[name]], raw, zipfile.is_zipfile)
    for file in TASKS[name].files.values():
        opener = functools.partial(prep.zip_member, archive, f"{file}.tsv")
        prep.copy_whole(opener, raw / f"{file}.tsv")
    archive.unlink()


def fetch_mrpc(raw: Path) -> None:
    """Download MRPC, which has no archive: the pairs, and the ids of the dev split."""
    pairs = prep.download("msr_paraphrase_train.txt", [MRPC_PAIRS], raw)
    ids = prep.download("mrpc_dev_ids.tsv", [MRPC_DEV_IDS], raw)
    split_mrpc(pairs, ids, raw)
    pairs.unlink()
    ids.unlink()


def split_mrpc(pairs: Path, ids: Path, raw: Path) -> None:
    """Write ``train.tsv`` and ``dev.tsv`` in the official format; dev has the pairs in ``ids``."""
    dev = {tuple(row) for row in _rows(ids)}
    header, *rows = _rows(pairs)
    halves = {"train": [header], "dev": [header]}
    for row in rows:
        halves["dev" if tuple(row[1:3]) in dev else "train"].append(row)
    for file, kept in halves.items():
        with prep.written_whole(raw / f"{file}.tsv") as out:
            out.writelines("\t".join(row) + "\n" for row in kept)


def _take(name: str, raw: Path, folder: Path) -> dict[str, Path]:
    """Take a folder's files: ``train.tsv``, plain or ``.gz``, or a subset ``train.x.tsv``."""
    taken = {}
    for split, file in TASKS[name].files.items():
        found = [p for kind in (".tsv", ".tsv.gz", ".*.tsv") for p in folder.glob(f"{file}{kind}")]
        if found:
            opener = functools.partial(_open, found[0])
            taken[split] = prep.copy_whole(opener, raw / f"{file}.tsv")
        elif split not in OPTIONAL:
            raise UserError(
                f"{folder} contains no {file}.tsv or {file}.tsv.gz: put the file there, "
                f"or omit --from to download it."
            )
    return taken


def _open(path: Path) -> io.BufferedIOBase:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


# ------------------------------------------------------------------------------------------ read


def read_examples(path: Path, task: GlueTask) -> Iterator[Example]:
    """Yield the examples of a TSV file; quotes are text, a byte order mark is removed.

    Raises: UserError with the line number if a column is missing or the label is invalid, or if the
        header is missing, since the first example would be lost.
    """
    rows = _rows(path)
    if task.header:
        _require_header(next(rows, []), task, path)
    for number, row in enumerate(rows, start=2 if task.header else 1):
        try:
            sentences = [" ".join(row[column].split()) for column in task.inputs]
            label = row[task.label].strip()
        except IndexError:
            raise UserError(
                f"{path}, line {number}, has only {len(row)} columns: fetch the file again."
            ) from None
        _require_label(label, task, f"{path}, line {number}")
        yield sentences, label


def _rows(path: Path) -> Iterator[list[str]]:
    """The fields of every line. Raises: UserError if a line is not UTF-8 or too long."""
    with open(path, encoding="utf-8-sig", newline="\n") as text:
        rows = csv.reader(
            (line.rstrip("\r\n") for line in text), delimiter="\t", quoting=csv.QUOTE_NONE
        )
        try:
            yield from rows
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path} is not UTF-8 after line {rows.line_num} ({error.reason}): fetch it again."
            ) from None
        except csv.Error as error:
            raise UserError(
                f"{path}, line {rows.line_num}, cannot be read ({error}): fetch it again."
            ) from None


def _require_header(row: Sequence[str], task: GlueTask, path: Path) -> None:
    label = row[task.label].strip() if len(row) > task.label else ""
    if label in task.labels or (not task.labels and _is_number(label)):
        raise UserError(
            f"{path}, line 1, is an example where the names of the columns belong: put the "
            f"official header back."
        )


def _require_label(label: str, task: GlueTask, where: str) -> None:
    if task.labels and label not in task.labels:
        raise UserError(
            f"{where}, has the label {label!r}, which is none of {', '.join(task.labels)}: "
            f"the file belongs to another task or has another format."
        )
    low, high = SCORES
    if not task.labels and not (_is_number(label) and low <= float(label) <= high):
        raise UserError(f"{where}, has the score {label!r}, which is no number from 0 to 5.")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def require_official(name: str, file: str, path: Path, found: int, official: int) -> None:
    """Raise UserError for more examples than in the official file, or as many but different."""
    known = SHA256.get(f"{name}/{file}.tsv")
    if found == 0 or found > official:
        raise UserError(f"{path} has {found:,} examples instead of {official:,}: fetch it again.")
    if found == official and known and not prep.has_checksum(path, known):
        raise UserError(f"{path} differs from the official file (sha256 {known}): fetch it again.")
