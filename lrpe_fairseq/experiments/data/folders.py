"""Prepared data folders: ``bin/`` and the ``manifest.json`` that data-prep writes beside it."""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lrpe_fairseq.experiments.records.console import UserError
from lrpe_fairseq.experiments.records.files import ROOT, read_json, relative


def manifest(data: Path) -> dict[str, Any]:
    """What data-prep wrote about a data folder; empty if it was made by other means."""
    return read_json(data / "manifest.json")


def dataset_name(data: Path) -> str:
    """Corpus and level, such as ``wikitext-2-bpe``; the folder's name without a manifest."""
    known = manifest(data)
    return f"{known['corpus']}-{known['level']}" if "corpus" in known else data.name


def is_prepared(data: Path) -> bool:
    """True if ``data`` holds binarized text with its dictionary."""
    return any((data / "bin").rglob("dict*.txt"))


def require(data: Path, preparation: Sequence[str]) -> None:
    """Raise UserError, with the command that helps, if ``data`` is not prepared.

    preparation: the data-prep script and its arguments; empty if none is known.
    """
    if not is_prepared(data):
        how = f"run .venv/bin/python {shlex.join(preparation)}" if preparation else "prepare it"
        raise UserError(f"{relative(data)} is not there: {how}")


def require_splits(data: Path, splits: Sequence[str]) -> None:
    """Raise UserError if ``data`` lacks one of ``splits``; without a manifest nothing is known."""
    known = manifest(data).get("splits", {})
    for split in splits:
        if known and split not in known:
            raise UserError(
                f"{relative(data)} has no split {split}, which is to be evaluated; it has "
                f"{', '.join(known)}"
            )


def prepare(data: Path, preparation: Sequence[str], source: Path | None = None) -> None:
    """Run ``preparation`` unless ``data`` is prepared: from the network, or from ``source``.

    With ``source`` it always runs: finished steps are skipped, another source is refused.

    Raises: UserError if the script fails, or if there is none.
    """
    if is_prepared(data) and source is None:
        return
    if not preparation:
        require(data, preparation)
    script = [sys.executable, *preparation, *(["--from", str(source)] if source else [])]
    print(shlex.join(script), flush=True)
    if subprocess.run(script, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}).returncode:
        raise UserError(f"{relative(data)} could not be prepared")
