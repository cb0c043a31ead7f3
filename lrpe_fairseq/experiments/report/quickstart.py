"""The quickstart's results: one table, the order of its rows, their page and pictures.

An order of two rows is stated by the rule of :mod:`.orders`.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

from lrpe_fairseq.experiments.records.runs import Run, is_base, read_run
from lrpe_fairseq.experiments.report import markdown, orders, plots

HEAD = ("attention", "encoding", "test perplexity", "vs Base")
BASE = "none"
ENCODINGS = (BASE, "rope", "lrpe-type2")  # the rows of each attention type, in this order
PROTOCOL = "blocks"
RUNS = "results/quickstart/runs"


@dataclass(frozen=True)
class Row:
    """One attention type and encoding; ``ppl`` is seed -> test perplexity."""

    attention: str
    encoding: str
    ppl: dict[int, float]

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return statistics.fmean(self.ppl.values())

    @property
    def name(self) -> str:
        """``Base`` or the name of the encoding."""
        return "Base" if self.encoding == BASE else self.encoding


def published(folder: Path) -> list[Run]:
    """Return the run files of ``folder``, sorted by attention type, encoding and seed."""
    paths = (path for path in folder.glob("*.json") if not is_base(path))
    return sorted(map(read_run, paths), key=lambda run: (_place(run), run["seed"]))


def rows(runs: Iterable[Run]) -> list[Row]:
    """Group runs by attention type and encoding, in order of first appearance."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for run in runs:
        found.setdefault(_key(run), {})[run["seed"]] = run["metrics"]["test"][PROTOCOL]["ppl"]
    return [Row(*name, ppl) for name, ppl in found.items()]


def _key(run: Run) -> tuple[str, str]:
    return run["attention_type"], run["position_encoding"]


def _place(run: Run) -> tuple[str, int]:
    return run["attention_type"], ENCODINGS.index(run["position_encoding"])


# --- the table and the order ---------------------------------------------------------------------


def table(found: Sequence[Row]) -> str:
    """The rows as an aligned Markdown table, each beside Base of its attention type."""
    lines = [HEAD, *(_cells(row, found) for row in found)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    padded = [[c.ljust(w) for c, w in zip(line, widths, strict=True)] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in padded)


def _cells(row: Row, found: Sequence[Row]) -> list[str]:
    base = next(r for r in found if (r.attention, r.encoding) == (row.attention, BASE))
    spread = f" ± {statistics.stdev(row.ppl.values()):.2f}" if len(row.ppl) > 1 else ""
    change = "—" if row is base else f"{100 * (row.mean / base.mean - 1):+.0f} %"
    name = f"{row.encoding} (Base)" if row is base else row.encoding
    return [row.attention, name, f"{row.mean:.2f}{spread}", change]


def separated(better: Row, worse: Row, found: Sequence[Row]) -> bool:
    """True if ``better`` has the lower perplexity by the rule of orders, among ``found``."""
    own = {
        row.encoding: {s: orders.compared(v, "perplexity") for s, v in row.ppl.items()}
        for row in found
        if row.attention == better.attention
    }
    return orders.orders(own)[better.encoding, worse.encoding] == orders.BETTER


def order(found: Sequence[Row]) -> list[str]:
    """Return one line per attention type, with its rows from best to worst.

    ``<`` joins neighbors that are separated, ``≈`` neighbors that are not.
    """
    lines = []
    for attention in dict.fromkeys(row.attention for row in found):
        ranked = sorted((r for r in found if r.attention == attention), key=lambda row: row.mean)
        signs = ["<" if separated(*pair, found) else "≈" for pair in pairwise(ranked)]
        words = [f"{sign} {row.name}" for sign, row in zip(signs, ranked[1:], strict=True)]
        lines.append(" ".join([f"{attention} attention: {ranked[0].name}", *words]))
    return lines


# --- pages and pictures --------------------------------------------------------------------------


def numbers(root: Path, rule: str = "results/README.md") -> str:
    """Return the table and the order of the committed runs. rule: link to the rule of orders."""
    found = rows(published(root / RUNS))
    said = f"Lower is better. `<` means better by [the rule of orders]({rule}), `≈` tied:"
    return "\n".join([table(found), "", said, "", *(f"- {line}" for line in order(found))])


def pages(root: Path) -> dict[str, str]:
    """Return the page of the committed run files."""
    runs = published(root / RUNS)
    text = markdown.rendered(
        "quickstart.md.j2",
        first=runs[0],
        seeds=len({run["seed"] for run in runs}),
        evaluated=runs[0]["metrics"]["test"][PROTOCOL]["tokens"],
        numbers=numbers(root, "../README.md"),
    )
    return {"results/quickstart/README.md": text}


def pictures(root: Path) -> dict[str, Callable[[Path], None]]:
    """Return path relative to ``root`` -> function that draws the picture."""
    runs = published(root / RUNS)
    return {"results/quickstart/validation.png": partial(draw, runs=runs)}


def draw(path: Path, runs: Sequence[Run]) -> None:
    """Draw the validation curves (mean over seeds) to ``path`` as PNG.

    Raises: ImportError if matplotlib, which comes with the extra [experiments], is not installed.
    """
    found: dict[str, dict[str, list[plots.Point]]] = {}
    for attention, encoding in dict.fromkeys(map(_key, runs)):
        own = [run["curve"] for run in runs if _key(run) == (attention, encoding)]
        curve = [
            plots.point(points[0]["updates"], [point["valid_ppl"] for point in points])
            for points in zip(*own, strict=False)
        ]
        found.setdefault(f"{attention} attention", {})[encoding] = curve
    panels = [plots.Panel(t, "updates", own, "validation perplexity") for t, own in found.items()]
    plots.lines(path, panels, base=0)


def dots(path: Path, runs: Sequence[Run]) -> None:
    """Draw the test perplexities to ``path``: the mean, from the best to the worst seed."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows(runs):
        found.setdefault(f"{row.attention} attention", {})[row.encoding] = [*row.ppl.values()]
    x = "test perplexity per character, lower is better"
    plots.dots(path, [plots.Panel(title, x, own) for title, own in found.items()])
