"""The quickstart's numbers as text: one table, and the order that they support.

An order of two rows is stated only where every seed agrees and the difference of the means exceeds
twice the pooled standard deviation.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path

from lrpe_fairseq.experiments.records.runs import Run, read_run

HEAD = ("attention", "encoding", "test perplexity", "vs Base")
BASE = "none"
ENCODINGS = (BASE, "rope", "lrpe-type2")  # the rows under each attention type, in this order
PROTOCOL = "blocks"
DEVIATIONS = 2.0
PAGE = """# Quickstart

Written by `python -m lrpe_fairseq.experiments.commands.quickstart --seeds 3 --publish`:
`lrpe_lm_tiny` ({shape}) on the English text that CPython
{python} carries, read character by character. {updates} updates of {tokens} characters, a cosine
schedule annealed to zero, {seeds}. Perplexity is per character on documents that
training has not seen ({evaluated} characters), {protocol}
Base is the encoding `none`: sinusoidal positions only. The other rows have them too, as in the
paper. Linear attention is normalized by a LayerNorm in every row, as in the TMLR paper.

{numbers}

The run files are in [runs/](runs/). {machine}.

![Validation curves](validation.png)
"""


@dataclass(frozen=True)
class Row:
    """One attention type and encoding; ``ppl`` is seed -> test perplexity."""

    attention: str
    encoding: str
    ppl: dict[int, float]

    @property
    def mean(self) -> float:
        """The mean over the seeds."""
        return statistics.fmean(self.ppl.values())

    @property
    def deviation(self) -> float:
        """The standard deviation over the seeds; 0 for a single one."""
        return statistics.stdev(self.ppl.values()) if len(self.ppl) > 1 else 0.0

    @property
    def name(self) -> str:
        """``Base`` or the name of the encoding."""
        return "Base" if self.encoding == BASE else self.encoding


def published(folder: Path) -> list[Run]:
    """The run files of ``folder`` by attention type, encoding and seed."""
    runs = [read_run(path) for path in sorted(folder.glob("*.json"))]
    return sorted(
        runs,
        key=lambda run: (
            run["attention_type"],
            ENCODINGS.index(run["position_encoding"]),
            run["seed"],
        ),
    )


def rows(runs: Iterable[Run]) -> list[Row]:
    """The runs by attention type and encoding, in the order of their first appearance."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for run in runs:
        name = (run["attention_type"], run["position_encoding"])
        found.setdefault(name, {})[run["seed"]] = run["metrics"]["test"][PROTOCOL]["ppl"]
    return [Row(*name, ppl) for name, ppl in found.items()]


def separated(better: Row, worse: Row) -> bool:
    """True if the numbers support that ``better`` has the lower perplexity.

    Needs the same two or more seeds in both. The pooled deviation is the root of the mean variance.
    """
    if set(better.ppl) != set(worse.ppl) or len(better.ppl) < 2:
        return False
    pooled = ((better.deviation**2 + worse.deviation**2) / 2) ** 0.5
    agree = all(better.ppl[seed] < worse.ppl[seed] for seed in better.ppl)
    return agree and worse.mean - better.mean > DEVIATIONS * pooled


def table(found: Sequence[Row], aligned: bool = False) -> str:
    """The rows as a Markdown table, each beside Base of its attention type."""
    lines = [list(HEAD), *(_cells(row, base_of(row, found)) for row in found)]
    widths = [max(map(len, column)) if aligned else 3 for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    padded = [[c.ljust(w) for c, w in zip(line, widths, strict=True)] for line in lines]
    return "".join("| " + " | ".join(line) + " |\n" for line in padded)


def order(found: Sequence[Row]) -> list[str]:
    """One line for each attention type: its rows from the best to the worst.

    ``<`` joins two rows that are separated, ``≈`` two neighbours that are not.
    """
    lines = []
    for attention in dict.fromkeys(row.attention for row in found):
        ranked = sorted((r for r in found if r.attention == attention), key=lambda row: row.mean)
        signs = ["<" if separated(*pair) else "≈" for pair in pairwise(ranked)]
        words = [f"{sign} {row.name}" for sign, row in zip(signs, ranked[1:], strict=True)]
        lines.append(" ".join([f"{attention} attention: {ranked[0].name}", *words]))
    return lines


def stated(found: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Every separated pair (better, worse) of rows with the same attention type."""
    pairs = [pair for pair in combinations(found, 2) if pair[0].attention == pair[1].attention]
    both = [*pairs, *((second, first) for first, second in pairs)]
    return [pair for pair in both if separated(*pair)]


def contradicted(found: Sequence[Row], published: Sequence[Row]) -> list[str]:
    """The orders of the published rows that the means of ``found`` contradict, as sentences."""
    mean = {(row.attention, row.encoding): row.mean for row in found}
    return [
        f"{better.attention} attention: {better.name} does not beat {worse.name}"
        for better, worse in stated(published)
        if mean[better.attention, better.encoding] >= mean[worse.attention, worse.encoding]
    ]


def comparison(found: Sequence[Row], published: Sequence[Row]) -> list[str]:
    """The published orders, and whether ``found`` agrees with them, as lines for the screen."""
    differing = contradicted(found, published)
    agrees = "The table above agrees with every `<`."
    return [
        f"Published, {len(published[0].ppl)} seeds, lower is better:",
        *(f"  {line}" for line in order(published)),
        *([f"The table above differs: {line}." for line in differing] or [agrees]),
    ]


def numbers(found: Sequence[Row]) -> str:
    """:func:`table` and :func:`order` as Markdown."""
    rule = (
        "Lower is better. `<` stands where all seeds agree and the difference of the means is\n"
        "more than twice the pooled standard deviation, `≈` where one of these does not hold:"
    )
    return "\n".join([table(found), rule, "", *(f"- {line}" for line in order(found))])


def page(runs: Sequence[Run]) -> str:
    """The text of results/quickstart/README.md; every number in it is from ``runs``."""
    found, first = rows(runs), runs[0]
    config, machine = first["config"], first["hardware"]
    seeds = sorted({run["seed"] for run in runs})
    return PAGE.format(
        shape=f"{config['decoder-layers']} x {config['decoder-embed-dim']}",
        python=first["versions"]["python"],
        updates=config["max-update"],
        tokens=f"{config['max-tokens'] * config['update-freq'][0]:,}",
        seeds=f"seed {seeds[0]}"
        if len(seeds) == 1
        else f"mean ± deviation over {len(seeds)} seeds",
        evaluated=f"{first['metrics']['test'][PROTOCOL]['tokens']:,}",
        protocol=f"in non-overlapping blocks of {config['tokens-per-sample']}.",
        numbers=numbers(found),
        machine=f"{machine['cpu']}, {machine['cores']} cores; torch {first['versions']['torch']}",
    )


def change(row: Row, base: Row) -> str:
    """The row's mean relative to that of ``base``, in per cent; a dash for ``base`` itself."""
    return "—" if row is base else f"{100 * (row.mean / base.mean - 1):+.0f} %"


def _cells(row: Row, base: Row) -> list[str]:
    spread = f" ± {row.deviation:.2f}" if len(row.ppl) > 1 else ""
    name = f"{row.encoding} (Base)" if row is base else row.encoding
    return [row.attention, name, f"{row.mean:.2f}{spread}", change(row, base)]


def base_of(row: Row, found: Sequence[Row]) -> Row:
    """Base of the row's attention type. Raises: StopIteration if ``found`` lacks it."""
    wanted = (row.attention, BASE)
    return next(r for r in found if (r.attention, r.encoding) == wanted)
