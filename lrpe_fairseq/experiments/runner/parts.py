"""Commits, data checksums and peak memory of a training, in ``usage.json`` of its run folder.

A training has one part per start or resumption.
"""

from pathlib import Path

from lrpe_fairseq.experiments.records.checkout import commit
from lrpe_fairseq.experiments.records.files import read_json, write_json
from lrpe_fairseq.experiments.records.runs import Run

FILE = "usage.json"


def read(folder: Path) -> Run:
    """Return ``commits`` (in order), ``data`` (checksums) and ``peak_memory_mb``.

    If an older version started the training, some of them are missing.
    """
    return read_json(folder / FILE)


def begin(folder: Path, data: dict[str, str], *, resumed: bool, code: str = "") -> None:
    """Store the commit and the data checksums of a part that starts.

    code: the commit of its code; default: that of the repository now.
    """
    known = read(folder) if resumed else {}
    commits = list(dict.fromkeys([*known.get("commits", []), code or commit()]))
    write_json(folder / FILE, {**known, "commits": commits, "data": data})


def end(folder: Path, memory: float) -> None:
    """Store the peak memory in MB of a finished part; the largest of all parts is kept."""
    known = read(folder)
    peak = max(round(memory, 1), known.get("peak_memory_mb", 0))
    write_json(folder / FILE, {**known, "peak_memory_mb": peak})


def provenance(folder: Path) -> Run:
    """Return fields of a run file: ``commit`` of the first part, ``commits`` if several.

    Empty if an older version started the training, whose commit is then unknown.
    """
    commits = read(folder).get("commits", [])
    first = {"commit": commits[0]} if commits else {}
    return first | ({"commits": commits} if len(commits) > 1 else {})
