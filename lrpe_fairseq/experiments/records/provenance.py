"""Which commits trained a run, on which machines and data: ``usage.json`` in its folder.

A training may have several parts, because a stopped one is resumed, perhaps by a later commit.
"""

from pathlib import Path
from typing import Any

from lrpe_fairseq.experiments.records.files import commit, read_json, write_json
from lrpe_fairseq.experiments.records.machine import UNKNOWN, machine

USAGE = "usage.json"
"""File in a run folder: commits and machines of all parts of a training, and checksums of data."""


def usage(folder: Path) -> dict[str, Any]:
    """Return ``commits``, ``machines`` and ``data`` (checksums) of a run folder.

    Older versions stored less.
    """
    return read_json(folder / USAGE)


def begin_part(folder: Path, data: dict[str, str], *, resumed: bool) -> None:
    """Store the commit, the machine and the data checksums of a part that starts."""
    known = usage(folder) if resumed else {}
    if known.get("commits") and "machines" not in known:
        known = {**known, "machines": [UNKNOWN]}  # an older version began it
    parts = {"commits": commit(), "machines": machine()}
    # In order and once each: most trainings resume on the machine that began them.
    for name, value in parts.items():
        earlier = known.get(name, [])
        parts[name] = earlier if value in earlier else [*earlier, value]
    write_json(folder / USAGE, {**known, **parts, "data": data})


def machines(folder: Path) -> list[dict[str, Any]]:
    """Return the machines of the parts of a training; none if an older version started it."""
    return usage(folder).get("machines", [])


def provenance(folder: Path) -> dict[str, Any]:
    """Return fields of a run file: ``commit`` of the first part, ``commits`` if several.

    Empty if an older version started the training, whose commit is then unknown.
    """
    commits = usage(folder).get("commits", [])
    first = {"commit": commits[0]} if commits else {}
    # One commit needs no list, and old run files have none.
    return first | ({"commits": commits} if len(commits) > 1 else {})
