"""Which commits trained a run, and on which data: ``usage.json`` in its folder.

A training may have several parts, because a stopped one is resumed, perhaps by a later commit.
"""

from pathlib import Path
from typing import Any

from lrpe_fairseq.experiments.records.files import commit, read_json, write_json

USAGE = "usage.json"
"""File in a run folder: the commits of all parts of a training, and the checksums of its data."""


def usage(folder: Path) -> dict[str, Any]:
    """Return ``commits`` and ``data`` (checksums) of a run folder; older versions stored less."""
    return read_json(folder / USAGE)


def begin_part(folder: Path, data: dict[str, str], *, resumed: bool) -> None:
    """Store the commit and the data checksums of a part that starts."""
    known = usage(folder) if resumed else {}
    # In order and once each: most trainings resume with the commit that began them.
    commits = list(dict.fromkeys([*known.get("commits", []), commit()]))
    write_json(folder / USAGE, {**known, "commits": commits, "data": data})


def provenance(folder: Path) -> dict[str, Any]:
    """Return fields of a run file: ``commit`` of the first part, ``commits`` if several.

    Empty if an older version started the training, whose commit is then unknown.
    """
    commits = usage(folder).get("commits", [])
    first = {"commit": commits[0]} if commits else {}
    # One commit needs no list, and old run files have none.
    return first | ({"commits": commits} if len(commits) > 1 else {})
