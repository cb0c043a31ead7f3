"""Regenerate the generated pages (``make docs``), or name the stale ones (``--check``).

``python -m lrpe_fairseq.experiments.report.docs [--check] [--root DIR] [PART ...]`` writes all
parts or the named ones. A part is a module with ``pages`` (path -> text) and ``pictures`` (path ->
function that draws it). Every number comes from a run file, a configuration or ``results/paper``.
"""

import argparse
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from types import ModuleType

from lrpe_fairseq.experiments.records.console import command, refused_without
from lrpe_fairseq.experiments.records.files import ROOT
from lrpe_fairseq.experiments.records.runs import shorten

try:
    from lrpe_fairseq.experiments.report import choosing, data, drift, gallery, pages, sheets, speed
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    sys.exit(refused_without("docs", error))

Draw = Callable[[Path], None]
"""Draws a picture to a path."""
PARTS: dict[str, ModuleType] = {
    "results": pages,
    "drift": drift,
    "choosing": choosing,
    "marked": gallery,
    "speed": speed,
    "data": data,
}
GENERATED = (
    "results/*.md", "results/*.csv", "results/*.csv.gz", "results/bench/*.csv",
    "results/figures/*.png", "docs/*.png",
)  # fmt: skip
"""Patterns of files that are never written by hand."""


@command("docs")
def main(arguments: list[str] | None = None) -> int:
    """Write or check the pages; return the exit status."""
    parser = argparse.ArgumentParser(prog="docs", description="Render the generated pages.")
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)"
    )
    parser.add_argument("--check", action="store_true", help="name stale files and exit with 1")
    parser.add_argument("--root", type=Path, default=ROOT, help="root of the repository")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.parts) - set(PARTS)):
        parser.error(f"unknown part {', '.join(unknown)}; choose from {', '.join(PARTS)}")
    parts = options.parts or list(PARTS)
    if not options.check:
        return write(options.root, parts, lambda: pictures(options.root, parts))
    if names := stale(options.root, parts):
        print(f"docs: stale: {', '.join(names)}; run 'make docs'", file=sys.stderr)
    return 1 if names else 0


def render(root: Path, parts: Iterable[str]) -> dict[str, str]:
    """Return path relative to ``root`` -> text, for every page of ``parts``."""
    return {path: text for part in parts for path, text in PARTS[part].pages(root).items()}


def pictures(root: Path, parts: Iterable[str]) -> dict[str, Draw]:
    """Return path relative to ``root`` -> function that draws the picture."""
    return {path: draw for part in parts for path, draw in PARTS[part].pictures(root).items()}


def pictures_of(root: Path, table: str, new: Collection[str]) -> dict[str, Draw]:
    """Return, as :func:`pictures`, the pictures of ``table`` and those that show a run of ``new``.

    new: run files, by their paths relative to results/runs.
    """

    def wanted(sheet: sheets.Sheet) -> bool:
        return sheet.table.name == table or not sheet.runs.keys().isdisjoint(new)

    return {**pages.pictures(root, wanted), **choosing.pictures(root, wanted)}


@command("docs")
def main_of_table(table: str, new: Collection[str] = (), root: Path = ROOT) -> int:
    """Write the pages of all tables after some runs, and :func:`pictures_of` them; return 0."""
    return write(root, ("results", "choosing"), lambda: pictures_of(root, table, new))


def write(root: Path, parts: Iterable[str], drawn: Callable[[], dict[str, Draw]]) -> int:
    """Write the pages of ``parts`` and the pictures that ``drawn`` returns; return 0.

    Run files of an unpacked ``--pack`` are stored as the others are.
    """
    print("docs: reading the runs", flush=True)
    shorten(root / "results" / "runs")
    texts = render(root, parts)
    drawings = drawn()  # before anything is written
    for path, text in texts.items():
        _write(root / path, text)
    for count, (path, draw) in enumerate(drawings.items(), 1):
        print(f"docs: {len(texts)} pages; picture {count} of {len(drawings)}: {path}", flush=True)
        draw(root / path)
    return 0


def stale(root: Path, parts: Iterable[str]) -> list[str]:
    """Return stale pages and missing pictures; for all parts, also files that no part makes."""
    texts = render(root, parts)
    drawings = pictures(root, parts)
    names = [path for path, text in texts.items() if _read(root / path) != text]
    names += [f"{path} (missing)" for path in drawings if not (root / path).exists()]
    # Only a call for all parts knows which files belong to none.
    if set(parts) < set(PARTS):
        return names
    there = [p.relative_to(root).as_posix() for g in GENERATED for p in sorted(root.glob(g))]
    return names + [
        f"{p} (not generated: delete it)" for p in there if p not in {*texts, *drawings}
    ]


def _write(path: Path, text: str) -> None:
    if path.suffix == ".gz":
        path.write_bytes(data.compress(text))
    else:
        path.write_text(text, encoding="utf-8")


def _read(path: Path) -> str | None:
    if not path.exists():
        return None
    if path.suffix == ".gz":
        return data.decompress(path.read_bytes())
    return path.read_text(encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
