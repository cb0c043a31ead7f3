"""All results as one file: ``results/results.csv.gz``, one line per measured number."""

import csv
import gzip
import io
from collections.abc import Iterator, Mapping
from pathlib import Path

from lrpe_fairseq.experiments.records.runs import Run, read_runs

FILE = "results/results.csv.gz"
OF_RUN = (
    "experiment", "scale", "label", "dataset", "task", "attention_type", "position_encoding",
    "seed", "million_parameters", "evaluated_update", "commit",
)  # fmt: skip
"""Fields of a run that its lines repeat, empty where a run has none."""
COLUMNS = ("run", *OF_RUN, "split", "protocol", "metric", "value")


def pages(root: Path) -> dict[str, str]:
    """Return path relative to ``root`` -> text before compression."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for name, run in read_runs(root / "results" / "runs").items():
        of_run = [name, *(run.get(field, "") for field in OF_RUN)]
        writer.writerows([*of_run, *number] for number in numbers(run))
    return {FILE: text.getvalue()}


def pictures(root: Path) -> Mapping[str, object]:
    """There are none."""
    return {}


def numbers(run: Run) -> Iterator[tuple[str, str, str, object]]:
    """Yield split, protocol, metric and value of every number of a run file."""
    for split, by_protocol in run["metrics"].items():
        for protocol, by_metric in by_protocol.items():
            for metric, value in by_metric.items():
                yield split, protocol, metric, shortened(value)


def shortened(value: object) -> object:
    """Return a float with eight significant digits, which keeps the file small."""
    return f"{value:.8g}" if isinstance(value, float) else value


def compress(text: str) -> bytes:
    """Return ``text`` with gzip; equal texts give equal bytes."""
    return gzip.compress(text.encode("utf-8"), mtime=0)


def decompress(data: bytes) -> str:
    """Return the text that :func:`compress` has compressed."""
    return gzip.decompress(data).decode("utf-8")
