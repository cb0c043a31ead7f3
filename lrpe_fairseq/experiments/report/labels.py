"""Placement of labels beside the points of a picture, in pixels.

A label is beside its point, or farther away with a line to it. Of all places of a label the one
with the least cost is chosen: it covers little, its line is short, and it crosses no other line.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

Box = tuple[float, float, float, float]
"""Left, lower, right and upper edge."""
Line = tuple[float, float, float, float]
"""x and y of the start, x and y of the end."""

ANGLES = (0, 6, 1, 11, 5, 7, 3, 9, 2, 4, 8, 10)  # in units of 30 degrees, the best first
OFFSETS = [  # of a label from its point, in points; of equal ones the first is used
    (r * math.cos(a * math.pi / 6), r * math.sin(a * math.pi / 6))
    for r in (9, 16, 26, 38, 52, 70)
    for a in ANGLES
]
ROUNDS = 8  # passes over the labels
MARKER = 7  # distance from the middle of a point at which its line starts
THICKNESS = 6.0  # of a line, for the area that it covers
LABEL = 4.0  # cost of a square pixel of another label that a label covers
LENGTH = 2.0  # cost of a pixel of a line
CROSSING = 1000.0  # cost of a line that crosses another line or a label
OUTSIDE = 1e4  # cost of a pixel beyond the axes


class Obstacle(NamedTuple):
    """What labels and lines should not cover, with the cost of a square pixel."""

    box: Box
    cost: float


class Place(NamedTuple):
    """A possible place of a label: its box, and the line to it from the middle of its point.

    distant: True if the line is drawn; it is not where the label is beside the point.
    """

    box: Box
    line: Line
    distant: bool


def places(width: float, height: float, pixel: tuple[float, float], scale: float) -> list[Place]:
    """Return the possible places of a label of a point at ``pixel``, the best first.

    width, height: of the label. scale: pixels of a typographic point.
    """
    found = []
    for index, (dx, dy) in enumerate(OFFSETS):
        x = pixel[0] + dx * scale + math.copysign(width / 2, round(dx, 6)) * (abs(dx) > 1)
        y = pixel[1] + dy * scale
        line = (*pixel, x, y)
        found.append(Place(around(x, y, width, height), line, index >= len(ANGLES)))
    return found


def arrange(
    choices: Sequence[Sequence[Place]],
    obstacles: Sequence[Obstacle],
    frame: Box,
) -> list[Place]:
    """Choose a place for every label: one after the other, then again while any of them moves.

    choices: the possible places of every label. frame: the axes.
    """
    own = [[_covered(p, obstacles) + _outside(p.box, frame) for p in each] for each in choices]
    chosen: dict[int, int] = {}
    for _ in range(ROUNDS):
        before = dict(chosen)
        for label, each in enumerate(choices):
            others = [choices[k][place] for k, place in chosen.items() if k != label]
            chosen[label] = _cheapest(each, own[label], others)
        if chosen == before:
            break
    return [each[chosen[label]] for label, each in enumerate(choices)]


def _cheapest(choices: Sequence[Place], own: Sequence[float], others: Sequence[Place]) -> int:
    """Return the place of the least cost beside ``others``. own: the costs of each place alone."""
    best, least = 0, math.inf
    for n in sorted(range(len(choices)), key=own.__getitem__):
        if own[n] >= least:
            break
        cost = own[n] + _conflicts(choices[n], others)
        if cost < least:
            best, least = n, cost
    return best


def around(x: float, y: float, width: float, height: float) -> Box:
    """Return the box around (x, y)."""
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def cross(a: Line, b: Line) -> bool:
    """True if two lines cross; one that only touches the other does not."""
    return _parted(a, b) and _parted(b, a)


def _covered(place: Place, obstacles: Iterable[Obstacle]) -> float:
    """Return the cost of what a label and its line cover, and of the length of the line."""
    covered = sum(each.cost * _overlap(place.box, each.box) for each in obstacles)
    if not place.distant:
        return covered
    line = _from_edge(place.line)
    covered += sum(each.cost * _crossed(line, each.box) for each in obstacles)
    return covered + LENGTH * math.dist(line[:2], line[2:])


def _from_edge(line: Line) -> Line:
    """Return the part of a line beyond the marker of its point."""
    x, y, to_x, to_y = line
    share = MARKER / math.dist(line[:2], line[2:])
    return x + share * (to_x - x), y + share * (to_y - y), to_x, to_y


def _conflicts(place: Place, others: Iterable[Place]) -> float:
    """Return the cost of what a label and its line cover of others, and of lines that cross.

    Lines that are not drawn count too, so that labels have the order of their points.
    """
    cost = 0.0
    for other in others:
        crossings = cross(place.line, other.line)
        crossings += place.distant and _crossed(place.line, other.box) > 0
        crossings += other.distant and _crossed(other.line, place.box) > 0
        cost += LABEL * _overlap(place.box, other.box) + CROSSING * crossings
    return cost


def _crossed(line: Line, box: Box) -> float:
    """Return the area of a box that a line covers."""
    x, y, to_x, to_y = line
    first, last = 0.0, 1.0  # the part of the line within the box
    for start, step, low, high in ((x, to_x - x, box[0], box[2]), (y, to_y - y, box[1], box[3])):
        ends = sorted(((low - start) / (step or 1e-9), (high - start) / (step or 1e-9)))
        first, last = max(first, ends[0]), min(last, ends[1])
    return THICKNESS * math.hypot(to_x - x, to_y - y) * max(0.0, last - first)


def _parted(line: Line, other: Line) -> bool:
    """True if the ends of ``other`` are on different sides of ``line``."""
    x, y, to_x, to_y = line
    sides = [(to_x - x) * (v - y) - (to_y - y) * (u - x) for u, v in (other[:2], other[2:])]
    return sides[0] * sides[1] < 0


def _overlap(a: Box, b: Box) -> float:
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    return width * height if width > 0 and height > 0 else 0.0


def _outside(box: Box, frame: Box) -> float:
    beyond = [frame[0] - box[0], frame[1] - box[1], box[2] - frame[2], box[3] - frame[3]]
    return OUTSIDE * sum(max(0.0, pixels) for pixels in beyond)
