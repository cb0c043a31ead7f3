"""The synthetic transduction tasks of "Algebraic Positional Encodings", generated.

Sequences: copy, repeat, reverse. Binary trees: copy, rotate, C3, tree-ops. The source of a tree is
written breadth-first, its target in either order. The position of a node is an int64 code in
bijective base 2: the root is 0, and child b (0 or 1) of node n is 2 n + b + 1. Every split has a
random stream of its own, and no input of one split occurs in an earlier one. Where the paper leaves
sizes and rules open, they are those of its published code; see data-prep/algebraic/README.md.
"""

from __future__ import annotations

import functools
import itertools
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.random import RandomState

from lrpe_fairseq.experiments.data import bitext
from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.data.corpus import FAIRSEQ_EOS as EOS
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


SCALES = {
    "paper": Scale(
        pairs={"train": 6000, "valid": 2000, "test": 2000},
        length=(100, 10),
        depth=(7, 1),
        symbols={"copy": 20, "repeat": 19, "reverse": 19},
        labels=10,
    ),
    "small": Scale(
        pairs={"train": 6000, "valid": 1000, "test": 1000},
        length=(40, 4),
        depth=(5, 1),
        symbols={"copy": 8, "repeat": 8, "reverse": 8},
        labels=4,
    ),
    "tiny": Scale(
        pairs={"train": 256, "valid": 64, "test": 64},
        length=(12, 1),
        depth=(4, 1),
        symbols={"copy": 6, "repeat": 6, "reverse": 6},
        labels=3,
    ),
}


@dataclass(frozen=True)
class Recipe:
    """What to generate.

    ``order``: of the nodes of a tree's target.

    Raises: UserError for an option that is missing, or has no effect on the task.
    """

    task: str
    scale: str
    order: str = ""
    seed: int = 42

    def __post_init__(self) -> None:
        if self.has_trees and self.order not in ORDERS:
            raise UserError(f"{self.task} needs --order {' or '.join(ORDERS)}.")
        if not self.has_trees and self.order:
            raise UserError(f"--order is for trees: {self.task} has sequences.")

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
        return "-".join(filter(None, (self.task, self.order)))


# ----------------------------------------------------------------------------------------- trees


@dataclass(frozen=True)
class Tree:
    """A node with its label and either no child (a leaf) or two (an operator)."""

    label: str
    children: tuple[Tree, ...] = ()


def below(rng: RandomState, bound: int) -> int:
    """Return a uniform integer in 0 .. bound - 1. ``randint`` takes longer for one number."""
    return int(rng.random_sample() * bound)


def random_shape(rng: RandomState, depth: int) -> Tree:
    """Draw a tree without labels whose longest path has exactly ``depth`` edges.

    One child has depth - 1. The other has a depth uniform on 0 .. depth - 1; if that draw is
    depth - 1, it is repeated once. Sides are random.
    """
    if depth == 0:
        return Tree("")
    other = below(rng, depth)
    other = below(rng, depth) if other == depth - 1 else other
    children = (random_shape(rng, depth - 1), random_shape(rng, other))
    return Tree("", children if below(rng, 2) else children[::-1])


def labeled(shape: Tree, next_leaf: Callable[[], str], next_operator: Callable[[], str]) -> Tree:
    """Return the tree with labels drawn depth-first by the two functions."""
    label = (next_operator if shape.children else next_leaf)()
    return Tree(label, tuple(labeled(c, next_leaf, next_operator) for c in shape.children))


def breadth_first(tree: Tree) -> Iterator[tuple[Tree, int]]:
    """Yield every node with its code, level by level and from left to right."""
    pending = deque([(tree, 0)])
    while pending:
        node, code = pending.popleft()
        yield node, code
        pending.extend((c, 2 * code + b) for b, c in enumerate(node.children, start=1))


def depth_first(tree: Tree, code: int = 0) -> Iterator[tuple[Tree, int]]:
    """Yield every node with its code: a node, its left subtree, its right subtree."""
    yield tree, code
    for branch, child in enumerate(tree.children, start=1):
        yield from depth_first(child, 2 * code + branch)


ORDERS = {"breadth": breadth_first, "depth": depth_first}


def rotate(tree: Tree) -> Tree:
    """Rotate every subtree to the right, once, from the root downwards.

    r(p(l, m), x) -> p(rotate l, r(rotate m, rotate x)). A subtree whose left child is a leaf is
    returned unchanged, with everything below it. The paper says "up to a fixpoint"; its published
    code makes this single pass, to which its numbers belong.
    """
    if not tree.children or not tree.children[0].children:
        return tree
    left, right = tree.children
    outer, inner = tree.children[0].children
    return Tree(left.label, (rotate(outer), Tree(tree.label, (rotate(inner), rotate(right)))))


def reduce_c3(tree: Tree) -> Tree:
    """Replace every operator over two leaves by their product in the cyclic group of order 3.

    Leaves are ``l1`` (the neutral element), ``l2`` and ``l3``. This is one step of a reduction.
    """
    if not tree.children:
        return tree
    if any(child.children for child in tree.children):
        return Tree(tree.label, tuple(map(reduce_c3, tree.children)))
    exponent = sum(int(leaf.label[1:]) - 1 for leaf in tree.children) % 3
    return Tree(f"l{exponent + 1}")


def truncate(tree: Tree, label: str) -> Tree:
    """Return the tree with the subtree whose root has this label cut down to that root."""
    if tree.label == label:
        return Tree(label)
    return Tree(tree.label, tuple(truncate(child, label) for child in tree.children))


# ----------------------------------------------------------------------------------------- tasks


def _size(rng: RandomState, distribution: tuple[float, float], least: int) -> int:
    """Draw int(N(mean, deviation)), rounded towards zero as published, and not below ``least``."""
    mean, deviation = distribution
    return max(least, int(rng.normal(mean, deviation)))


def types(prefix: str, count: int) -> list[str]:
    """Return ``count`` symbols: the prefix and a number from 1."""
    return [f"{prefix}{number}" for number in range(1, count + 1)]


def _sequence(
    rng: RandomState, scale: Scale, symbols: list[str], answer: Callable[[tuple], tuple]
) -> Sample:
    length = _size(rng, scale.length, 2)
    tokens = tuple(symbols[below(rng, len(symbols))] for _ in range(length))
    return Sample(Side(tokens), Side(answer(tokens)))


SEQUENCES: dict[str, Callable[[tuple], tuple]] = {
    "copy": lambda tokens: tokens,
    "repeat": lambda tokens: tokens + tokens,
    "reverse": lambda tokens: tokens[::-1],
}


def _traversed(tree: Tree, order: str) -> Side:
    nodes = list(ORDERS[order](tree))
    return Side(tuple(node.label for node, _ in nodes), tuple(code for _, code in nodes))


def _mapped(
    rng: RandomState,
    scale: Scale,
    labels: tuple[list[str], list[str]],
    order: str,
    answer: Callable[[Tree], Tree],
) -> Sample:
    """A tree with labels drawn with repetition, and ``answer`` of it."""
    leaves, operators = labels

    def draw(symbols: list[str]) -> str:
        return symbols[below(rng, len(symbols))]

    shape = random_shape(rng, _size(rng, scale.depth, 1))
    tree = labeled(shape, lambda: draw(leaves), lambda: draw(operators))
    return Sample(_traversed(tree, "breadth"), _traversed(answer(tree), order))


def _manipulated(
    rng: RandomState, scale: Scale, labels: tuple[list[str], list[str]], order: str
) -> Sample:
    """A tree of distinct labels below a command and the label of one of its subtrees' roots."""
    leaves, operators = labels
    *operators, extract, swap, cut, keep = operators
    most = 2 * min(len(leaves) - 1, len(operators)) + 1  # nodes, half of them operators
    while True:
        shape = random_shape(rng, _size(rng, scale.depth, 2) - 1)
        if sum(1 for _ in breadth_first(shape)) <= most:
            break
    drawn_leaves = iter([leaves[n] for n in rng.permutation(len(leaves))])
    drawn_operators = iter([operators[n] for n in rng.permutation(len(operators))])
    tree = labeled(shape, lambda: next(drawn_leaves), lambda: next(drawn_operators))
    nodes = [node for node, _ in breadth_first(tree)]
    chosen = nodes[below(rng, len(nodes))]
    answers = {
        extract: chosen,
        swap: Tree(chosen.label, chosen.children[::-1]),
        cut: truncate(tree, chosen.label),
        keep: tree,
    }
    command = list(answers)[below(rng, 4)]
    question = Tree(command, (Tree(chosen.label), tree))
    return Sample(_traversed(question, "breadth"), _traversed(answers[command], order))


ANSWERS: dict[str, Callable[[Tree], Tree]] = {
    "tree-copy": lambda tree: tree,
    "tree-rotate": rotate,
    "tree-c3": reduce_c3,
}
TASKS = (*SEQUENCES, *ANSWERS, "tree-ops")


def labels(recipe: Recipe) -> tuple[list[str], list[str]]:
    """Return the labels of leaves (or a sequence) and of operators, with the commands last."""
    if not recipe.has_trees:
        return types("t", recipe.sizes.symbols[recipe.task]), []
    if recipe.task == "tree-c3":
        return types("l", 3), ["o1"]
    if recipe.task == "tree-ops":
        operators = [*types("o", DISTINCT_OPERATORS), *(f"o:{command}" for command in COMMANDS)]
        return types("l", DISTINCT_LEAVES), operators
    return types("l", recipe.sizes.labels), types("o", recipe.sizes.labels)


def sampler(recipe: Recipe) -> Callable[[RandomState], Sample]:
    """Return the function that draws one sample."""
    task = recipe.task
    scale = recipe.sizes
    known = labels(recipe)
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
    splits = {split: (count, draw) for split, count in recipe.sizes.pairs.items()}
    return draw_splits(recipe, splits, lambda sample: sample.source.tokens)


def draw_splits(
    recipe: Any,
    splits: Mapping[str, tuple[int, Callable[[RandomState], Drawn]]],
    tokens: Callable[[Drawn], tuple[str, ...]],
) -> dict[str, list[Drawn]]:
    """Draw the samples of every split, whose ``tokens`` are not among those of earlier splits.

    recipe: with ``task`` and ``seed``. splits: number of samples, and the function that draws one.

    Raises: UserError after ``PATIENCE`` draws.
    """
    known: set[tuple[str, ...]] = set()
    samples: dict[str, list[Drawn]] = {}
    for number, (split, (count, draw)) in enumerate(splits.items()):
        # A stream for each split: more training samples do not change the test set.
        rng = RandomState([recipe.seed, number])
        samples[split] = []
        for _ in range(count):
            drawn = (draw(rng) for _ in range(PATIENCE))
            sample = next((one for one in drawn if tokens(one) not in known), None)
            if sample is None:
                raise UserError(f"{recipe.task} has too few different inputs: use a larger scale.")
            samples[split].append(sample)
        known.update(map(tokens, samples[split]))
    return samples


# ----------------------------------------------------------------------------------------- files


class Column(NamedTuple):
    """One text file, a row of tokens per line, and its binary form.

    text, binary: names of the files. numbers: tokens of a row -> what is stored, as ``kind``.
    """

    text: str
    binary: str
    numbers: Callable[[list[str]], list[int]]
    kind: type[np.integer] = np.uint16


def binarize(
    steps: prep.Steps,
    reads: Mapping[str, Any],
    make: Callable[[Path], None],
    columns: Sequence[Column],
    dictionaries: Sequence[str],
    dictionary: str = "dictionary",
) -> None:
    """Steps: ``make`` the texts of the columns and ``dict.txt`` in ``text/``, then write ``bin/``.

    dictionaries: names under which ``bin/`` contains ``dict.txt``. dictionary: its name in the
    manifest.
    """
    text = steps.dest / "text"
    bin_dir = steps.dest / "bin"
    written = {column.text: text / column.text for column in columns}
    written[dictionary] = text / "dict.txt"

    def write() -> None:
        with prep.atomic_folder(bin_dir) as part:
            for name in dictionaries:
                shutil.copyfile(text / "dict.txt", part / name)
            for column in columns:
                rows = (line.split() for line in prep.read_lines(text / column.text))
                prep.write_indexed(map(column.numbers, rows), part / column.binary, column.kind)

    files = (*dictionaries, *prep.binary_files(column.binary for column in columns))
    steps.run("generate", reads, list(written.values()), functools.partial(make, text))
    steps.run("binarize", written, [bin_dir / file for file in files], write)


def write_rows(path: Path, rows: Iterable[Iterable]) -> None:
    """Write a line per row, its items separated by spaces; the write is atomic."""
    prep.write_lines(path, (" ".join(map(str, row)) for row in rows))


def positions_of(side: str) -> str:
    """Return the name under which the positions of a side are stored, like a language."""
    return f"{side}-{POSITIONS}"


def write_text(recipe: Recipe, folder: Path) -> None:
    """Write ``<split>.source`` and ``.target``, the codes of a tree's nodes, and ``dict.txt``."""
    for (split, samples), side in itertools.product(generate(recipe).items(), SIDES):
        rows = [getattr(sample, side) for sample in samples]
        write_rows(folder / f"{split}.{side}", (row.tokens for row in rows))
        if recipe.has_trees:
            write_rows(folder / f"{split}.{positions_of(side)}", (row.codes for row in rows))
    prep.write_lines(folder / "dict.txt", (f"{label} 1" for label in vocabulary(recipe)))


def vocabulary(recipe: Recipe) -> list[str]:
    """Return every label, in the order of the dictionary, which both sides share."""
    return [*itertools.chain(*labels(recipe))]


def prepare(dest: Path, recipe: Recipe) -> dict:
    """Prepare ``dest`` and return its manifest; finished steps are skipped.

    The codes of nodes have the format of tokens, in int64, and a code for every token: that of the
    end of sentence is 0.
    """
    steps = prep.Steps(dest, recipe.name, recipe.scale)
    numbers = {label: n for n, label in enumerate(vocabulary(recipe), prep.FAIRSEQ_SPECIALS)}
    kinds = [(s, lambda row: [*(numbers[t] for t in row), EOS], np.uint16) for s in SIDES]
    if recipe.has_trees:
        kinds += [(positions_of(s), lambda row: [*map(int, row), 0], np.int64) for s in SIDES]
    columns = [
        Column(f"{split}.{name}", bitext.binary_name(split, SIDES, name), *kind)
        for split, (name, *kind) in itertools.product(recipe.sizes.pairs, kinds)
    ]
    reads = {"script": Path(__file__), "seed": recipe.seed}
    dictionaries = [f"dict.{side}.txt" for side in SIDES]
    binarize(steps, reads, partial(write_text, recipe), columns, dictionaries)
    texts = {split: dest / "text" / split for split in recipe.sizes.pairs}
    return steps.finish(lambda: bitext.count(dest, texts, SIDES))
