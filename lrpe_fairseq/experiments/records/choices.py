"""Read and check ``configs/choosing.yaml``: what the page docs/choosing.md compares and states.

Its texts contain numbers and orders as references only (:mod:`.notes`).
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lrpe_fairseq.experiments.records import notes
from lrpe_fairseq.experiments.records.layout import build
from lrpe_fairseq.experiments.records.repeated import spelled_out

VERDICTS = ("supported", "contradicted", "open")
FILE = Path("configs") / "choosing.yaml"


@dataclass(frozen=True)
class Source:
    """Columns of a table at one scale, by attention type; empty for a type without a column."""

    table: str
    scale: str
    linear: str = ""
    softmax: str = ""


@dataclass(frozen=True)
class Learned:
    """Columns with the accuracy at the training length, and the least one of a learned task.

    linear, softmax: columns of the table and scale of the aspect's first source. least: a method
    with a seed below it has not learned the task, so that other lengths say nothing about it.
    """

    linear: str
    softmax: str
    least: float


@dataclass(frozen=True)
class Aspect:
    """One column of one or more matrices.

    key, title: its name and heading. axis: what an axis of the picture says that it measures;
    default: the title. text: what the number is. command: what measures it.
    matrices: the headings of its matrices. sources: the columns that hold it; of a method that
    several have, the first counts. metric: a field of the run file in place of the metric of
    these columns. benchmark: a part of results/bench/<device> instead of sources. better:
    ``lower`` or ``higher``. quality: False for a cost. ranked: False if the values are shown
    without ranks.
    answered: False if it is in the matrices only. learned: which methods have learned the task; the
    others are marked and not ranked. optional: True if the column is only shown once it has runs.
    bidirectional: True if its models are, so that methods for causal attention have no cell.
    """

    key: str
    title: str
    text: str
    command: str
    better: str
    axis: str = ""
    sources: list[Source] = field(default_factory=list)
    metric: str = ""
    benchmark: str = ""
    device: str = "cpu"
    decimals: int = 2
    quality: bool = True
    ranked: bool = True
    answered: bool = True
    learned: Learned | None = None
    matrices: list[str] = field(default_factory=lambda: ["Tasks, speed and memory"])
    optional: bool = False
    bidirectional: bool = False


@dataclass(frozen=True)
class Finding:
    """A sentence about one table at one scale; shown once every cell that it names has runs.

    title: what it is about, without a period at its end.
    """

    title: str
    table: str
    scale: str
    text: str


@dataclass(frozen=True)
class Statement:
    """A published statement that one row is ahead of others, and what our runs say.

    source: the publication. text: the statement. table, scale, column: where we measure it. first,
    others: row labels. verdict: ``supported`` if our runs put ``first`` ahead of all ``others``,
    ``contradicted`` if they put all of them ahead of it, ``open`` if neither.
    """

    source: str
    text: str
    table: str
    scale: str
    column: str
    first: str
    others: list[str]
    verdict: str


@dataclass(frozen=True)
class Ratios:
    """Published perplexities beyond the training length, and our columns to set beside them.

    file: of results/paper. short, long: columns of ``table`` at the training length and beyond it.
    rows: the rows to show of methods that have several; without it the first.
    """

    file: str
    table: str
    scale: str
    short: str
    long: str
    rows: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Choices:
    """The whole page.

    figure: key of the quality and key of the cost that its picture shows. summary: keys of the
    aspects whose answers README.md shows.
    """

    aspects: list[Aspect]
    figure: list[str]
    ratios: Ratios
    summary: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    statements: list[Statement] = field(default_factory=list)

    @property
    def tables(self) -> list[str]:
        """The names of all tables that the page reads."""
        sources = [source for aspect in self.aspects for source in aspect.sources]
        named = [*sources, *self.findings, *self.statements, self.ratios]
        return sorted({each.table for each in named})


def load_choices(path: Path) -> Choices:
    """Read and check the file. Raises: ValueError, which names the file and the error."""
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
        content = {
            **given,
            "aspects": [_aspect(aspect) for aspect in spelled_out(given.get("aspects", []))],
            "ratios": build(Ratios, given.get("ratios", {})),
            "findings": [build(Finding, finding) for finding in given.get("findings", [])],
            "statements": [build(Statement, claim) for claim in given.get("statements", [])],
        }
        choices = build(Choices, content)
        _check(choices)
    except (ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {error}") from error
    return choices


def _aspect(given: dict[str, Any]) -> Aspect:
    own = {**given, "sources": [build(Source, source) for source in given.get("sources", [])]}
    if "learned" in given:
        own["learned"] = build(Learned, given["learned"])
    return build(Aspect, own)


def _check(choices: Choices) -> None:
    for aspect in choices.aspects:
        for text in (aspect.text, aspect.axis):
            notes.check_text(text)
        if aspect.better not in ("lower", "higher"):
            raise ValueError(f"better of {aspect.key} must be lower or higher")
        if bool(aspect.sources) == bool(aspect.benchmark):
            raise ValueError(f"aspect {aspect.key} needs either sources or a benchmark")
        if aspect.learned and not aspect.sources:
            raise ValueError(f"learned of {aspect.key} needs sources")
    keys = {aspect.key for aspect in choices.aspects}
    if len(choices.figure) != 2 or not keys.issuperset(choices.figure):
        raise ValueError("figure needs the keys of a quality and of a cost")
    if not keys.issuperset(choices.summary):
        raise ValueError("summary needs keys of aspects")
    for finding in choices.findings:
        notes.check_note(finding.title)
        notes.check_note(finding.text)
    for claim in choices.statements:
        notes.check_text(claim.text)
        if claim.verdict not in VERDICTS:
            raise ValueError(f"a verdict must be one of {', '.join(VERDICTS)}, not {claim.verdict}")
        if not claim.others:
            raise ValueError(f"a statement about {claim.first} needs rows that it is compared with")
