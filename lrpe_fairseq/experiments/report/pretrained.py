"""What was measured of models in transformers: parts of docs/huggingface.md.

Every part shows one file of results/bench, which ``python -m benchmarks.hf.<name>`` wrote.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from lrpe_fairseq.experiments.records.files import read_json
from lrpe_fairseq.experiments.report import markdown

FOLDER = Path("results", "bench")
HEADING = "## Not measured yet"
MISSING = "See [Not measured yet](#not-measured-yet)."
"""What stands in place of a part without a file."""
COMMANDS = {
    "lengths": "lengths book.txt",
    "recipes": "recipes book.txt --updates 8 --validation 8",
    "own": "own data/wikitext-2-bpe runs/hf-own",
    "generation": "generation --rounds 3 --window 4",
    "installation": "installation runs/mine/linear-fox/checkpoint_best.pt",
    "harness": "harness book.txt CHECKPOINT --limit 4 --length 256",
    "versions": "versions 5.0.0 5.24.0",
}
"""Part -> the module of ``benchmarks.hf`` that measures it, with its arguments."""
RISE = 0.05
"""Rise of the perplexity with the context that is still called level."""
Measured = Mapping[str, Any]


def parts(root: Path) -> dict[str, str]:
    """Return name -> text of every part of the page."""
    shown = {name: _part(root, name, render) for name, render in PARTS.items()}
    return {**shown, "missing": _missing([name for name in shown if shown[name] == MISSING])}


def _missing(names: list[str]) -> str:
    """Return the section of the parts that were not measured; empty if there are none."""
    lines = [f"- {name}: `python -m benchmarks.hf.{COMMANDS[name]}`" for name in names]
    return "\n".join([HEADING, "", *lines]) if lines else ""


def _part(root: Path, name: str, render: Callable[[Measured], str]) -> str:
    measured = read_json(root / FOLDER / f"hf-{name}.json")
    return f"{render(measured)}\n\n{made_with(measured)}" if measured else MISSING


def made_with(measured: Measured) -> str:
    """Return the line with versions, processor and commit."""
    versions = measured["versions"]
    named = [name for name in ("torch", "transformers", "lm_eval") if name in versions]
    listed = ", ".join(f"{name} {versions[name]}" for name in named)
    where = f"{markdown.processors(measured['hardware'])}, {_count(measured['threads'], 'thread')}"
    return f"{listed}, {where}, commit {measured['commit'][:8]}."


def lengths(measured: Measured) -> str:
    """Return the perplexity by position, before and after a conversion to the same encoding."""
    begins = [0, *(row["to"] for row in measured["rows"])]
    rows = [
        (f"{begin + 1:,} to {row['to']:,}", f"{row['original']:.3f}", f"{row['converted']:.3f}")
        for begin, row in zip(begins, measured["rows"], strict=False)
    ]
    head = ("tokens", "perplexity of SmolLM2-135M", "converted")
    found = f"The loss of no token differs by more than {measured['largest_difference']:.1e} nats."
    return f"{markdown.table(head, rows, numbers=True)}\n\n{found}"


def recipes(measured: Measured) -> str:
    """Return losses of every recipe at the start and after its training, beside the control."""
    of = _by_recipe(measured["cells"])
    [control, *_] = of
    head = ("recipe", "loss at the start", "after the training", "over the control", "hours")
    rows = []
    for name, cells in of.items():
        shared = cells.keys() & of[control].keys()
        gaps = [cells[seed]["end"] - of[control][seed]["end"] for seed in sorted(shared)]
        rows.append(
            (
                name,
                each((c["start"] for c in cells.values()), 3),
                each((c["end"] for c in cells.values()), 3),
                "–" if name == control else each(gaps, 3, sign="+"),
                f"{sum(c['hours'] for c in cells.values()):.2f}",
            )
        )
    own = measured["settings"]
    tokens = own["updates"] * own["rows"] * own["tokens"]
    stated = (
        f"{own['updates']} updates of {own['rows']} x {own['tokens']} tokens of a book, {tokens:,} "
        f"in all, learning rate {own['learning_rate']:g}; "
        f"{own['validation_blocks'] * own['tokens']:,} tokens of validation; a value per seed."
    )
    return f"{markdown.table(head, rows, numbers=True)}\n\n{stated}"


def own(measured: Measured) -> str:
    """Return the perplexity of the same tokens by context for every recipe of a model of ours."""
    of, settings = _by_recipe(measured["cells"]), measured["settings"]
    contexts = [*next(iter(of.values()))[1]["perplexity"]]
    rows = [
        (name, *(each((c["perplexity"][n] for c in cells.values()), 1) for n in contexts))
        for name, cells in of.items()
    ]
    head = ("recipe", *(f"{int(n):,} tokens" for n in contexts))
    stated = (
        f"{settings['updates']} updates of {settings['rows']} blocks after "
        f"{settings['updates_before']:,}; perplexity of the last {settings['length'] - 1} tokens "
        f"of {settings['blocks']} blocks of the test; a value per seed. `rope` is the control: the "
        "same training without a change. Its rate is constant "
        f"({settings['learning_rate']:g}) and that of the first training ended near 0, so that "
        "the control is worse than the model itself."
    )
    level = [name for name, cells in of.items() if all(map(_is_level, cells.values()))]
    stated += (
        f" At no context more than {RISE:.0%} above that at {int(contexts[0]):,} tokens, for each "
        f"seed: {', '.join(level) or 'none'}."
    ).replace("%", " %")
    return f"{markdown.table(head, rows, numbers=True)}\n\n{stated}"


def _is_level(cell: Measured) -> bool:
    """True if no context has a perplexity far above that of the first."""
    first, *others = cell["perplexity"].values()
    return max(others) <= (1 + RISE) * first


def generation(measured: Measured) -> str:
    """Return tokens per second of ``generate``, and ratios to attention of transformers."""
    rows = [
        (
            row["attention"],
            f"{row['length']:,}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['ratio']:.2f}",
            " to ".join(f"{value:.2f}" for value in row["quartiles"]),
        )
        for row in measured["rows"]
    ]
    head = ("attention", "tokens before", "tokens per second", "ratio", "quartiles")
    return markdown.table(head, rows, numbers=True)


def harness(measured: Measured) -> str:
    """Return the metrics of lm-eval for every model."""
    models = measured["rows"]
    names = dict.fromkeys(name for row in models.values() for name in row["metrics"])
    rows = [
        (name, *(_metric(row["metrics"].get(name)) for row in models.values())) for name in names
    ]
    own = measured["settings"]
    stated = f"{own['limit']} examples of a task; those of RULER have {own['length']} tokens."
    return f"{markdown.table(('task and metric', *models), rows, numbers=True)}\n\n{stated}"


def installation(measured: Measured) -> str:
    """Return the minutes from a wheel to a generated text, and the text."""
    seconds = measured["seconds"]
    minutes = sum(seconds[step] for step in ("install", "generate")) / 60
    text = " ".join(measured["text"].split())
    return (
        f"{minutes:.1f} minutes: {seconds['install']:.0f} seconds for `pip install` of the wheel "
        f"with `[hf]` in a new environment without fairseq, {seconds['generate']:.0f} seconds to "
        f"load a model and write: “{text}”. The new environment got torch {measured['torch']} and "
        f"transformers {measured['transformers']}; the line below is of the environment that "
        "measured it."
    )


def versions(measured: Measured) -> str:
    """Return the tests that passed and failed with every version of transformers."""
    rows = [
        (r["transformers"], r["passed"], r["failed"] + r["errors"], r["skipped"])
        for r in measured["rows"]
    ]
    head = ("transformers", "passed", "failed", "skipped")
    files = ", ".join(f"`tests/hf/test_{name}.py`" for name in measured["settings"]["tests"])
    return f"{markdown.table(head, rows, numbers=True)}\n\nTests: {files}."


PARTS: Mapping[str, Callable[[Measured], str]] = {
    part.__name__: part
    for part in (lengths, recipes, own, generation, harness, installation, versions)
}


def each(values: Iterable[float], decimals: int, sign: str = "") -> str:
    """Return the value of every seed, with a bar between them."""
    return " / ".join(f"{value:{sign}.{decimals}f}" for value in values)


def _by_recipe(cells: Iterable[Measured]) -> dict[str, dict[int, Measured]]:
    """Return recipe -> seed -> cell, in the order of the file."""
    found: dict[str, dict[int, Measured]] = {}
    for cell in cells:
        found.setdefault(cell["recipe"], {})[cell["seed"]] = cell
    return found


def _metric(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
