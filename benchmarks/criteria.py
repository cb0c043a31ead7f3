"""Memory and time of an update with and without the logits: ``python -m benchmarks.criteria``.

configs/lm/wikitext103.yaml trains on generated text with its 267,744 words, once with fairseq's
``cross_entropy`` and once with ``lrpe_cross_entropy``. Every measurement is a process of its own,
with one thread, started by fairseq-hydra-train. The result is results/bench/criteria.json, which
docs/fairseq.md shows; ``--missing`` keeps its rows and adds those that it lacks.

Seconds are those of the processor, so that other work on the machine hardly counts. The peak is
that of the whole process, Python and torch included. Adam has its moments before the update, as in
all updates of a training but the first.
"""

import argparse
import re
import tempfile
from pathlib import Path
from typing import NamedTuple

from benchmarks.updates import measured, prepare_process, write_dictionary, write_rows
from lrpe_fairseq.experiments.records.files import ROOT, read_json, write_json
from lrpe_fairseq.experiments.records.machine import environment
from lrpe_fairseq.experiments.runner import arithmetic

TARGET = ROOT / "results" / "bench" / "criteria.json"
CONFIG = "wikitext103"
WORDS = arithmetic.WORDS["wikitext-103-word"]
STOCK, OURS = "cross_entropy", "lrpe_cross_entropy"
BLOCK = 512
"""Tokens of a text in wikitext103.yaml."""
SPARE = 3 * arithmetic.GB
"""Memory that is left to other processes: a larger batch is not tried."""


class Contest(NamedTuple):
    """One measurement: a criterion, the tokens of a batch, and those of a text in it."""

    criterion: str
    tokens: int
    length: int = BLOCK


CONTESTS = (
    Contest(OURS, 1024),
    Contest(STOCK, 1024),
    Contest(STOCK, 2048),
    Contest(OURS, 4096),
    Contest(STOCK, 4096),
    Contest(OURS, 8192, length=8192),
)


def write_text(folder: Path) -> Path:
    """Write the text of one update."""
    data = folder / "data"
    write_dictionary(data / "dict.txt", WORDS)
    for split, length in (("train", max(contest.tokens for contest in CONTESTS)), ("valid", 2)):
        write_rows(data / split, 1, length, WORDS)
    return data


def settings_of(contest: Contest) -> dict[str, str]:
    """Return the overrides of a contest."""
    return {
        "task.tokens_per_sample": str(contest.length),
        "dataset.max_tokens": str(contest.tokens),
        "criterion._name": contest.criterion,
    }


def expected_peak(contest: Contest, rows: list[dict]) -> float:
    """Return the bytes that a batch should need, by the line through smaller ones."""
    known = sorted((r["tokens"], r["peak"]) for r in rows if r["criterion"] == contest.criterion)
    if len(known) < 2:
        return 0.0
    (small, least), (large, most) = known[0], known[-1]
    return least + (most - least) / (large - small) * (contest.tokens - small)


def available_memory() -> float:
    """Return the bytes that a new process can have."""
    (line,) = re.findall(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())
    return 1024.0 * int(line)


def main() -> None:
    """Measure all contests that fit into the memory, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--missing", action="store_true", help="keep the rows of the file")
    options = parser.parse_args()
    prepare_process()
    stated = environment()
    del stated["kernels"]  # those of this process, which computes nothing
    about = {"config": CONFIG, "words": WORDS, "dtype": "float32", "threads": 1, **stated}
    rows: list[dict] = read_json(TARGET)["rows"] if options.missing else []
    known = [Contest(row["criterion"], row["tokens"], row["length"]) for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        data = write_text(Path(folder))
        for contest in CONTESTS:
            if contest in known:
                continue
            needed = expected_peak(contest, rows) + SPARE
            if needed > available_memory():
                print(
                    f"{contest}: not measured, it needs {needed / arithmetic.GB:.1f} GB", flush=True
                )
                continue
            found = measured("lm", CONFIG, data, settings_of(contest))
            rows.append({**contest._asdict(), **found})
            print(rows[-1], flush=True)
            write_json(TARGET, {**about, "rows": rows}, sort_keys=True)


if __name__ == "__main__":
    main()
