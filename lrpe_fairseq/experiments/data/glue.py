"""The tasks of GLUE: the official files, their columns, and the metrics.

Classes are numbered as in the official scripts. fairseq's label dictionary lists them as ``0``,
``1``, ... in this order, so that a class has the same number there.
"""

import csv
import functools
import gzip
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.records.console import UserError

PAIR_TAGS = ("entailment", "not_entailment")
BINARY = ("0", "1")


@dataclass(frozen=True)
class GlueTask:
    """One task.

    inputs: columns of the one or two sentences. label: column of the label. labels: class ->
    label in the files; empty for a regression. metrics: GLUE's metrics; the first selects the best
    checkpoint. files: split -> published name, without ``.tsv``. examples: official number of
    examples per split. header: True if the files start with a line of column names.
    """

    inputs: tuple[int, ...]
    label: int
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    examples: Mapping[str, int]
    files: Mapping[str, str] = field(default_factory=lambda: {"train": "train", "valid": "dev"})
    header: bool = True

    @property
    def classes(self) -> int:
        """Number of outputs of the head: the classes, or 1 for a regression."""
        return len(self.labels) or 1


TASKS = {
    "CoLA": GlueTask(
        (3,), 1, BINARY, ("matthews",), {"train": 8_551, "valid": 1_043}, header=False
    ),
    "SST-2": GlueTask((0,), 1, BINARY, ("accuracy",), {"train": 67_349, "valid": 872}),
    "MRPC": GlueTask((3, 4), 0, BINARY, ("accuracy", "f1"), {"train": 3_668, "valid": 408}),
    "STS-B": GlueTask((7, 8), 9, (), ("pearson", "spearman"), {"train": 5_749, "valid": 1_500}),
    "QQP": GlueTask((3, 4), 5, BINARY, ("accuracy", "f1"), {"train": 363_846, "valid": 40_430}),
    "MNLI": GlueTask(
        (8, 9),
        -1,  # 12 columns in train, 16 in dev
        ("contradiction", "entailment", "neutral"),
        ("accuracy",),
        {"train": 392_702, "valid": 9_815, "valid1": 9_832},
        {"train": "train", "valid": "dev_matched", "valid1": "dev_mismatched"},
    ),
    "QNLI": GlueTask((1, 2), -1, PAIR_TAGS, ("accuracy",), {"train": 104_743, "valid": 5_463}),
    "RTE": GlueTask((1, 2), -1, PAIR_TAGS, ("accuracy",), {"train": 2_490, "valid": 277}),
}

CRITERION = {  # metric -> its name in fairseq's criterion, and the option that enables it
    "accuracy": ("accuracy", ""),
    "f1": ("f1", "report_acc_and_f1"),
    "matthews": ("mcc", "report_mcc"),
    "pearson": ("pearson", "report_pearson_and_spearman"),
    "spearman": ("spearman", "report_pearson_and_spearman"),
}


def named(name: str) -> GlueTask:
    """Return the task called ``name``. Raises: ValueError, which lists the known tasks."""
    if name not in TASKS:
        raise ValueError(f"unknown GLUE task {name!r}; choose from {', '.join(TASKS)}")
    return TASKS[name]


def scores(task: GlueTask, predicted: Sequence[float], wanted: Sequence[float]) -> dict[str, float]:
    """Return every metric of ``task``, times 100, and the number of ``examples``.

    predicted, wanted: class numbers, or values of a regression. A correlation with constant
    predictions is 0, as is F1 without a true positive.

    Raises: ValueError if the lengths differ or there are no predictions.
    """
    if len(predicted) != len(wanted) or not len(wanted):
        raise ValueError(f"{len(predicted)} predictions for {len(wanted)} examples")
    from scipy import stats
    from sklearn import metrics

    known = {
        "accuracy": metrics.accuracy_score,
        "f1": metrics.f1_score,
        "matthews": metrics.matthews_corrcoef,
        "pearson": lambda *sides: stats.pearsonr(*sides)[0],
        "spearman": lambda *sides: stats.spearmanr(*sides)[0],
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of constant predictions
        values = {name: known[name](wanted, predicted) for name in task.metrics}
    # A correlation with constant predictions is nan in scipy; GLUE counts it as 0.
    percent = {name: 100 * float(np.nan_to_num(value)) for name, value in values.items()}
    return {**percent, "examples": len(wanted)}


# ----------------------------------------------------------------------------------------- files

GLUE = "https://dl.fbaipublicfiles.com/glue/data/"
ARCHIVES = {"QQP": "QQP-clean", "QNLI": "QNLIv2"}  # with another name than the task's
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
OPTIONAL = ("valid1",)  # MNLI's mismatched half may be absent from --from

Example = tuple[list[str], str]  # the sentences, the label as in the file


def obtain(name: str, raw: Path, from_dir: Path | None) -> dict[str, Path]:
    """Return split -> TSV file in ``raw``, with at most as many examples as the official one.

    from_dir: a folder with ``<name>/train.tsv``, plain or ``.gz``, or a subset ``train.x.tsv``.

    Raises: UserError if a file is missing or corrupt, or as long as the official one but different.
    """
    task = TASKS[name]
    files = {}
    for split, file in task.files.items():
        target = raw / f"{file}.tsv"
        if from_dir is not None:
            kinds = (".tsv", ".tsv.gz", ".*.tsv")
            sources = [path for kind in kinds for path in (from_dir / name).glob(f"{file}{kind}")]
            if not sources and split in OPTIONAL:
                continue
            if not sources:
                raise UserError(
                    f"{from_dir / name} contains no {file}.tsv or {file}.tsv.gz: put the file "
                    "there, or omit --from to download it."
                )
            opener = gzip.open if sources[0].suffix == ".gz" else open
            prep.unpack(functools.partial(opener, sources[0], "rb"), target)
        elif not target.is_file():
            if name == "MRPC":
                fetch_mrpc(raw)
            else:
                fetch_archive(name, raw)
        _require_official(name, split, target)
        files[split] = target
    return files


def fetch_archive(name: str, raw: Path) -> None:
    """Download and unpack the official archive of one task."""
    file = f"{ARCHIVES.get(name, name)}.zip"
    archive = prep.obtain(file, [GLUE + file], "", raw)
    try:
        for file in TASKS[name].files.values():
            prep.unpack(
                functools.partial(prep.zip_member, archive, f"{file}.tsv"), raw / f"{file}.tsv"
            )
    finally:
        archive.unlink()


def fetch_mrpc(raw: Path) -> None:
    """Download MRPC, which has no archive: the pairs, and the ids of the dev split."""
    pairs = prep.obtain("msr_paraphrase_train.txt", [MRPC_PAIRS], "", raw)
    ids = prep.obtain("mrpc_dev_ids.tsv", [MRPC_DEV_IDS], "", raw)
    split_mrpc(pairs, ids, raw)
    pairs.unlink()
    ids.unlink()


def split_mrpc(pairs: Path, ids: Path, raw: Path) -> None:
    """Write ``train.tsv`` and ``dev.tsv`` in the official format; dev has the pairs in ``ids``."""
    # MRPC's official development set is a list of pairs of sentence numbers.
    dev = {tuple(row) for row in _rows(ids)}
    header, *rows = _rows(pairs)
    halves = {"train": [header], "dev": [header]}
    for row in rows:
        halves["dev" if tuple(row[1:3]) in dev else "train"].append(row)
    for file, kept in halves.items():
        prep.write_lines(raw / f"{file}.tsv", map("\t".join, kept))


def read_examples(path: Path, task: GlueTask) -> Iterator[Example]:
    """Yield the examples of a TSV file; quotes are text, a byte order mark is removed.

    Raises: UserError with the line number if a column is missing or the label is invalid.
    """
    rows = enumerate(_rows(path), start=1)
    if task.header:
        next(rows, None)
    for number, row in rows:
        try:
            sentences = [" ".join(row[column].split()) for column in task.inputs]
            label = row[task.label].strip()
        except IndexError:
            raise UserError(
                f"{path}, line {number}, has only {len(row)} columns: fetch the file again."
            ) from None
        if not _is_label(label, task):
            known = ", ".join(task.labels) or "a number from 0 to 5"
            raise UserError(
                f"{path}, line {number}, has the label {label!r} instead of {known}: the file "
                "belongs to another task or has another format."
            )
        yield sentences, label


def _rows(path: Path) -> Iterator[list[str]]:
    """The fields of every line. Raises: UserError if a line is not UTF-8 or too long."""
    with open(path, encoding="utf-8-sig", newline="\n") as text:
        rows = csv.reader(
            (line.rstrip("\r\n") for line in text), delimiter="\t", quoting=csv.QUOTE_NONE
        )
        try:
            yield from rows
        except (UnicodeDecodeError, csv.Error):
            raise UserError(
                f"{path}, line {rows.line_num} or the next, is not UTF-8 or has too long a field: "
                "fetch it again."
            ) from None


def _is_label(text: str, task: GlueTask) -> bool:
    """True for one of the labels, or for a score of a regression."""
    if task.labels:
        return text in task.labels
    try:
        return 0 <= float(text) <= 5
    except ValueError:
        return False


def _require_official(name: str, split: str, path: Path) -> None:
    """Raise UserError for more examples than in the official file, or as many but different."""
    task = TASKS[name]
    official = task.examples[split]
    known = SHA256.get(f"{name}/{path.name}")
    count = sum(1 for _ in read_examples(path, task))
    if count == 0 or count > official:
        raise UserError(f"{path} has {count:,} examples instead of {official:,}: fetch it again.")
    if count == official and known and not prep.has_checksum(path, known):
        raise UserError(f"{path} differs from the official file (sha256 {known}): fetch it again.")
