"""The synthetic suite: copy, reverse, MQAR, MQRAR, flip-flop, counting, a grid and long texts.

A sample is a sequence of tokens and, for every token, the answer expected at it, or ``<pad>`` where
none is scored. Training mixes lengths up to the training length; each test split has one multiple
of it. Every split has a random stream of its own, and no sequence of a split occurs in an earlier
one.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.random import RandomState

from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.data import retrieval, transduction
from lrpe_fairseq.experiments.data.transduction import SEQUENCES, Column, below, types
from lrpe_fairseq.experiments.records.console import UserError

SIDES = ("input", "target")
PAD, PAD_ID = "<pad>", 1
MULTIPLES = (1, 2, 4, 8, 16)
"""Lengths of the test splits, in training lengths."""
LONG_MULTIPLES = (1, 4, 16, 64)
"""The same for long texts with hidden facts."""
DEPTHS = {0: 0.0, 25: 0.25, 50: 0.5, 75: 0.75, 100: 1.0}
"""Depths of the asked fact in test splits of long texts, by percent."""
BEGIN, SEPARATOR, BLANK = "begin", "separator", "."
FILLERS = ("blank", "random")  # of MQAR and MQRAR
GAP_POWER = 0.01  # a of MQAR: the gap g before a query has the weight g^(a - 1)
IGNORE = 0.8  # probability of the instruction "ignore" in training
OTHER_IGNORE = {"sparse": 0.98, "dense": 0.1}  # test splits at the training length
OTHERS = 4  # types of tokens that counting must not count
OFFSETS = {  # of grid: name -> (rows up, columns to the right)
    f"up{up}{side}{step}": (up, step if side == "right" else -step)
    for up in (1, 2)
    for side in ("left", "right")
    for step in (1, 2)
}


class Sample(NamedTuple):
    """Tokens, and the answer expected at each of them or ``PAD``."""

    inputs: tuple[str, ...]
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Scale:
    """Sizes of the data.

    ``samples``: by split; each test split has those of ``test``. ``lengths``: the training length
    by task, in symbols to copy, rows of a grid or tokens. ``symbols``: of copy and reverse.
    ``keys``: of MQAR and MQRAR, and as many values. ``most``: largest count. ``width``, ``colors``:
    columns of a grid and values of a cell.
    """

    samples: Mapping[str, int]
    lengths: Mapping[str, int]
    symbols: int
    keys: int
    most: int
    width: int
    colors: int


SCALES = {
    "small": Scale(
        {"train": 64_000, "valid": 512, "test": 256},
        {"copy": 16, "reverse": 16, "mqar": 64, "mqrar": 64, "flip-flop": 128, "counting": 32,
         "grid": 8, "passkey": 64, "keys": 64, "variables": 64},
        symbols=20, keys=32, most=10, width=8, colors=8,
    ),
    "tiny": Scale(
        {"train": 256, "valid": 64, "test": 64},
        {"copy": 8, "reverse": 8, "mqar": 32, "mqrar": 32, "flip-flop": 32, "counting": 16,
         "grid": 6, "passkey": 64, "keys": 64, "variables": 64},
        symbols=6, keys=8, most=4, width=6, colors=4,
    ),
    "many": Scale(
        {"train": 32_000, "valid": 512, "test": 128},
        {"mqar": 256, "mqrar": 256},
        symbols=20, keys=128, most=10, width=8, colors=8,
    ),
}  # fmt: skip

# ----------------------------------------------------------------------------------------- tasks


def _sequence(rng: RandomState, scale: Scale, length: int, task: str) -> Sample:
    """``begin x separator y``, y = x or x backwards, without the last token of y."""
    symbols = types("s", scale.symbols)
    word = tuple(symbols[number] for number in rng.randint(scale.symbols, size=length))
    # Teacher forcing: the input has the answer, shifted by one, and its last token is only
    # predicted.
    answer = SEQUENCES[task](word)
    inputs = (BEGIN, *word, SEPARATOR, *answer[:-1])
    return Sample(inputs, (*[PAD] * (length + 1), *answer))


def _recall(rng: RandomState, scale: Scale, length: int, task: str) -> Sample:
    """Assignments ``key value``, then every key once, each followed by a blank, among blanks.

    The answer at a key is the value that was assigned to it last. MQAR assigns every key once.
    MQRAR assigns as many values again, to random keys of the sample, in random order. In a sample
    longer than those of training the blanks that make it longer are before the first query.
    """
    longest = scale.lengths[task]
    fewest = longest // 16
    most = min(length, longest) // 8
    number = fewest + below(rng, most - fewest + 1)
    keys = [f"k{n + 1}" for n in rng.permutation(scale.keys)[:number]]
    assigned = list(keys)
    if task == "mqrar":
        assigned += [keys[n] for n in rng.randint(number, size=number)]
        assigned = [assigned[n] for n in rng.permutation(len(assigned))]
    values = [f"v{n + 1}" for n in rng.permutation(scale.keys)[: len(assigned)]]
    # Values of a sample differ, so that the last assignment of a key is known by its value.
    pairs = list(zip(assigned, values, strict=True))
    return _with_queries(rng, pairs, keys, length, max(0, length - longest))


def _with_queries(
    rng: RandomState, pairs: list[tuple[str, str]], keys: list[str], length: int, blanks: int
) -> Sample:
    start = 2 * len(pairs) + blanks
    inputs = [*itertools.chain.from_iterable(pairs), *[BLANK] * (length - 2 * len(pairs))]
    targets = [PAD] * length
    latest = dict(pairs)
    for key, gap in zip(keys, gaps(rng, (length - start) // 2, len(keys)), strict=True):
        place = start + 2 * gap
        inputs[place] = key
        targets[place] = latest[key]
    return Sample(tuple(inputs), tuple(targets))


def gaps(rng: RandomState, places: int, count: int) -> list[int]:
    """Draw ``count`` different places out of 0 .. places - 1, place g with weight (g + 1)^(a - 1).

    The rule of the published MQAR ("Zoology", with its a = 0.01): most queries follow soon.
    """
    weights = np.arange(1, places + 1) ** (GAP_POWER - 1)
    return rng.choice(places, size=count, replace=False, p=weights / weights.sum()).tolist()


def _flip_flop(rng: RandomState, scale: Scale, length: int, ignore: float = IGNORE) -> Sample:
    """Instructions write, ignore, read, each with a bit; the first is write, the last read.

    The answer at a read is the bit of the last write. ``ignore``: probability of an ignore; writes
    and reads share the rest equally.
    """
    count = length // 2
    share = (1 - ignore) / 2
    drawn = rng.random_sample(count)
    instructions = []
    for u in drawn:
        if u < share:
            instructions.append("w")
        elif u < 2 * share:
            instructions.append("r")
        else:
            instructions.append("i")
    instructions[0], instructions[-1] = "w", "r"
    inputs = []
    targets = []
    memory = ""
    for instruction, bit in zip(instructions, rng.randint(2, size=count), strict=True):
        # An ignored bit must not reach the memory: it is the distractor.
        memory = str(bit) if instruction == "w" else memory
        reads = instruction == "r"
        inputs += [instruction, memory if reads else str(bit)]
        targets += [memory if reads else PAD, PAD]
    return Sample(tuple(inputs), tuple(targets))


def _counting(rng: RandomState, scale: Scale, length: int) -> Sample:
    """One or two segments ``reset ... ?``; the answer at ``?`` is the number of marks between them.

    Counts are uniform on 0 .. most, whatever the length; all other tokens are to be ignored.
    """
    segments = 1 + below(rng, 2)
    inputs: list[str] = []
    targets: list[str] = []
    for number in range(segments):
        inner = length * (number + 1) // segments - length * number // segments - 2
        count = below(rng, scale.most + 1)
        others = [f"o{n + 1}" for n in rng.randint(OTHERS, size=inner - count)]
        content = ["mark"] * count + others
        inputs += ["reset", *(content[n] for n in rng.permutation(inner)), "?"]
        targets += [*[PAD] * (inner + 1), str(count)]
    return Sample(tuple(inputs), tuple(targets))


def _grid(rng: RandomState, scale: Scale, length: int) -> Sample:
    """``offset``, blanks, then ``length`` rows of colored cells, row by row.

    The answer at a cell is the color of the cell at the offset: 1 or 2 rows up and 1 or 2 columns
    to a side, where the columns are a ring. Rows without such a row above are not scored. Offset
    and blanks are one row, so position s of a token is row s // W, column s mod W. The distance in
    the sequence to the cell that is asked for differs where the ring closes, so it does not solve
    the task; rows and columns do.
    """
    name = list(OFFSETS)[below(rng, len(OFFSETS))]
    up, right = OFFSETS[name]
    colors = types("c", scale.colors)
    cells = [colors[n] for n in rng.randint(scale.colors, size=length * scale.width)]
    targets = [PAD] * len(cells)
    for place in range(up * scale.width, len(cells)):
        row, column = divmod(place, scale.width)
        targets[place] = cells[(row - up) * scale.width + (column + right) % scale.width]
    header = (name, *[BLANK] * (scale.width - 1))
    return Sample((*header, *cells), (*[PAD] * scale.width, *targets))


def _hidden(
    rng: RandomState, scale: Scale, length: int, task: str, depth: float | None = None
) -> Sample:
    """A text with hidden facts, a question, and the digits of the answer."""
    draw, _ = retrieval.TASKS[task]
    tokens, answers = retrieval.hide(rng, draw(rng), length, depth)
    return Sample(tuple(tokens), tuple(answer or PAD for answer in answers))


class Task(NamedTuple):
    """One task.

    draw: one sample, from a random stream, a scale and a length. vocabulary: symbols besides the
    answers. answers: what a target can be; uniform, so chance is 1 in their number. shortest: the
    shortest length in training, as a fraction of the longest. even: lengths are even. multiples:
    lengths of the test splits, in training lengths. depths: percent -> depth of the asked fact;
    each length has a test split of a quarter of the samples for each depth.
    """

    draw: Callable[..., Sample]
    vocabulary: Callable[[Scale], list[str]]
    answers: Callable[[Scale], list[str]]
    shortest: float
    even: bool = False
    multiples: tuple[int, ...] = MULTIPLES
    depths: Mapping[int, float] = {}


TASKS = {
    name: Task(
        partial(_sequence, task=name),
        lambda scale: [BEGIN, SEPARATOR],
        lambda scale: types("s", scale.symbols),
        1 / 8,
    )
    for name in ("copy", "reverse")
} | {
    name: Task(
        partial(_recall, task=name),
        lambda scale: [BLANK, *types("k", scale.keys)],
        lambda scale: types("v", scale.keys),
        1 / 2,
        even=True,
    )
    for name in ("mqar", "mqrar")
}
TASKS["flip-flop"] = Task(
    _flip_flop, lambda scale: ["w", "i", "r"], lambda scale: ["0", "1"], 1 / 2, even=True
)
TASKS["counting"] = Task(
    _counting,
    lambda scale: ["mark", "reset", "?", *types("o", OTHERS)],
    lambda scale: [str(count) for count in range(scale.most + 1)],
    3 / 4,
)
TASKS["grid"] = Task(
    _grid, lambda scale: [BLANK, *OFFSETS], lambda scale: types("c", scale.colors), 1 / 2
)
TASKS |= {
    name: Task(
        partial(_hidden, task=name),
        lambda scale, symbols=symbols: [*retrieval.SURROUNDINGS, *symbols],
        lambda scale: retrieval.DIGITS,
        1 / 2,
        multiples=LONG_MULTIPLES,
        depths=DEPTHS,
    )
    for name, (_, symbols) in retrieval.TASKS.items()
}

# ---------------------------------------------------------------------------------------- splits


class Split(NamedTuple):
    """A split: samples, length in training lengths (0: mixed up to one), keywords of ``draw``."""

    samples: int
    multiple: int
    keywords: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Recipe:
    """What to generate.

    Raises: UserError for a task that the scale does not have, or fillers of a task without them.
    """

    task: str
    scale: str
    seed: int = 42
    fillers: str = "blank"

    def __post_init__(self) -> None:
        if self.fillers != "blank" and self.task not in ("mqar", "mqrar"):
            raise UserError(f"--fillers is for mqar and mqrar: leave it out for {self.task}.")
        if self.task not in self.sizes.lengths:
            known = " and ".join(self.sizes.lengths)
            raise UserError(f"--scale {self.scale} is for {known}: leave it out for {self.task}.")

    @property
    def sizes(self) -> Scale:
        """The sizes of the scale."""
        return SCALES[self.scale]

    @property
    def length(self) -> int:
        """The training length."""
        return self.sizes.lengths[self.task]

    @property
    def name(self) -> str:
        """The data set's name without its scale, such as ``synthetic-copy``."""
        return f"synthetic-{self.task}"

    @property
    def vocabulary(self) -> list[str]:
        """Every symbol, in the order of the dictionary."""
        task = TASKS[self.task]
        fillers = types("n", self.sizes.keys) if self.fillers == "random" else []
        return task.vocabulary(self.sizes) + task.answers(self.sizes) + fillers

    @property
    def splits(self) -> dict[str, Split]:
        """train and valid with mixed lengths, then the tests by length and, if any, by depth."""
        sizes, task = self.sizes.samples, TASKS[self.task]
        splits = {name: Split(sizes[name], 0) for name in ("train", "valid")}
        for multiple in task.multiples:
            for percent, depth in task.depths.items():
                name = f"test{multiple}-depth{percent}"
                splits[name] = Split(sizes["test"] // 4, multiple, {"depth": depth})
            if not task.depths:
                splits[f"test{multiple}"] = Split(sizes["test"], multiple)
        if self.task == "flip-flop":
            for name, probability in OTHER_IGNORE.items():
                splits[name] = Split(sizes["test"], 1, {"ignore": probability})
        return splits


def sampler(recipe: Recipe, split: Split) -> Callable[[RandomState], Sample]:
    """Return the function that draws one sample of a split.

    Samples longer than those of training are scored beyond the longest of them only. A causal model
    reads what comes before as it reads a sample of training.
    """
    task = TASKS[recipe.task]
    longest = recipe.length
    shortest = max(2, int(task.shortest * longest))
    # The length in tokens, which a task may make longer than its nominal one.
    seen = len(task.draw(RandomState(0), recipe.sizes, longest).inputs)

    def draw(rng: RandomState) -> Sample:
        if split.multiple:
            length = split.multiple * longest
        else:
            length = shortest + below(rng, longest - shortest + 1)
        # Pairs of a key and a value fill two tokens.
        length -= length % 2 if task.even else 0
        sample = task.draw(rng, recipe.sizes, length, **split.keywords)
        if recipe.fillers == "random":
            sample = _without_blanks(rng, sample, recipe.sizes.keys)
        unscored = seen if split.multiple > 1 else 0
        return sample._replace(targets=(*[PAD] * unscored, *sample.targets[unscored:]))

    return draw


def _without_blanks(rng: RandomState, sample: Sample, symbols: int) -> Sample:
    """Return ``sample`` with random symbols n1, n2, ... in place of blanks."""
    # A stream of symbols that no answer has: a model cannot tell blanks by their sameness.
    drawn = iter(types("n", symbols)[n] for n in rng.randint(symbols, size=len(sample.inputs)))
    inputs = (next(drawn) if token == BLANK else token for token in sample.inputs)
    return sample._replace(inputs=tuple(inputs))


def generate(recipe: Recipe) -> dict[str, list[Sample]]:
    """Return the samples of every split; equal recipes give equal samples on every machine.

    Raises: UserError if the task has too few different sequences of this size.
    """
    splits = {
        name: (split.samples, sampler(recipe, split)) for name, split in recipe.splits.items()
    }
    return transduction.draw_splits(recipe, splits, lambda sample: sample.inputs)


# ----------------------------------------------------------------------------------------- files


def write_text(recipe: Recipe, folder: Path) -> None:
    """Write ``<split>.input`` and ``.target``, one sample per line, and ``dict.txt``."""
    for split, samples in generate(recipe).items():
        for side, rows in zip(SIDES, zip(*samples, strict=True), strict=True):
            transduction.write_rows(folder / f"{split}.{side}", rows)
    prep.write_lines(folder / "dict.txt", (f"{symbol} 1" for symbol in recipe.vocabulary))


def count(recipe: Recipe, text: Path) -> dict[str, Any]:
    """Count every split.

    ``answers``: the scored tokens. ``longest``: tokens of the longest sample. ``constant``: the
    accuracy of the best constant answer. ``chance``: 1 in the number of possible answers.
    """
    splits = {}
    for split in recipe.splits:
        rows = [[line.split() for line in prep.read_lines(text / f"{split}.{s}")] for s in SIDES]
        lengths = list(map(len, rows[0]))
        answers = Counter(itertools.chain(*rows[1]))
        del answers[PAD]
        splits[split] = {
            "samples": len(lengths),
            "tokens": sum(lengths),
            "longest": max(lengths),
            "answers": answers.total(),
            "constant": round(max(answers.values()) / answers.total(), 4),
        }
    possible = TASKS[recipe.task].answers(recipe.sizes)
    return {"splits": splits, "length": recipe.length, "chance": round(1 / len(possible), 4)}


def prepare(dest: Path, recipe: Recipe) -> dict[str, Any]:
    """Prepare ``dest`` and return its manifest. The binary form has no end of sentence."""
    steps = prep.Steps(dest, recipe.name, recipe.scale)
    numbers = {symbol: n for n, symbol in enumerate(recipe.vocabulary, prep.FAIRSEQ_SPECIALS)}
    numbers[PAD] = PAD_ID
    names = [f"{split}.{side}" for split in recipe.splits for side in SIDES]
    columns = [Column(name, name, lambda row: [numbers[token] for token in row]) for name in names]
    reads = {"script": Path(__file__), "seed": recipe.seed, "fillers": recipe.fillers}
    if recipe.task in retrieval.TASKS:
        reads["hidden facts"] = Path(retrieval.__file__)
    transduction.binarize(
        steps, reads, partial(write_text, recipe), columns, ["dict.txt"], "dict.txt"
    )
    return steps.finish(lambda: count(recipe, dest / "text"))
