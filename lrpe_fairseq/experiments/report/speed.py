"""Benchmarks: ``docs/speed.md`` and a CSV file per part, of ``results/bench/<device>/*.json``.

The page has rows of a GPU only while their kernels are the present ones; the CSV files have all.
See ``kernel_sources``.
"""

import functools
import json
import math
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from lrpe_fairseq.encodings import ENCODINGS
from lrpe_fairseq.experiments.records import kernel_sources, methods
from lrpe_fairseq.experiments.records.files import ROOT, read_json
from lrpe_fairseq.experiments.report import markdown, plots
from lrpe_fairseq.experiments.report.published import read_paper

PAGE = "docs/speed.md"
RESULTS = "results/bench"
DEVICES = ("cpu", "cuda")
MISSING = "not&nbsp;measured"
AXES = {"seconds_per_token": ("microseconds per token", 1e6), "peak_mb": ("peak memory, MB", 1)}
FORMS = {"sdpa": "SDPA", "naive": "T x T form"}
Row = dict[str, Any]


def pages(root: Path) -> dict[str, str]:
    """Return path -> text of the page and of the CSV files."""
    files = (path for device in DEVICES for path in (root / RESULTS / device).glob("*.json"))
    parts = sorted({path.stem for path in files})
    variants = [row["encoding"] for row in measured("table9", "cpu", root)]
    names = [name for name in ENCODINGS if methods.public_name(name) == name]
    cells = read_paper(root / "results" / "paper" / "tmlr-table6.csv")
    text = markdown.rendered(
        "speed.md.j2",
        **{f.__name__: functools.partial(f, root) for f in HELPERS},
        lengths=[row["length"] for row in measured("bidirectional", "cpu", root)[::2]],
        methods=dict.fromkeys(names + [name for name in variants if name not in ENCODINGS]),
        decays=measured("decays", "cpu", root),
        normalizers=measured("tmlr-table6", "cpu", root),
        printed={cell["method"].lower(): cell["printed"] for cell in cells},
        against_table9=against_table9(root),
        steps=measured("steps", "cuda", root),
        methods_on_gpu=_encodings("steps", "cuda", root),
        compiled_steps=_encodings("compiled-steps", "cpu", root),
        compiled_threads=_threads(run_file("compiled-steps", "cpu", root).get("threads", 1)),
        with_other_threads=_with_other_threads(root),
        **releases(root),
        forms=own_forms(root),
        gpu=gpu(root),
        doctor=doctor(root),
        interpreted=interpreted(root),
        failures=failures(root),
        with_normalizers=list(
            dict.fromkeys(r["normalizer"] for r in measured("normalizers", "cpu", root))
        ),
        stacks=[r for r in measured("stacks", "cpu", root) if r["length"] == 512][1:],
    )
    return {PAGE: text, **{f"{RESULTS}/{part}.csv": csv_of(root, part) for part in parts}}


def pictures(root: Path) -> dict[str, Callable[[Path], None]]:
    """Return the picture of the length sweep on a CPU."""
    rows = measured("lengths", "cpu", root)
    return {"results/figures/lengths-cpu.png": functools.partial(draw, rows=rows)} if rows else {}


@functools.cache
def run_file(part: str, device: str, root: Path = ROOT) -> dict[str, Any]:
    """Return the run file of a part; one without rows if it was not measured."""
    path = root / RESULTS / device / f"{part}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": []}


def stored(part: str, device: str, root: Path = ROOT) -> list[Row]:
    """Return all rows of a part, with quartiles as two entries; empty if it was not measured."""
    return [dict(_flat(row)) for row in run_file(part, device, root)["rows"]]


def measured(part: str, device: str, root: Path = ROOT) -> list[Row]:
    """Return the rows of a part as :func:`stored`; on a GPU those of the present kernels only."""
    file = run_file(part, device, root)
    rows = stored(part, device, root)
    if device == "cpu":
        return rows
    return [row for row in rows if kernel_sources.is_current(part, row, file)]


def value(root: Path, part: str, device: str, key: str, **where: Any) -> Any:
    """Return ``key`` of the row whose entries equal ``where``; None if it was not measured."""
    rows = measured(part, device, root)
    values = (row.get(key) for row in rows if all(row.get(k) == v for k, v in where.items()))
    return next(values, None)


def own_forms(root: Path) -> list[Row]:
    """Return the rows of attention on a GPU; none without one of our present kernels."""
    rows = measured("attention", "cuda", root)
    ours = [row for row in rows if kernel_sources.families_of("attention", row)]
    return rows if ours else []


def gpu(root: Path) -> dict[str, str]:
    """Return the machines of rows of present kernels, and those and the commits of earlier ones.

    Returns: ``machines``, ``earlier`` and ``commits``, as text; empty if there are no such rows.
    """
    earlier: dict[str, None] = {}
    machines_of_earlier: set[str] = set()
    present = []
    for path in sorted((root / RESULTS / "cuda").glob("*.json")):
        file = run_file(path.stem, "cuda", root)
        rows = [r for r in file["rows"] if kernel_sources.families_of(path.stem, r)]
        old = [r for r in rows if not kernel_sources.is_current(path.stem, r, file)]
        present += [file] * (len(old) < len(rows))
        earlier |= dict.fromkeys(row.get("commit", file["commit"])[:8] for row in old)
        machines_of_earlier |= {markdown.processors(file["hardware"])} if old else set()
    return {
        "machines": _machines(present),
        "earlier": markdown.listed(sorted(machines_of_earlier)),
        "commits": markdown.listed([f"`{commit}`" for commit in sorted(earlier)]),
    }


def _encodings(part: str, device: str, root: Path) -> list[str]:
    """Return the encodings of which a part has rows, in order."""
    return list(dict.fromkeys(row["encoding"] for row in measured(part, device, root)))


def _threads(count: int) -> str:
    return f"{count} threads" if count > 1 else "one thread"


def _with_other_threads(root: Path) -> str:
    """Return which rows of Table 9 were timed with other threads than the rest, as a sentence."""
    file = run_file("table9", "cpu", root)
    own = {row["encoding"]: row["threads"] for row in file["rows"] if "threads" in row}
    counts = sorted({n for n in own.values() if n != file["threads"]})
    groups = [(n, [f"`{name}`" for name in own if own[name] == n]) for n in counts]
    texts = [f"for {markdown.listed(names)} {n}" for n, names in groups]
    return f" Threads of the CPU: {file['threads']}; {markdown.listed(texts)}." if texts else ""


def releases(root: Path) -> dict[str, Any]:
    """Return what every torch's Triton compiles, of ``compiled-versions.json``.

    Returns: capabilities; types, as text; releases, rows of {torch, triton, family, cells} with a
        text of each capability; refused, the forms that did not compile, as sentences.
    """
    rows = read_json(root / RESULTS / "compiled-versions.json").get("rows", [])
    capabilities = sorted({row["capability"] for row in rows})
    groups: dict[tuple[str, ...], dict[int, list[Row]]] = {}
    for row in rows:
        key = row["torch"], row["triton"], row["family"]
        groups.setdefault(key, {}).setdefault(row["capability"], []).append(row)
    found = [
        {**dict(zip(("torch", "triton", "family"), key, strict=True)), "cells": by_capability}
        for key, by_capability in groups.items()
    ]
    for entry in found:
        cells = (entry["cells"].get(capability, []) for capability in capabilities)
        entry["cells"] = [_compiled_forms(cell) for cell in cells]
    refused = [
        f"`{row['case']}` of {row['family']} in {row['dtype']} with Triton {row['triton']} for "
        f"sm_{row['capability']}: `{row['error']}`"
        for row in rows
        if row["error"]
    ]
    types = [_compiled_type(rows, dtype) for dtype in sorted({row["dtype"] for row in rows})]
    listed = {"types": ", ".join(types), "releases": found, "refused": refused}
    return {"capabilities": capabilities, **listed}


def _compiled_type(rows: list[Row], dtype: str) -> str:
    """Return a type, and for which architectures it was compiled unless for all."""
    every = {row["capability"] for row in rows}
    own = {row["capability"] for row in rows if row["dtype"] == dtype}
    if own == every:
        return dtype
    return f"{dtype} on {markdown.listed([f'sm_{n}' for n in sorted(own)])}"


def doctor(root: Path) -> dict[str, Any]:
    """Return what ``doctor.sh --kernels`` has found on a GPU; {} if it has not run on one.

    Returns: the file's fields, with ``passed`` and ``table``: milliseconds beside PyTorch's, of
        the checks of present kernels; "" without one.
    """
    file = run_file("doctor", "cuda", root)
    if not any(row.get("served") == "triton" for row in file["rows"]):
        return {}
    present = measured("doctor", "cuda", root)
    rows = [row for row in present if row.get("served") == "triton"]
    head = ["check", "kernel, ms", "definition, ms", "largest relative error"]
    lines = [
        [
            row["check"],
            *(f"{row[name]:.2f}" for name in ("milliseconds", "pytorch")),
            f"{max(map(float, row['errors'].values())):.0e}",
        ]
        for row in rows
    ]
    passed = sum(row["passed"] for row in file["rows"])
    table = markdown.table(head, lines, numbers=True) if rows else ""
    return {**file, "passed": passed, "table": table}


def interpreted(root: Path) -> dict[str, Any]:
    """Return what ``doctor.sh --kernels`` has found in Triton's interpreter, by kind of check.

    Returns: the file's fields, with ``passed`` and ``table``; {} unless all checks are of the
        present kernels.
    """
    file = run_file("doctor", "cpu", root)
    rows = file["rows"]
    if not rows or not all(kernel_sources.is_current("doctor", row, file) for row in rows):
        return {}
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        kinds.setdefault(row["check"].replace(",", " ").split()[0], []).append(row)
    head = ["checks", "passed", "served by kernels", "largest relative error", "bound"]
    lines = []
    for kind, found in kinds.items():
        passed = sum(row["passed"] for row in found)
        served = sum(row.get("served") == "triton" for row in found)
        errors = [x for row in found for x in map(float, row.get("errors", {}).values())]
        bound = max(row.get("bound", 0.0) for row in found)
        counts = f"{passed} of {len(found)}", f"{served} of {len(found)}"
        lines.append([kind, *counts, f"{max(errors, default=math.nan):.0e}", f"{bound:.0e}"])
    passed = sum(row["passed"] for row in rows)
    return {**file, "passed": passed, "table": markdown.table(head, lines, numbers=True)}


def failures(root: Path) -> dict[str, Any]:
    """Return what injected failures of kernels lead to, of ``benchmarks.failures``.

    Returns: the file's fields, with ``table`` and ``warning``, the first in full; {} without a
        measurement.
    """
    file = run_file("failures", "cpu", root)
    if not file["rows"]:
        return {}
    lines = []
    for row in file["rows"]:
        reason = row["served"].removeprefix("definition, because ").removesuffix(" on cpu")
        lines.append([row["failure"], f"`{reason.replace('`', '')}`"])
    table = markdown.table(["failure", "reason that the warning gives"], lines)
    equal = all(row["equal"] for row in file["rows"])
    return {**file, "equal": equal, "table": table, "warning": file["rows"][0]["warning"]}


def _compiled_forms(rows: list[Row]) -> str:
    """Return how many forms compile, of how many, and how many of them spill registers."""
    if not rows:
        return MISSING
    compiled = [row for row in rows if not row["error"]]
    spilling = sum(bool(row["spills"]) for row in compiled)
    spills = f", {spilling} spill" if spilling else ""
    return f"{len(compiled)} of {len(rows)}{spills}"


def csv_of(root: Path, part: str) -> str:
    """Return every row of a part, with its device, torch, dtype and commit.

    On a GPU ``kernels`` says if it is of the present kernels or of earlier ones.
    """
    lines = []
    for device in DEVICES:
        file = run_file(part, device, root)
        for row in stored(part, device, root):
            stated = {"device": device, "torch": file["versions"]["torch"]}
            stated |= {"dtype": file["dtype"], "commit": file["commit"]}
            if device != "cpu":
                present = kernel_sources.is_current(part, row, file)
                stated["kernels"] = "present" if present else "earlier"
            row.pop("sources", None)
            lines.append({**stated, **row})
    return pd.DataFrame(lines).to_csv(index=False, float_format="%.6g", lineterminator="\n")


def _flat(row: Row) -> Iterable[tuple[str, Any]]:
    """Yield the entries of a row; quartiles become two."""
    for key, entry in row.items():
        if isinstance(entry, list):
            yield from zip((f"{key}_lower", f"{key}_upper"), entry, strict=True)
        else:
            yield key, entry


def machines(root: Path, device: str) -> str:
    """Return the processors, torch and number types that the parts of a device were measured on.

    Those of parts without times are left out.
    """
    paths = (root / RESULTS / device).glob("*.json")
    parts = sorted({path.stem for path in paths} - {"doctor", "failures"})
    return _machines([run_file(part, device, root) for part in parts])


def _machines(files: list[dict[str, Any]]) -> str:
    if not files:
        return ""
    cores = {str(file["hardware"]["cores"]) for file in files}
    torch = {f"torch {file['versions']['torch']}" for file in files}
    names = {markdown.processors(file["hardware"]) for file in files}
    kinds = {file["dtype"] for file in files}
    parts = (names, {f"{markdown.listed(sorted(cores))} cores"}, torch, kinds)
    return ", ".join(markdown.listed(sorted(part)) for part in parts if part)


def clamped(root: Path) -> dict[str, float]:
    """Return the share of clamped denominators of the encodings that have some, for random keys."""
    rows = measured("denominators", "cpu", root)
    return {row["encoding"]: row["under_eps"] for row in rows if row["under_eps"]}


def crossover(root: Path, device: str, part: str = "lengths") -> int | None:
    """Return the smallest T from which linear attention is always faster than SDPA, or None."""
    rows = [row for row in measured(part, device, root) if row["contestant"] == "sdpa"]
    # The last length at which SDPA is as fast: a single win below it may be noise.
    lost = max((row["length"] for row in rows if row["speed_up"] <= 1), default=0)
    return min((row["length"] for row in rows if row["length"] > lost), default=None)


def against_table9(root: Path) -> str:
    """Return ICLR Table 9 beside our speeds: linear and softmax attention, CPU and GPU.

    The paper does not say which type its row LRPE is; ours is Type 2.
    """
    cells = read_paper(root / "results" / "paper" / "iclr-table9.csv")
    kinds = ("linear", "softmax")
    head = ["method"]
    for kind in kinds:
        head += [f"{kind}: paper", "ours, CPU", "ours, GPU"]
    lines = []
    for method in dict.fromkeys(cell["method"] for cell in cells):
        own = {cell["attention"]: cell for cell in cells if cell["method"] == method}
        encoding = own["linear"]["encoding"] or "lrpe-type2"
        line = [f"{method}, `{encoding}`"]
        for kind in kinds:
            cpu, gpu = (speed(root, device, kind, encoding) for device in DEVICES)
            gpu = MISSING if gpu == "–" != cpu else gpu
            line += [own[kind]["printed"].replace("-", "–"), cpu, gpu]
        lines.append(line)
    return markdown.table(head, lines, numbers=True)


def speed(root: Path, device: str, attention: str, encoding: str) -> str:
    """Return the training speed of an encoding relative to Base at T = 512; a dash without one."""
    where = {"attention": attention, "encoding": encoding}
    sized = {"length": 512} if device == "cuda" else {}
    part = "steps" if device == "cuda" else "table9"
    ratio = value(root, part, device, "relative_speed", **where, **sized)
    return "–" if ratio is None else f"{ratio:.2f}"


def rate(root: Path, attention: str, encoding: str, length: int) -> float | None:
    """Return thousands of tokens per second on a GPU: the speed relative to Base times its rate.

    The rate of Base is its median over all rows, because machines drift. None if the steps of the
    encoding were not timed with the present kernels.
    """
    rows = [r for r in measured("steps", "cuda", root) if r.get("relative_speed")]
    rows = [r for r in rows if (r["attention"], r["length"]) == (attention, length)]
    ratios = [row["relative_speed"] for row in rows if row["encoding"] == encoding]
    if not ratios:
        return None
    base = statistics.median(row["tokens_per_second"] / row["relative_speed"] for row in rows)
    return base * ratios[0] / 1e3


def trained(root: Path, attention: str, encoding: str, length: int) -> str:
    """Return :func:`rate` and the speed relative to Base.

    A dash for an attention type that the encoding does not serve, and so has no speed on a CPU.
    """
    if speed(root, "cpu", attention, encoding) == "–":
        return "–"
    where = {"attention": attention, "encoding": encoding, "length": length}
    ratio = value(root, "steps", "cuda", "relative_speed", **where)
    return f"{rate(root, **where):,.0f}&nbsp;({ratio:.2f})" if ratio else MISSING


# --- the picture ---------------------------------------------------------------------------------


def draw(path: Path, rows: list[Row]) -> None:
    """Draw time per token and peak memory of every form against T."""
    figure = plots.blank(9, 3.6)
    for axes, (key, (title, unit)) in zip(figure.subplots(1, 2), AXES.items(), strict=True):
        for name in dict.fromkeys(row["contestant"] for row in rows):
            points = [(row["length"], row[key] * unit) for row in rows if row["contestant"] == name]
            axes.plot(*zip(*points, strict=True), marker=".", label=FORMS.get(name, name))
        axes.set_xscale("log", base=2)
        axes.set(yscale="log", xlabel="T, tokens", ylabel=title)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    plots.save(figure, path)


HELPERS = (value, machines, crossover, speed, rate, trained)
"""Functions of a root that the template calls."""
