"""Benchmark results: ``docs/speed.md``, from ``results/bench/<device>/*.json``.

Parts without a run file are marked as not measured.
"""

import itertools
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lrpe_fairseq.encodings import ENCODINGS, encoding_class
from lrpe_fairseq.experiments.records.files import ROOT
from lrpe_fairseq.experiments.report import markdown, paper, plots
from lrpe_fairseq.experiments.report.markdown import NOT_MEASURED

PAGE = "docs/speed.md"
FIGURES = "results/figures"
RESULTS = "results/bench"
DEVICES = {"cpu": "CPU", "cuda": "GPU"}
PUBLISHED = (("iclr-table9", "linear"), ("iclr-table9", "softmax"))
ERRORS = ("ours", "float32_angle", "own_angle")
Rows = list[dict[str, Any]]


def pages(root: Path) -> dict[str, str]:
    """Return the page with every generated part regenerated."""
    text = (root / PAGE).read_text(encoding="utf-8")
    for name, part in PARTS.items():
        text = markdown.between(text, name, section(name, part, root))
    return {PAGE: text}


def pictures(root: Path) -> dict[str, Callable[[Path], None]]:
    """Return the picture of the length sweep for every measured device."""
    return {
        figure(device): lambda path, rows=rows: draw(path, rows)
        for device in DEVICES
        if (rows := measured("lengths", device, root))
    }


def section(name: str, part: Callable[[Rows], str], root: Path = ROOT) -> str:
    """Return one part for every device, each with the machine it was measured on."""
    found = []
    for device, shown in DEVICES.items():
        measurement = figures(name, device, root)
        if measurement is None:
            found.append(f"On a {shown}: {NOT_MEASURED}.")
        else:
            picture = f"\n\n{_picture(device)}" if name == "lengths" else ""
            text = f"{part(measurement['rows'])}{picture}"
            found.append(f"{text}\n\n{measured_on(measurement)}")
    return "\n\n".join(found)


def measured(name: str, device: str, root: Path = ROOT) -> Rows:
    """Return the rows of a part; empty if it was not measured."""
    found = figures(name, device, root)
    return [] if found is None else found["rows"]


def figure(device: str) -> str:
    """Return the path of the picture of the length sweep, relative to the repository."""
    return f"{FIGURES}/lengths-{device}.png"


def _picture(device: str) -> str:
    return f"![time and memory by length](../{figure(device)})"


def figures(name: str, device: str, root: Path = ROOT) -> dict[str, Any] | None:
    """Return the run file of a benchmark; None if it was not measured."""
    text = markdown.read_result(root / RESULTS / device / f"{name}.json")
    return None if text is None else json.loads(text)


def measured_on(figures: dict[str, Any]) -> str:
    """Return machine, versions and commits of a benchmark as text."""
    machine = figures["hardware"]
    commits = {markdown.short(row.get("commit", figures["commit"])) for row in figures["rows"]}
    gpus = "".join(f"{name}, " for name in machine["gpus"])
    return (
        f"({gpus}{machine['cores']} cores, {machine['cpu']}, {figures['threads']} threads, "
        f"{figures['dtype']}; torch {figures['versions']['torch']}; "
        f"{'commit' if len(commits) == 1 else 'commits'} {', '.join(sorted(commits))}.)"
    )


def causal(rows: Rows) -> str:
    """Compare causal linear attention with both references and our PyTorch form."""
    found = _by(rows, "length", "contestant")
    others = {"naive": "the naive form", "sdpa": "torch SDPA"}
    if "kernel" in _values(rows, "contestant"):
        others["chunked"] = "our PyTorch form"
    if "fla" in _values(rows, "contestant"):
        others["fla"] = "fla's chunk_linear_attn"
    lines = [
        [n, *(_times(found.get((n, form))) for form in others)] for n in _values(rows, "length")
    ]
    return markdown.table(
        ["T", *(f"causal linear against {name}" for name in others.values())], lines, numbers=True
    )


def _times(row: dict[str, Any] | None) -> str:
    return f"{row['speed_up']:.1f} x" if row else "–"


def decays(rows: Rows) -> str:
    """Speed of causal linear attention with a decay over that without, and its flatness."""
    found, kinds = _by(rows, "length", "decay"), [k for k in _values(rows, "decay") if k != "none"]
    lines = [
        [n, *(f"{found[n, kind][key]:.2f}" for kind in kinds for key in ("speed", "flatness"))]
        for n in _values(rows, "length")
    ]
    first = min(_values(rows, "length"))
    heads = [
        head
        for kind in kinds
        for head in (
            f"{kind}: speed over that without a decay",
            f"{kind}: time per token against T = {first}",
        )
    ]
    return markdown.table(["T", *heads], lines, numbers=True)


def bidirectional(rows: Rows) -> str:
    """Compare bidirectional linear attention with SDPA."""
    lines = [[r["length"], f"{r['speed_up']:.2f} x"] for r in rows if r["contestant"] == "sdpa"]
    return markdown.table(["T", "bidirectional linear against torch SDPA"], lines, numbers=True)


def lengths(rows: Rows) -> str:
    """Return the sweep over T, a sentence on the crossover, and the figure."""
    found = _by(rows, "length", "contestant")
    lines = []
    for n in _values(rows, "length"):
        forms = [found.get((n, form)) for form in ("linear", "sdpa", "naive")]
        times = [f"{r['speed_up']:.2f} x" if r else "–" for r in forms[1:]]
        memory = [f"{r['peak_mb']:,.0f}" if r else "–" for r in forms]
        lines.append([n, f"{forms[0]['flatness']:.2f}", *times, *memory])
    heads = ["T", "time per token against T = 512", "speed-up over SDPA", "over the naive form"]
    heads += ["peak MB, linear", "SDPA", "naive"]
    return f"{markdown.table(heads, lines, numbers=True)}\n\n{_crossing(rows)}"


def crossover(rows: Rows) -> int | None:
    """Return the smallest T from which linear attention is always faster than SDPA, or None."""
    wins = {r["length"]: r["speed_up"] > 1 for r in rows if r["contestant"] == "sdpa"}
    always = [n for n in wins if all(win for m, win in wins.items() if m >= n)]
    return min(always, default=None)


def _crossing(rows: Rows) -> str:
    first = crossover(rows)
    if first is None:
        return "Linear attention is not faster than SDPA at the longest T."
    return f"Linear attention is faster than SDPA at all measured T from {first} on."


def crossing(rows: Rows) -> float | None:
    """Return the largest T at which the drawn times of linear attention and SDPA cross, or None.

    Between measured T they are straight lines over logarithmic axes.
    """
    times = {(r["contestant"], r["length"]): math.log(r["seconds_per_token"]) for r in rows}
    ahead = [(math.log(n), t - times["linear", n]) for (c, n), t in times.items() if c == "sdpa"]
    pairs = itertools.pairwise(sorted(ahead))
    found = [a - y * (b - a) / (z - y) for (a, y), (b, z) in pairs if (y > 0) != (z > 0)]
    return math.exp(found[-1]) if found else None


def decoding(rows: Rows) -> str:
    """Token-by-token decoding: speed and state size by output length so far."""
    found = _by(rows, "length", "contestant")
    lines = []
    for n in _values(rows, "length"):
        linear, softmax = found[n, "linear"], found[n, "softmax"]
        flat = [f"{r['flatness']:.2f}" for r in (linear, softmax)]
        sizes = [f"{r['state_mb']:.1f} MB" for r in (linear, softmax)]
        lines.append([n, *flat, f"{softmax['speed_up']:.2f} x", *sizes])
    heads = ["output tokens", "linear: time per token relative to 64", "softmax: the same"]
    heads += ["linear against softmax", "linear: state", "softmax: state"]
    return markdown.table(heads, lines, numbers=True)


def table9(rows: Rows) -> str:
    """Training speed of every method relative to Base, with the numbers of LRPE, Table 9.

    Those of TMLR LRPE, Table 6, are in :func:`tmlr_table6`, which has their models and normalizers.
    """
    heads = ["LRPE, Table 9: linear", "softmax"]
    return _speeds(rows, ENCODINGS, heads, _published)


def table9_roberta(rows: Rows) -> str:
    """Training speed relative to Base of the methods that serve bidirectional models."""
    names = [name for name in ENCODINGS if not encoding_class(name).causal_only]
    return _speeds(rows, names, [], lambda name: [])


def tmlr_table6(rows: Rows) -> str:
    """Training speed of TMLR LRPE's rows relative to Base, each with its normalizer."""
    cells = paper.read_table(ROOT / "results" / "paper" / "tmlr-table6.csv")
    printed = {cell["method"].lower(): cell["printed"] for cell in cells}
    lines = []
    for row in rows:
        lower, upper = row["relative_speed_quartiles"]
        ours = [f"{row['relative_speed']:.2f}", f"{lower:.2f}–{upper:.2f}"]
        chosen = [row["row"], f"`{row['encoding']}`", f"`{row['normalizer']}`"]
        lines.append([*chosen, *ours, printed.get(row["row"].lower(), "–")])
    heads = ["row", "encoding", "normalizer", "speed relative to Base", "quartiles of its rounds"]
    return markdown.table([*heads, "TMLR, Table 6"], lines, numbers=True) + _steps(rows)


def _steps(rows: Rows) -> str:
    tokens = {round(r["seconds"] * r["tokens_per_second"]) for r in rows if "seconds" in r}
    return "".join(f"\n\nSteps of {n:,} tokens." for n in tokens)


def _speeds(
    rows: Rows, names: Iterable[str], more: list[str], of: Callable[[str], list[str]]
) -> str:
    """Return a row per name: its speeds in both attentions, and the cells ``of`` its name."""
    found = _by(rows, "encoding", "attention")
    variants = [name for name in _values(rows, "encoding") if name not in ENCODINGS]
    lines = []
    for name in [*names, *variants]:
        served = name in variants or encoding_class(name).serves_linear
        ours = [_speed(found.get((name, "linear")), served)]
        ours.append(_speed(found.get((name, "softmax"))))
        lines.append([f"`{name}`", *ours, *of(name)])
    table = markdown.table(["speed relative to Base", "linear", "softmax", *more], lines, True)
    return table + _beside_rope(rows) + _steps(rows)


def _beside_rope(rows: Rows) -> str:
    """Return a table of the speeds that were also measured against RoPE; empty without any."""
    own = [row for row in rows if "relative_to_rope" in row]
    if not own:
        return ""
    found = _by(own, "encoding", "attention")
    lines = []
    for name in _values(own, "encoding"):
        speeds = [found.get((name, attention)) for attention in ("linear", "softmax")]
        shown = [f"{r['relative_to_rope']:.2f}" if r else NOT_MEASURED for r in speeds]
        lines.append([f"`{name}`", *shown])
    return "\n\n" + markdown.table(["speed relative to RoPE", "linear", "softmax"], lines, True)


def _speed(row: dict[str, Any] | None, served: bool = True) -> str:
    if row is None:
        return NOT_MEASURED if served else "–"
    return f"{row['relative_speed']:.2f}"


def _published(name: str) -> list[str]:
    """Return the paper's cells of an encoding; ICLR Table 9 has one number for all LRPE types."""
    cells = []
    for file, attention in PUBLISHED:
        rows = paper.read_table(ROOT / "results" / "paper" / f"{file}.csv")
        printed = {r["encoding"]: r["printed"] for r in rows if r["attention"] == attention}
        shared = printed.get("", "–") if name.startswith("lrpe-type") else "–"
        cells.append(printed.get(name, shared).replace("-", "–"))
    return cells


def encoding(rows: Rows) -> str:
    """Time of phi and encoding as multiples of a copy."""
    lines = [
        [f"`{r['encoding']}`", r["form"], _copies(r, "copies"), _copies(r, "copies_backward")]
        for r in rows
    ]
    heads = ["encoding", "form", "copies, forward (quartiles)", "copies, gradient (quartiles)"]
    return markdown.table(heads, lines, numbers=True)


def _copies(row: dict[str, Any], key: str) -> str:
    lower, upper = row[f"{key}_quartiles"]
    return f"{row[key]:.1f} ({lower:.1f}–{upper:.1f})"


def profiles(rows: Rows) -> str:
    """Share of each kind of work in a training step, for the plain forms and ours."""
    other = ("attention", "encoding", "form", "seconds")
    kinds = [key for key in rows[0] if key not in other]
    kinds.sort(key=lambda kind: -sum(row[kind] for row in rows))
    base = _by(rows, "attention", "encoding", "form")
    lines = []
    for row in rows:
        whole = base[row["attention"], "none", "ours"]["seconds"]
        label = [row["attention"], f"`{row['encoding']}`", row["form"]]
        time = f"{row['seconds'] / whole:.2f}"
        lines.append([*label, time, *(f"{row[kind]:.0%}" for kind in kinds)])
    return markdown.table(
        ["attention", "encoding", "form", "time against Base, ours", *kinds], lines, numbers=True
    )


def phases(rows: Rows) -> str:
    """Phase errors by position and number type."""
    lines = [[f"{r['position']:,}", r["dtype"], *(_error(r[k]) for k in ERRORS)] for r in rows]
    heads = ["position", "type", "angle in float64 (ours)", "angle in float32", "angle in the type"]
    return markdown.table(heads, lines, numbers=True)


def _error(value: float | None) -> str:
    return "out of range" if value is None else f"{value:.1e}"


PARTS: dict[str, Callable[[Rows], str]] = {
    "causal": causal,
    "decays": decays,
    "bidirectional": bidirectional,
    "lengths": lengths,
    "encoding": encoding,
    "decoding": decoding,
    "table9": table9,
    "table9-roberta": table9_roberta,
    "tmlr-table6": tmlr_table6,
    "profiles": profiles,
    "phases": phases,
}
"""Marker in the page and name of the run file -> function that renders it."""


def draw(path: Path, rows: Rows) -> None:
    """Draw time per token and peak memory against T; mark where linear attention and SDPA cross."""
    figure = plots.blank(9, 3.6)
    time, memory = figure.subplots(1, 2)
    for name in _values(rows, "contestant"):
        own = [row for row in rows if row["contestant"] == name]
        at = [row["length"] for row in own]
        time.plot(at, [row["seconds_per_token"] * 1e6 for row in own], marker=".", label=name)
        memory.plot(at, [row["peak_mb"] for row in own], marker=".", label=name)
    at = crossing(rows)
    titles = ["microseconds per token", "peak memory, MB"]
    if at is not None:
        time.axvline(at, color="grey", linestyle=":")
        titles[0] += f" (dotted: crossover with SDPA, T ≈ {float(f'{at:.2g}'):,.0f})"
    for axes, title in zip((time, memory), titles, strict=True):
        axes.set(yscale="log", xlabel="T")
        axes.set_xscale("log", base=2)
        axes.set_title(title, fontsize="medium")
    memory.legend(fontsize="small")
    plots.save(figure, path)


def _values(rows: Rows, key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))


def _by(rows: Rows, *keys: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    return {tuple(row[key] for key in keys): row for row in rows}
