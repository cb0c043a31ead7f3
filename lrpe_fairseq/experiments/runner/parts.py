"""What a run folder remembers of its training beside checkpoints and logs: ``usage.json``.

A training can have several parts, one for each time that it was started or resumed.
"""

from pathlib import Path

from lrpe_fairseq.experiments.records.checkout import commit
from lrpe_fairseq.experiments.records.files import read_json, write_json
from lrpe_fairseq.experiments.records.runs import Run

FILE = "usage.json"


def read(folder: Path) -> Run:
    """``commits`` (in order), ``data`` (checksums) and ``peak_memory_mb``, as far as known.

    A training that an older version began lacks some of them.
    """
    return read_json(folder / FILE)


def begin(folder: Path, data: dict[str, str], *, resumed: bool) -> None:
    """Remember the commit and the data of a part that starts now."""
    known = read(folder) if resumed else {}
    commits = list(dict.fromkeys([*known.get("commits", []), commit()]))
    write_json(folder / FILE, {**known, "commits": commits, "data": data})


def end(folder: Path, memory: float) -> None:
    """Remember the peak memory in MB of a finished part, the largest of all parts."""
    known = read(folder)
    peak = max(round(memory, 1), known.get("peak_memory_mb", 0))
    write_json(folder / FILE, {**known, "peak_memory_mb": peak})


def provenance(folder: Path) -> Run:
    """Fields of the run file: ``commit`` of the first part, and ``commits`` if there are several.

    Empty for a training that an older version began: the commit of its start is not known.
    """
    commits = read(folder).get("commits", [])
    first = {"commit": commits[0]} if commits else {}
    return first | ({"commits": commits} if len(commits) > 1 else {})
