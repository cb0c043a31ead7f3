"""``python -m benchmarks.compiled_versions``: compile the Triton kernels with every torch's Triton.

Some forms of every family are compiled with the Triton of each torch of VERSIONS, for every
architecture, without a GPU. results/bench/compiled-versions.json has a row for each form: the
kernels and those that spill registers, or the error. docs/speed.md shows them. Every Triton is
installed in a folder of its own, or taken from ``--folder DIR``, which has one by version.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import compiled
from benchmarks.compiled import figures
from lrpe_fairseq.experiments.records.files import ROOT, read_json, write_json
from lrpe_fairseq.experiments.records.kernel_sources import source_hash

FIGURES = ROOT / "results" / "bench" / "compiled-versions.json"
CAPABILITIES = (*compiled.CAPABILITIES, 100)
"""100: B200."""
VERSIONS = {
    "3.4.0": "2.8",
    "3.5.1": "2.9",
    "3.6.0": "2.10, 2.11",
    "3.7.0": "2.12",
    "3.7.1": "2.13",
}
"""Triton -> the torch that requires it, by torch's metadata on the package index."""
FORMS = {
    "encode": ("reflection, learned rotation",),
    "flash": ("full table padding dropout, 64/64", "plain, 64/32"),
    "stick": ("all, 64/64",),
    "linear": (
        "normalized gates, 64/64",
        "full, 64/64",
        "causal, 32/32",
        "causal, 64/32",
        "normalized, 64/64",
        compiled.LARGE_TILES,
    ),
}
"""Family -> forms that use different instructions; benchmarks.compiled has all."""
TYPES = dict.fromkeys((90, 80, 86, 120, 100), ("bfloat16", "float16"))
"""Capability -> types; the others compile bfloat16."""


def rows_of(capability: int, kind: str) -> Iterator[dict[str, Any]]:
    """Compile every form and yield {family, case, capability, dtype, kernels, spills, error}.

    spills: kernel -> bytes of registers that it spills, if any. error: None, or its first line.
    """
    for family, cases in FORMS.items():
        for case in cases:
            if not compiled.is_served(case, capability, kind):
                continue
            row = {"family": family, "case": case, "capability": capability, "dtype": kind}
            row |= {"kernels": 0, "spills": {}, "error": None}
            try:
                found = figures(family, capability, kind, case)
            except Exception as error:  # whatever this release raises
                lines = str(error).strip().splitlines() or [""]
                row["error"] = f"{type(error).__name__}: {lines[0]}"
            else:
                spilled = {x["kernel"]: x["spilled_bytes"] for x in found if x["spilled_bytes"]}
                row |= {"kernels": len(found), "spills": spilled}
            yield row


def compile_with(version: str, folder: Path, capability: int, kind: str) -> list[dict[str, Any]]:
    """Return the rows of a Triton that lies in ``folder``, compiled in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="lrpe-triton-") as cache:
        path = os.pathsep.join((str(folder), str(ROOT)))
        environment = {**os.environ, "PYTHONPATH": path, "TRITON_CACHE_DIR": cache}
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.compiled_versions"]
        command += ["--here", "--capabilities", str(capability), "--type", kind]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"Triton {version} for sm_{capability} failed; see the lines above")
    return [
        {"triton": version, "torch": VERSIONS[version], **json.loads(line)}
        for line in done.stdout.splitlines()
        if line.startswith("{")
    ]


def main() -> None:
    """Compile with every version, and write the rows as they come."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("versions", nargs="*", default=list(VERSIONS), metavar="VERSION")
    parser.add_argument("--capabilities", nargs="+", type=int, default=CAPABILITIES)
    parser.add_argument("--folder", type=Path, help="has a folder with each version of Triton")
    parser.add_argument("--here", action="store_true", help="compile with the installed Triton")
    parser.add_argument("--type", default="bfloat16", help="with --here (default: bfloat16)")
    options = parser.parse_args()
    if unknown := sorted(set(options.versions) - set(VERSIONS)):
        parser.error(f"unknown version {', '.join(unknown)}; choose from {', '.join(VERSIONS)}")
    if options.here:
        for row in rows_of(options.capabilities[0], options.type):
            print(json.dumps(row), flush=True)
        return
    for version in options.versions:
        with tempfile.TemporaryDirectory(prefix="lrpe-triton-") as own:
            folder = options.folder / version if options.folder else install(version, Path(own))
            for capability in options.capabilities:
                for kind in TYPES.get(capability, ("bfloat16",)):
                    write(version, compile_with(version, folder, capability, kind))


def install(version: str, folder: Path) -> Path:
    """Install a Triton in a folder and return the folder."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    subprocess.run([*pip, f"triton=={version}"], check=True)
    return folder


def write(version: str, rows: list[dict[str, Any]]) -> None:
    """Put rows in the place of earlier ones of the same version, architecture and type.

    A note on the earlier rows stays; delete it after a run with all versions.
    """
    known = read_json(FIGURES)
    before, note = known.get("rows", []), known.get("note")

    def made_by(row: dict[str, Any]) -> tuple:
        return row["triton"], row["capability"], row["dtype"]

    made = {made_by(row) for row in rows}
    kept = [row for row in before if made_by(row) not in made]
    order = list(product(VERSIONS, CAPABILITIES))
    every = sorted(kept + rows, key=lambda row: order.index(made_by(row)[:2]))
    sources = {family: source_hash(family) for family in FORMS}
    noted = {} if note is None else {"note": note}
    write_json(FIGURES, {**noted, "sources": sources, "rows": every})
    failed = sum(row["error"] is not None for row in rows)
    print(f"Triton {version}: {len(rows)} forms, {failed} failed: {made}", flush=True)


if __name__ == "__main__":
    main()
