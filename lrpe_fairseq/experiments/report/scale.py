"""What trainings of the papers' sizes need, for docs/fairseq.md and docs/running.md.

The files are written by ``benchmarks.criteria``, ``benchmarks.sequence_parallel``,
``benchmarks.paper_configs`` and ``benchmarks.estimates``.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lrpe_fairseq.experiments.records.files import CONFIGS, load_config, read_json
from lrpe_fairseq.experiments.report import markdown
from lrpe_fairseq.experiments.runner.arithmetic import GB

BENCH = Path("results", "bench")
NOT_MEASURED = "Not measured."
CARD = 16 * GB
"""Memory of the smaller V100."""
SIZES = (1, 2, 4)
"""Numbers of processes that share a text."""


# --- without the logits --------------------------------------------------------------------------


def criteria_table(root: Path) -> str:
    """Return peak memory and time of an update by criterion, and the longest text that fits."""
    found = read_json(root / BENCH / "criteria.json")
    if not found:
        return NOT_MEASURED
    rows = found["rows"]
    names = dict.fromkeys(row["criterion"] for row in rows)
    return markdown.rendered(
        "criteria.md.j2",
        **found,
        batch=load_config(CONFIGS / "lm" / f"{found['config']}.yaml").dataset.max_tokens,
        longest={name: longest_texts(rows, name) for name in names},
        lines={name: line_of(rows, name) for name in names},
        sizes=SIZES,
        machine=markdown.processors(found["hardware"]),
        GB=GB,
    ).rstrip()


def line_of(rows: Iterable[Mapping[str, Any]], criterion: str) -> tuple[float, float]:
    """Return a and b of peak = a + b tokens, through the two largest batches.

    The peak of smaller ones is not on this line: there Adam's step needs more than the tokens.
    """
    own = (row for row in rows if row["criterion"] == criterion)
    (small, least), (large, most) = sorted((row["tokens"], row["peak"]) for row in own)[-2:]
    slope = (most - least) / (large - small)
    return least - slope * small, slope


def longest_texts(rows: Iterable[Mapping[str, Any]], criterion: str) -> list[int]:
    """Return the tokens of the longest text in :data:`CARD` for every number of processes.

    Each of N processes holds T / N tokens: T = N (16 GB - a) / b, rounded down to hundreds.
    """
    fixed, each = line_of(rows, criterion)
    return [int(ranks * (CARD - fixed) / each) // 100 * 100 for ranks in SIZES]


# --- a sequence over several processes ----------------------------------------------------------


def bytes_table(root: Path) -> str:
    """Return the bytes that a process sends for a layer and a token, a row per encoding."""
    counted = read_json(root / BENCH / "sequence-parallel.json").get("bytes")
    if not counted:
        return NOT_MEASURED
    cells: dict[str, dict[tuple[str, int], str]] = {}
    for row in counted["rows"]:
        place = row["attention"], row["processes"]
        cells.setdefault(row["encoding"], {})[place] = f"{row['bytes']:,.0f}"
    places = list(dict.fromkeys(place for own in cells.values() for place in own))
    places.sort(key=lambda place: (place[1], place[0]))
    head = ["encoding", *(f"{kind}, N = {ranks}" for kind, ranks in places)]
    lines = [[f"`{name}`", *(own[place] for place in places)] for name, own in cells.items()]
    return markdown.table(head, lines, numbers=True)


def times_table(root: Path) -> str:
    """Return the times of a text over two processes relative to one, with their quartiles."""
    times = read_json(root / BENCH / "sequence-parallel.json").get("times")
    if not times:
        return NOT_MEASURED
    machine = markdown.processors(times["hardware"])
    return markdown.rendered("sequence-parallel.md.j2", **times, machine=machine).rstrip()


# --- hours ---------------------------------------------------------------------------------------


def hours_table(root: Path) -> str:
    """Return hours, memory and disk of the papers' tables on a cluster, by arithmetic."""
    computed = read_json(root / BENCH / "estimates.json")
    return markdown.rendered("hours.md.j2", **computed).rstrip() if computed else "Not computed."


def batches_table(root: Path) -> str:
    """Return the memory and time of a batch of every configuration of the papers' size."""
    found = read_json(root / BENCH / "paper-configs.json")
    if not found:
        return NOT_MEASURED
    machines = sorted({markdown.processors(row["hardware"]) for row in found["rows"]})
    return markdown.rendered("batches.md.j2", **found, machines=machines, GB=GB).rstrip()
