"""Random binary trees, their transformations, and the positions of their nodes.

The position of a node is an int64 code in bijective base 2: the root is 0, and child b (0 or 1) of
node n is 2 n + b + 1. Where the text of "Algebraic Positional Encodings" leaves sizes and rules
open, they are those of its published code; see data-prep/algebraic/README.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from numpy.random import RandomState


@dataclass(frozen=True)
class Tree:
    """A node with its label and either no child (a leaf) or two (an operator)."""

    label: str
    children: tuple[Tree, ...] = ()

    def __str__(self) -> str:
        """Return the tree as a term, such as ``o1(l1, l2)``."""
        return (
            f"{self.label}({', '.join(map(str, self.children))})" if self.children else self.label
        )


def below(rng: RandomState, bound: int) -> int:
    """Return a uniform integer in 0 .. bound - 1. ``randint`` takes longer for one number."""
    return int(rng.random_sample() * bound)


# ---------------------------------------------------------------------------------------- shapes


def random_shape(rng: RandomState, depth: int) -> Tree:
    """Draw a tree without labels whose longest path has exactly ``depth`` edges.

    One child has depth - 1. The other has a depth uniform on 0 .. depth - 1; if that draw is
    depth - 1, it is repeated once. Sides are random. ``expected_nodes`` gives the mean size.
    """
    if depth == 0:
        return Tree("")
    other = below(rng, depth)
    other = below(rng, depth) if other == depth - 1 else other
    children = (random_shape(rng, depth - 1), random_shape(rng, other))
    return Tree("", children if below(rng, 2) else children[::-1])


def expected_nodes(depth: int) -> float:
    """Return the mean number of nodes of :func:`random_shape`, from its recurrence."""
    means = [1.0]
    for d in range(1, depth + 1):
        means.append(1 + means[-1] + (sum(means[:-1]) + sum(means) / d) / d)
    return means[depth]


def labeled(shape: Tree, next_leaf: Callable[[], str], next_operator: Callable[[], str]) -> Tree:
    """Return the tree with labels drawn depth-first by the two functions."""
    label = (next_operator if shape.children else next_leaf)()
    return Tree(label, tuple(labeled(c, next_leaf, next_operator) for c in shape.children))


def uniform(rng: RandomState, labels: list[str]) -> Callable[[], str]:
    """Return a function that draws a label, with repetition."""
    return lambda: labels[below(rng, len(labels))]


def distinct(rng: RandomState, labels: list[str]) -> Callable[[], str]:
    """Return a function that draws a label without repetition.

    Raises (in the function): StopIteration when no label is left.
    """
    return iter([labels[index] for index in rng.permutation(len(labels))]).__next__


# ----------------------------------------------------------------------------- orders and positions


def child(node: int, branch: int) -> int:
    """Return the code of a child: branch 0 is the left one, 1 the right one."""
    return 2 * node + branch + 1


def breadth_first(tree: Tree) -> Iterator[tuple[Tree, int]]:
    """Yield every node with its code, level by level and from left to right."""
    pending = deque([(tree, 0)])
    while pending:
        node, code = pending.popleft()
        yield node, code
        pending.extend((c, child(code, b)) for b, c in enumerate(node.children))


def depth_first(tree: Tree, code: int = 0) -> Iterator[tuple[Tree, int]]:
    """Yield every node with its code: a node, its left subtree, its right subtree."""
    yield tree, code
    for branch, below in enumerate(tree.children):
        yield from depth_first(below, child(code, branch))


ORDERS = {"breadth": breadth_first, "depth": depth_first}


def depth(tree: Tree) -> int:
    """Return the number of edges of the longest path from the root."""
    return 1 + max(map(depth, tree.children)) if tree.children else 0


# --------------------------------------------------------------------------------- transformations


def rotate(tree: Tree) -> Tree:
    """Rotate every subtree to the right, once, from the root downwards.

    r(p(l, m), x) -> p(rotate l, r(rotate m, rotate x)). A subtree whose left child is a leaf is
    returned unchanged, with everything below it. The paper says "up to a fixpoint"; its published
    code makes this single pass, to which its numbers belong.
    """
    if not tree.children or not tree.children[0].children:
        return tree
    (left, right), (outer, inner) = tree.children, tree.children[0].children
    return Tree(left.label, (rotate(outer), Tree(tree.label, (rotate(inner), rotate(right)))))


def reduce_c3(tree: Tree) -> Tree:
    """Replace every operator over two leaves by their product in the cyclic group of order 3.

    Leaves are ``l1`` (the neutral element), ``l2`` and ``l3``. This is one step of a reduction.
    """
    if not tree.children:
        return tree
    if any(below.children for below in tree.children):
        return Tree(tree.label, tuple(map(reduce_c3, tree.children)))
    exponent = sum(int(leaf.label[1:]) - 1 for leaf in tree.children) % 3
    return Tree(f"l{exponent + 1}")


def flip(tree: Tree) -> Tree:
    """Return the tree with the two children of its root swapped, and nothing below them."""
    return Tree(tree.label, tree.children[::-1])


def truncate(tree: Tree, label: str) -> Tree:
    """Return the tree with the subtree whose root has this label cut down to that root."""
    if tree.label == label:
        return Tree(label)
    return Tree(tree.label, tuple(truncate(below, label) for below in tree.children))
