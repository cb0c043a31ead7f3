"""Shards of prepared data: folders ``bin/shard0``, ``bin/shard1``, … of one data folder.

fairseq takes them as one path with colons. It trains on shard ``(epoch - 1) mod n`` and reads the
dictionary and the validation set of the first. Data without shards are in ``bin`` itself.
"""

import re
from pathlib import Path

from lrpe_fairseq.experiments.records.files import relative

SHARD = re.compile(r"shard(\d+)")


def folders(data: Path) -> list[Path]:
    """Return the folders of ``data`` that fairseq reads, shards in numeric order."""
    found = {p: SHARD.fullmatch(p.name) for p in (data / "bin").glob("shard*")}
    numbered = {path: int(match[1]) for path, match in found.items() if match}
    return sorted(numbered, key=numbered.__getitem__) or [data / "bin"]


def first(data: Path) -> Path:
    """Return the folder with the dictionary and the sets for evaluation."""
    return folders(data)[0]


def joined(data: Path) -> str:
    """Return fairseq's path of ``data``: ``task.data``."""
    return ":".join(map(relative, folders(data)))


def home(path: str) -> Path:
    """Return the data folder of fairseq's path.

    >>> home("data/wikibook/bin/shard0:data/wikibook/bin/shard1")
    PosixPath('data/wikibook')
    """
    folder = Path(path.split(":")[0])
    return folder.parent.parent if SHARD.fullmatch(folder.name) else folder.parent
