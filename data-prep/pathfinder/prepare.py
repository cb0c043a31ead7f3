"""Generate Pathfinder for fairseq: are two markers at the ends of one dashed path, or of two?

    python data-prep/pathfinder/prepare.py --dest data/pathfinder16 --size 16

Our own code after the published algorithm (Linsley et al., 2018), with the parameters that the
Long-Range Arena used for 32 x 32 pixels. The images are not those of its release. See the README in
this folder for the rules and the sizes.

Axes: y rows, x columns; a point is (y, x) in pixels, a direction an angle in radians.
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.data import examples
from lrpe_fairseq.experiments.data.examples import BYTES, Examples
from lrpe_fairseq.experiments.records.console import UserError, command

LENGTH = 2.0  # of a paddle, in pixels
THICKNESS = 0.5  # of a paddle
MARGIN = 1.0  # the gap around a paddle
PADDING = 1  # pixels at the border of the window without a path
CONTINUITY = 1.0  # larger: paths turn less
TARGET = 1.5  # contrast of the two paths
DISTRACTOR = 2.0  # contrast of the other paths
MARKER = 1.0
RADIUS = 1.5  # of a marker
OVERLAP = 1.8  # the sum of two masks stays below
FREE = 0.01  # distractors end when a smaller part of the window is free
TRIES = 3  # for the next paddle of a path
SNAKE_TRIES = 5  # for a distractor
SAMPLES = 4  # per pixel and axis, for the coverage of a paddle

Point = tuple[float, float]


class Stuck(Exception):
    """A path cannot be continued."""


@dataclass(frozen=True)
class Recipe:
    """The size of the images.

    side: of the window. paddles: of a target path. apart: distance of the starts of the two paths.
    distractors: their number; each has a third of the paddles of a path. sizes: split -> images.
    """

    side: int
    paddles: int
    apart: float
    distractors: int
    sizes: dict[str, int] = field(
        default_factory=lambda: {"train": 10_000, "valid": 1_000, "test": 1_000}
    )


RECIPES = {
    16: Recipe(16, 4, 3.0, 3),
    32: Recipe(32, 14, 7.0, 5),  # LRA's hard set: 20 // (14 // 3) distractors
}


@dataclass
class Snake:
    """A path: its first tail, its last head and direction, and its mask (side, side)."""

    tail: Point
    head: Point
    angle: float
    mask: np.ndarray


@dataclass(frozen=True)
class Scene:
    """An image and how it was made: the two paths, the marked points, and the class."""

    pixels: np.ndarray
    paths: tuple[Snake, Snake]
    marked: tuple[Point, Point]
    label: int


def scene(recipe: Recipe, rng: np.random.RandomState) -> Scene:
    """Draw an image, uint8 (side, side); label 1 if both markers are on one path."""
    label = int(rng.randint(2))
    paths = None
    while paths is None:
        try:
            paths = _pair(recipe, rng)
        except Stuck:
            continue
    image = TARGET * np.maximum(paths[0].mask, paths[1].mask)
    image = np.maximum(image, DISTRACTOR * _distractors(recipe, rng, paths))
    first = int(rng.randint(2))
    # the tail of a path and the head of the same one or of the other
    marked = paths[first].tail, paths[first if label else 1 - first].head
    for point in marked:
        image = np.maximum(image, MARKER * _disc(recipe.side, point, RADIUS))
    pixels = np.rint(255 * image / image.max()).astype(np.uint8)
    return Scene(pixels, paths, marked, label)


# --- paths -------------------------------------------------------------------------------------


def _pair(recipe: Recipe, rng: np.random.RandomState) -> tuple[Snake, Snake]:
    """Draw two paths whose masks nowhere add up to OVERLAP. Raises: Stuck."""
    side = recipe.side
    border = 2 * int(recipe.apart)
    # far from the border, so that both paths have room to grow
    inner = np.zeros((side, side))
    inner[border : side - border, border : side - border] = 1
    first = _seed(side, _place(inner, rng), _direction(rng))
    turn = 2 * math.pi * rng.random_sample()
    second = _seed(side, _moved(first.tail, turn, recipe.apart), _direction(rng))
    common = first.mask + second.mask
    if common.max() >= OVERLAP:
        raise Stuck
    paths = (first, second)
    seen = common  # without the last paddle, see _step
    for number in range(2 * (recipe.paddles - 1)):
        paddle = _step(side, paths[number % 2], common, seen, rng)
        seen = common
        common = common + paddle
    _require_distinct(paths)
    return paths


def _require_distinct(paths: Sequence[Snake]) -> None:
    """Raise Stuck if a marker at one tip would touch another tip: the label would be unclear.

    The published algorithm has no such rule. The two starts have their own distance.
    """
    first, second = paths
    tips_of_markers = (
        (first.head, first.tail),
        (second.head, second.tail),
        (first.head, second.head),
        (first.head, second.tail),
        (second.head, first.tail),
    )
    if any(math.dist(one, other) < 2 * RADIUS for one, other in tips_of_markers):
        raise Stuck


def _distractors(recipe: Recipe, rng: np.random.RandomState, paths: Sequence[Snake]) -> np.ndarray:
    """Return the masks of the distractors, combined: (side, side)."""
    common = paths[0].mask + paths[1].mask
    drawn = np.zeros_like(common)
    for _ in range(recipe.distractors):
        for _ in range(SNAKE_TRIES):
            free = _free(common)
            # a full window: fewer distractors than asked for
            if free.mean() < FREE:
                return drawn
            try:
                snake = _snake(recipe, free, common, rng)
            except Stuck:
                continue
            common = common + snake
            drawn = np.maximum(drawn, snake)
            break
    return drawn


def _snake(
    recipe: Recipe, free: np.ndarray, common: np.ndarray, rng: np.random.RandomState
) -> np.ndarray:
    """Draw a distractor and return its mask. Raises: Stuck."""
    path = _seed(recipe.side, _place(free, rng), _direction(rng))
    if (common + path.mask).max() >= OVERLAP:
        raise Stuck
    seen = common
    whole = common + path.mask
    # a third of a path's paddles, the first of which is drawn
    for _ in range(recipe.paddles // 3 - 1):
        paddle = _step(recipe.side, path, whole, seen, rng)
        seen = whole
        whole = whole + paddle
    return path.mask


def _seed(side: int, tail: Point, angle: float) -> Snake:
    """Return a path of one paddle. Raises: Stuck if it leaves the window."""
    head = _moved(tail, angle, LENGTH)
    if not (_inside(side, tail) and _inside(side, head)):
        raise Stuck
    return Snake(tail, head, angle, _paddle(side, tail, head))


def _step(
    side: int, path: Snake, common: np.ndarray, seen: np.ndarray, rng: np.random.RandomState
) -> np.ndarray:
    """Continue ``path`` by a paddle and return its mask.

    The next head is a pixel on a circle around the end of the gap, more likely the less the path
    turns and the freer the pixel is. common: the mask of all paddles, which the paddle must not
    overlap. seen: without the last one, from which a paddle starts.

    Raises: Stuck after three tries.
    """
    pivot = _moved(path.head, path.angle, MARGIN)
    places, weights = _candidates(side, pivot, path.angle, _free(seen))
    for _ in range(TRIES):
        # no pixel on the circle is free and ahead
        if weights.sum() <= 0:
            raise Stuck
        chosen = _draw(weights, rng)
        head = (float(places[chosen][0]), float(places[chosen][1]))
        angle = math.atan2(head[0] - pivot[0], head[1] - pivot[1])
        paddle = _paddle(side, _moved(head, angle, -LENGTH), head)
        if (common + paddle).max() < OVERLAP:
            path.head = head
            path.angle = angle
            path.mask = np.maximum(path.mask, paddle)
            return paddle
    raise Stuck


@functools.cache
def _turns() -> np.ndarray:
    """Return points of the unit circle, (2, 64)."""
    turns = np.linspace(0, 2 * math.pi, 64, endpoint=False)
    return np.stack([np.sin(turns), np.cos(turns)])


def _candidates(
    side: int, pivot: Point, angle: float, free: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the pixels (N, 2) on the circle around ``pivot``, and their weights (N,)."""
    circle = np.rint(np.array(pivot)[:, None] + (LENGTH + MARGIN) * _turns()).astype(int)
    y, x = circle[:, ((circle >= PADDING) & (circle < side - PADDING)).all(0)]
    y, x = np.divmod(np.unique(y * side + x), side)  # a pixel counts once
    # how much the path turns toward each pixel, from 0 to pi
    toward = np.arctan2(y - pivot[0], x - pivot[1]) - angle
    turn = np.abs((toward + math.pi) % (2 * math.pi) - math.pi)
    weights = np.cos(np.minimum(CONTINUITY * turn, math.pi / 2)) ** 2
    return np.stack([y, x], 1), np.where(weights > 1e-9, weights, 0) * free[y, x]


# --- drawing -----------------------------------------------------------------------------------


@functools.cache
def _grid(start: int, end: int, samples: int) -> np.ndarray:
    """Return the sample points of the pixels start .. end - 1; pixel n is n - 0.5 to n + 0.5."""
    return start + (np.arange((end - start) * samples) + 0.5) / samples - 0.5


def _paddle(side: int, tail: Point, head: Point) -> np.ndarray:
    """Return the coverage of a paddle by pixel, stretched to a maximum of 1: (side, side)."""
    mask = np.zeros((side, side))
    box = []
    for one, other in zip(tail, head, strict=True):
        start = math.floor(min(one, other)) - 1
        end = math.ceil(max(one, other)) + 2
        box.append((max(start, 0), min(end, side)))
    y, x = (_grid(*ends, SAMPLES) - start for ends, start in zip(box, tail, strict=True))
    dy = head[0] - tail[0]
    dx = head[1] - tail[1]
    # every sample's nearest place on the line, as a share of its length
    along = np.clip((y[:, None] * dy + x * dx) / (dy * dy + dx * dx), 0, 1)
    away = (y[:, None] - along * dy) ** 2 + (x - along * dx) ** 2
    # the share of the samples of a pixel that are near the line from tail to head
    shape = (len(y) // SAMPLES, SAMPLES, len(x) // SAMPLES, SAMPLES)
    covered = (away <= (THICKNESS / 2) ** 2).reshape(shape).mean((1, 3))
    mask[slice(*box[0]), slice(*box[1])] = covered / max(covered.max(), 1 / SAMPLES**2)
    return mask


def _disc(side: int, center: Point, radius: float) -> np.ndarray:
    """Return a mask of the pixels within ``radius`` of ``center``: (side, side)."""
    line = np.arange(side)
    away = (line[:, None] - center[0]) ** 2 + (line - center[1]) ** 2
    return (away <= radius**2).astype(float)


def _free(mask: np.ndarray) -> np.ndarray:
    """Return 1 - the mask, dilated by MARGIN and clipped; 0 in the padding: (side, side)."""
    wide = np.pad(mask, 1)
    near = [wide[1:-1, 1:-1], wide[:-2, 1:-1], wide[2:, 1:-1], wide[1:-1, :-2], wide[1:-1, 2:]]
    free = np.zeros_like(mask)
    inner = slice(PADDING, len(mask) - PADDING)
    free[inner, inner] = 1 - np.minimum(np.max(near, 0), 1)[inner, inner]
    return free


def _place(weights: np.ndarray, rng: np.random.RandomState) -> Point:
    """Draw a pixel among those with a weight of 1."""
    places = np.argwhere(weights >= 1)
    if not len(places):
        raise Stuck
    y, x = places[rng.randint(len(places))]
    return float(y), float(x)


def _draw(weights: np.ndarray, rng: np.random.RandomState) -> int:
    """Draw an index in proportion to ``weights``."""
    ends = np.cumsum(weights)
    return int(np.searchsorted(ends, rng.random_sample() * ends[-1], side="right"))


def _direction(rng: np.random.RandomState) -> float:
    return math.radians(rng.randint(360))


def _moved(point: Point, angle: float, distance: float) -> Point:
    return point[0] + distance * math.sin(angle), point[1] + distance * math.cos(angle)


def _inside(side: int, point: Point) -> bool:
    return all(PADDING <= value <= side - 1 - PADDING for value in point)


# --- data --------------------------------------------------------------------------------------


def generate(recipe: Recipe, seed: int) -> dict[str, Examples]:
    """Return the images of every split. Each one depends on seed, split and number only."""
    by_split = {}
    for part, (split, count) in enumerate(recipe.sizes.items()):
        made = [scene(recipe, np.random.RandomState([seed, part, n])) for n in range(count)]
        images = [one.pixels.tobytes() for one in made]
        by_split[split] = Examples(images, [one.label for one in made])
    return by_split


def prepare(dest: Path, recipe: Recipe, seed: int = 1) -> dict:
    """Prepare ``dest`` with generated images and return its manifest."""
    other = recipe.paddles != RECIPES[recipe.side].paddles
    level = f"{recipe.side}x{recipe.side}" + f"-contour{recipe.paddles}" * other
    steps = prep.Steps(dest, "pathfinder", level)
    reads = {"script": Path(__file__), "seed": seed, "recipe": str(recipe)}
    make = functools.partial(generate, recipe, seed)
    return examples.prepare(steps, reads, make, symbols=BYTES, classes=2)


@command("data-prep/pathfinder/prepare.py")
def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and generate the images."""
    parser = prep.parser(__doc__)
    parser.add_argument(
        "--size", type=int, default=16, choices=list(RECIPES), help="pixels in a row"
    )
    parser.add_argument("--contour", type=int, help="paddles of a path (default: 4, or 14 of 32)")
    parser.add_argument(
        "--images",
        type=int,
        default=RECIPES[16].sizes["train"],
        help="of training; a tenth as many for validation and for the test each",
    )
    parser.add_argument("--seed", type=int, default=1, help="of the images")
    options = parser.parse_args(argv)
    if options.seed < 0 or options.images < 10 or (options.contour or 3) < 3:
        raise UserError(
            "--seed must not be negative, --images at least 10 and --contour at least 3."
        )
    recipe = RECIPES[options.size]
    tenth = options.images // 10
    sizes = {"train": options.images, "valid": tenth, "test": tenth}
    recipe = dataclasses.replace(recipe, paddles=options.contour or recipe.paddles, sizes=sizes)
    prep.say(f"Pathfinder, {options.size} x {options.size} pixels -> {options.dest}")
    prepare(options.dest, recipe, options.seed)


if __name__ == "__main__":
    sys.exit(main())
