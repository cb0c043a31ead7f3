"""The synthetic transduction tasks of "Algebraic Positional Encodings", generated.

Sequences: copy, repeat, reverse. Binary trees: copy, rotate, C3, tree-ops. The source of a tree is
written breadth-first, its target in either order. Every split has a random stream of its own, and
no input of one split occurs in an earlier one.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.random import RandomState

from lrpe_fairseq.experiments.data import bitext, trees
from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.data.trees import Tree
from lrpe_fairseq.experiments.records.console import UserError

SIDES = ("source", "target")
POSITIONS = "positions"
"""Ends the name of a file with the positions of a side's tokens."""
PATIENCE = 1000
"""Draws of one input before the task counts as exhausted."""
DISTINCT_LEAVES, DISTINCT_OPERATORS = 64, 60  # with four commands, the 128 labels of tree-ops
Drawn = TypeVar("Drawn")
COMMANDS = ("extract", "flip", "truncate", "keep")


class Side(NamedTuple):
    """Tokens, and the code of the node of each token; no codes in a sequence."""

    tokens: tuple[str, ...]
    codes: tuple[int, ...] = ()


class Sample(NamedTuple):
    """A source and its target."""

    source: Side
    target: Side


@dataclass(frozen=True)
class Scale:
    """Sizes of the data: pairs by split, then mean and deviation of lengths and of depths.

    ``symbols``: types of a sequence task. ``labels``: leaf labels of a tree task, and as many
    operator labels.
    """

    pairs: Mapping[str, int]
    length: tuple[float, float]
    depth: tuple[float, float]
    symbols: Mapping[str, int]
    labels: int


def _pairs(train: int, held_out: int) -> dict[str, int]:
    return {"train": train, "valid": held_out, "test": held_out}


SCALES = {
    "paper": Scale(
        _pairs(6000, 2000), (100, 10), (7, 1), {"copy": 20, "repeat": 19, "reverse": 19}, 10
    ),
    "small": Scale(_pairs(6000, 1000), (40, 4), (5, 1), {"copy": 8, "repeat": 8, "reverse": 8}, 4),
    "tiny": Scale(_pairs(256, 64), (12, 1), (4, 1), {"copy": 6, "repeat": 6, "reverse": 6}, 3),
}


@dataclass(frozen=True)
class Recipe:
    """What to generate.

    ``order``: of the nodes of a tree's target. ``published_labels``: in tree-ops the command
    ``extract`` is also an operator label, as in the published code.

    Raises: UserError for a value that does not exist, or that has no effect on the task.
    """

    task: str
    scale: str
    order: str = ""
    seed: int = 42
    published_labels: bool = False

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise UserError(f"{self.task} is not a task: choose one of {', '.join(TASKS)}.")
        if self.scale not in SCALES:
            raise UserError(f"{self.scale} is not a scale: choose one of {', '.join(SCALES)}.")
        if self.has_trees and self.order not in trees.ORDERS:
            raise UserError(f"{self.task} needs --order {' or '.join(trees.ORDERS)}.")
        if not self.has_trees and self.order:
            raise UserError(f"--order is for trees: {self.task} has sequences.")
        if self.published_labels and self.task != "tree-ops":
            raise UserError("--published-labels is an option of tree-ops only.")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"--seed must be in 0 .. {2**32 - 1}, not {self.seed}.")

    @property
    def has_trees(self) -> bool:
        """True if the tokens have positions in a tree."""
        return self.task not in SEQUENCES

    @property
    def sizes(self) -> Scale:
        """The sizes of the scale."""
        return SCALES[self.scale]

    @property
    def name(self) -> str:
        """The data set's name without its scale, such as ``tree-rotate-depth``."""
        published = "published" if self.published_labels else ""
        return "-".join(part for part in (self.task, published, self.order) if part)


# ----------------------------------------------------------------------------------------- tasks


def _size(rng: RandomState, distribution: tuple[float, float], least: int) -> int:
    """Draw int(N(mean, deviation)), rounded towards zero as published, and not below ``least``."""
    return max(least, int(rng.normal(*distribution)))


def types(prefix: str, count: int) -> list[str]:
    """Return ``count`` symbols: the prefix and a number from 1."""
    return [f"{prefix}{number}" for number in range(1, count + 1)]


def _sequence(
    rng: RandomState, scale: Scale, symbols: list[str], answer: Callable[[tuple], tuple]
) -> Sample:
    length = _size(rng, scale.length, 2)
    tokens = tuple(symbols[trees.below(rng, len(symbols))] for _ in range(length))
    return Sample(Side(tokens), Side(answer(tokens)))


SEQUENCES: dict[str, Callable[[tuple], tuple]] = {
    "copy": lambda tokens: tokens,
    "repeat": lambda tokens: tokens + tokens,
    "reverse": lambda tokens: tokens[::-1],
}


def _traversed(tree: Tree, order: str) -> Side:
    nodes = list(trees.ORDERS[order](tree))
    return Side(tuple(node.label for node, _ in nodes), tuple(code for _, code in nodes))


def _mapped(
    rng: RandomState,
    scale: Scale,
    labels: tuple[list[str], list[str]],
    order: str,
    answer: Callable[[Tree], Tree],
) -> Sample:
    """A tree with labels drawn with repetition, and ``answer`` of it."""
    leaves, operators = (trees.uniform(rng, some) for some in labels)
    shape = trees.random_shape(rng, _size(rng, scale.depth, 1))
    tree = trees.labeled(shape, leaves, operators)
    return Sample(_traversed(tree, "breadth"), _traversed(answer(tree), order))


def _manipulated(
    rng: RandomState, scale: Scale, labels: tuple[list[str], list[str]], order: str
) -> Sample:
    """A tree of distinct labels below a command and the label of one of its subtrees' roots."""
    *operators, extract, flip, truncate, keep = labels[1]
    shape = trees.random_shape(rng, _size(rng, scale.depth, 2) - 1)
    while not _enough(shape, len(labels[0]), len(operators)):
        shape = trees.random_shape(rng, _size(rng, scale.depth, 2) - 1)
    tree = trees.labeled(shape, trees.distinct(rng, labels[0]), trees.distinct(rng, operators))
    nodes = [node for node, _ in trees.breadth_first(tree)]
    chosen = nodes[trees.below(rng, len(nodes))]
    answers = {
        extract: chosen,
        flip: trees.flip(chosen),
        truncate: trees.truncate(tree, chosen.label),
        keep: tree,
    }
    command = (extract, flip, truncate, keep)[trees.below(rng, 4)]
    question = Tree(command, (Tree(chosen.label), tree))
    return Sample(_traversed(question, "breadth"), _traversed(answers[command], order))


def _enough(shape: Tree, leaves: int, operators: int) -> bool:
    nodes = sum(1 for _ in trees.breadth_first(shape))
    return nodes // 2 + 1 <= leaves and nodes // 2 <= operators


ANSWERS: dict[str, Callable[[Tree], Tree]] = {
    "tree-copy": lambda tree: tree,
    "tree-rotate": trees.rotate,
    "tree-c3": trees.reduce_c3,
}
TASKS = (*SEQUENCES, *ANSWERS, "tree-ops")


def labels(recipe: Recipe) -> tuple[list[str], list[str]]:
    """Return the labels of leaves and of operators; a sequence has the first kind only.

    Those of tree-ops end with the four commands.
    """
    if not recipe.has_trees:
        return types("t", recipe.sizes.symbols[recipe.task]), []
    if recipe.task == "tree-c3":
        return types("l", 3), ["o1"]
    if recipe.task == "tree-ops":
        operators = types("o", DISTINCT_OPERATORS)
        commands = [f"o:{command}" for command in COMMANDS]
        if recipe.published_labels:
            commands[0] = operators[-1]
        return types("l", DISTINCT_LEAVES), operators + commands
    return types("l", recipe.sizes.labels), types("o", recipe.sizes.labels)


def sampler(recipe: Recipe) -> Callable[[RandomState], Sample]:
    """Return the function that draws one sample."""
    task, scale, known = recipe.task, recipe.sizes, labels(recipe)
    if task in SEQUENCES:
        return partial(_sequence, scale=scale, symbols=known[0], answer=SEQUENCES[task])
    if task == "tree-ops":
        return partial(_manipulated, scale=scale, labels=known, order=recipe.order)
    return partial(_mapped, scale=scale, labels=known, order=recipe.order, answer=ANSWERS[task])


def generate(recipe: Recipe) -> dict[str, list[Sample]]:
    """Return the samples of every split.

    Equal recipes give equal samples on every machine: numpy guarantees the streams of
    ``RandomState``. The trees do not depend on the order of the target.

    Raises: UserError if the task has too few different inputs of this size.
    """
    draw = sampler(recipe)
    known: set[tuple[str, ...]] = set()
    splits = {}
    for number, (split, count) in enumerate(recipe.sizes.pairs.items()):
        rng = RandomState([recipe.seed, number])
        draw_one = partial(draw, rng)
        splits[split] = [
            unseen(draw_one, known, lambda s: s.source.tokens, recipe.task) for _ in range(count)
        ]
        known.update(sample.source.tokens for sample in splits[split])
    return splits


def unseen(
    draw: Callable[[], Drawn],
    known: Container[tuple[str, ...]],
    tokens: Callable[[Drawn], tuple[str, ...]],
    task: str,
) -> Drawn:
    """Draw until the ``tokens`` of a sample are not among those of earlier splits, ``known``.

    Raises: UserError after ``PATIENCE`` draws.
    """
    for _ in range(PATIENCE):
        sample = draw()
        if tokens(sample) not in known:
            return sample
    raise UserError(f"{task} has too few different inputs of this size: choose a larger scale.")


# ----------------------------------------------------------------------------------------- files


def positions_of(side: str) -> str:
    """Return the name under which the positions of a side are stored, like a language."""
    return f"{side}-{POSITIONS}"


def columns(recipe: Recipe) -> list[str]:
    """Return the names that stand in the place of a language in the names of the files."""
    return [*SIDES, *map(positions_of, SIDES)] if recipe.has_trees else [*SIDES]


def write_text(recipe: Recipe, folder: Path) -> None:
    """Write ``<split>.source`` and ``.target``, beside them the codes of a tree's nodes."""
    for split, samples in generate(recipe).items():
        for side in SIDES:
            rows = [getattr(sample, side) for sample in samples]
            write_lines((row.tokens for row in rows), folder / f"{split}.{side}")
            if recipe.has_trees:
                path = folder / f"{split}.{positions_of(side)}"
                write_lines((row.codes for row in rows), path)


def write_lines(rows: Iterable[Iterable], path: Path) -> None:
    """Write a line per row, its items separated by spaces; the write is atomic."""
    with prep.written_whole(path) as out:
        out.writelines(f"{' '.join(map(str, row))}\n" for row in rows)


def write_dictionary(recipe: Recipe, path: Path) -> None:
    """Write the dictionary of both sides: every label once, in a fixed order, with count 1."""
    leaves, operators = labels(recipe)
    with prep.written_whole(path) as out:
        out.writelines(f"{label} 1\n" for label in dict.fromkeys(leaves + operators))


def write_binary(recipe: Recipe, text: Path, bin_dir: Path) -> None:
    """Write what fairseq reads: both dictionaries, the tokens, and the codes as int64.

    Codes have the format of tokens (MMapIndexedDataset) and a code for every token: that of the
    end of sentence is 0.
    """
    dictionary = text / "dict.txt"
    with prep.folder_written_whole(bin_dir) as part:
        for side in SIDES:
            shutil.copyfile(dictionary, part / f"dict.{side}.txt")
        for split, name in itertools.product(recipe.sizes.pairs, columns(recipe)):
            prefix = part / f"{split}.{'-'.join(SIDES)}.{name}"
            if name in SIDES:
                prep.write_tokens(text / f"{split}.{name}", prefix, dictionary)
            else:
                prep.write_indexed(_codes(text / f"{split}.{name}"), prefix, np.int64)


def _codes(path: Path) -> Iterator[list[int]]:
    return ([*map(int, line.split()), 0] for line in prep.read_lines(path))


def prepare(dest: Path, recipe: Recipe) -> dict:
    """Prepare ``dest`` and return its manifest; finished steps are skipped."""
    steps = prep.Steps(dest, recipe.name, recipe.scale)
    text, bin_dir = dest / "text", dest / "bin"
    names = [f"{split}.{name}" for split in recipe.sizes.pairs for name in columns(recipe)]
    written = {name: text / name for name in names} | {"dictionary": text / "dict.txt"}

    def make_text() -> None:
        write_text(recipe, text)
        write_dictionary(recipe, text / "dict.txt")

    sources = {"script": Path(__file__), "trees": Path(trees.__file__)}
    reads = {**sources, "seed": recipe.seed, "published labels": recipe.published_labels}
    steps.run("generate", reads, list(written.values()), make_text)
    pair = "-".join(SIDES)
    files = [
        f"{name.replace('.', f'.{pair}.')}.{kind}" for name in names for kind in ("bin", "idx")
    ]
    outputs = [bin_dir / file for file in (*files, *(f"dict.{side}.txt" for side in SIDES))]
    steps.run("binarize", written, outputs, lambda: write_binary(recipe, text, bin_dir))
    texts = {split: text / split for split in recipe.sizes.pairs}
    return bitext.report(steps.finish(lambda: bitext.count(dest, texts, SIDES)))
