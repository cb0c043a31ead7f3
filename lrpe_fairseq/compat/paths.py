"""A path with a colon in it is one path where it exists."""

import functools
import os
from collections.abc import Callable
from pathlib import Path

from fairseq import utils


def keep_existing_paths_whole() -> None:
    """Read ``--path`` and data folders such as ``runs/linear-gated:rope`` as one path.

    Break: fairseq splits at every colon, and names of encodings have colons. Parts that exist only
    when joined are joined again, so that ``a.pt:b.pt`` is still an ensemble.
    """
    split: Callable[..., list[str]] = utils.split_paths
    if split("a:b") != ["a", "b"] or hasattr(split, "__wrapped__"):
        return

    @functools.wraps(split)
    def split_paths(paths: str, separator: str = os.pathsep) -> list[str]:
        return joined_if_existing(split(paths, separator=separator), separator)

    utils.split_paths = split_paths


def joined_if_existing(parts: list[str], separator: str) -> list[str]:
    """Return the parts, neighbors joined where only the joined path exists.

    The longest existing path that begins at a part wins; a part of none stays as it is.
    """
    found: list[str] = []
    first = 0
    while first < len(parts):
        ends = range(len(parts), first + 1, -1)
        whole = (end for end in ends if Path(separator.join(parts[first:end])).exists())
        end = next(whole, first + 1)
        found.append(separator.join(parts[first:end]))
        first = end
    return found
