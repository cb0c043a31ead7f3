"""Nodes of k-ary trees as int64 codes in bijective base k.

The root is 0 and child b (0 <= b < k) of node n is k n + b + 1. Every non-negative int64 is a node,
deeper nodes have larger codes, and 0, 1, 2, ... enumerates the complete tree breadth-first. With
k = 1 the code is the depth, and the tree is a sequence.
"""

from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

LARGEST = 2**63 - 1
"""The largest int64 code."""


def max_depth(k: int) -> int:
    """Return the depth down to which all nodes have an int64 code: 62 for k = 2, 15 for k = 16.

    For k > 1 some nodes one step deeper have a code, too.
    """
    if k == 1:
        return LARGEST
    depth, last = 0, 0
    while k * last + k <= LARGEST:
        depth, last = depth + 1, k * last + k
    return depth


def child(node: int, branch: int, k: int) -> int:
    """Return the code of child ``branch`` of ``node``.

    Raises: ValueError for a branch that the tree does not have, or a child without an int64 code.

    >>> child(child(0, 1, 2), 0, 2)
    5
    """
    if not 0 <= branch < k:
        raise ValueError(f"a node has the branches 0 to {k - 1}, got {branch}")
    code = k * node + branch + 1
    if code > LARGEST:
        raise ValueError(_too_deep(k))
    return code


def parent(codes: Tensor, k: int) -> Tensor:
    """Return the parents of int64 ``codes``, any shape; the root is its own parent."""
    return torch.where(codes > 0, (codes - 1).div(k, rounding_mode="floor"), codes)


def branch(codes: Tensor, k: int) -> Tensor:
    """Return which child of its parent each node is, 0 to k - 1; meaningless for the root."""
    return (codes - 1) % k


def depth(codes: Tensor, k: int) -> Tensor:
    """Return the number of steps from the root to each of ``codes``, int64."""
    if k == 1:
        return codes
    total = torch.zeros_like(codes)
    for _ in range(max_depth(k) + 1):
        total += codes > 0
        codes = parent(codes, k)
    return total


def concat(node: Tensor, path: Tensor, k: int) -> Tensor:
    """Return the node that is reached by the steps of ``path`` from ``node``.

    Both are int64 and broadcast. Raises: ValueError if a result is deeper than ``max_depth(k)``.

    >>> concat(torch.tensor(1), torch.tensor([0, 1, 2]), 2)  # a node and its two children
    tensor([1, 3, 4])
    """
    if k == 1:
        return node + path
    steps = depth(path, k)
    if (depth(node, k) + steps > max_depth(k)).any():
        raise ValueError(_too_deep(k))
    return node * (torch.full_like(steps, k) ** steps) + path


def tree_distance(one: Tensor, other: Tensor, k: int) -> Tensor:
    """Return the number of steps between the nodes ``one`` and ``other``, which broadcast."""
    if k == 1:
        return (one - other).abs()
    low = torch.minimum(one, other)
    high = torch.maximum(one, other)
    steps = torch.zeros_like(low)
    for _ in range(2 * max_depth(k) + 2):  # the larger code is not higher up in the tree
        steps += low != high
        step = torch.where(low == high, high, parent(high, k))
        low, high = torch.minimum(low, step), torch.maximum(low, step)
    return steps


def codes_from_arities(arities: Iterable[int], k: int, order: str) -> list[int]:
    """Return the codes of the nodes of a tree that is written as a sequence of nodes.

    Nodes after the end of the tree get code 0.

    Args:
        arities: the number of children of each node. Those of a node are branches 0, 1, ...
        order: "breadth" (level by level) or "depth" (a node before its children).
    Raises: ValueError for an unknown order, a node with more than k children or too deep a tree.

    >>> codes_from_arities([2, 2, 0, 0, 0], 2, "depth")
    [0, 1, 3, 4, 2]
    """
    if order not in ("breadth", "depth"):
        raise ValueError(f"unknown order of nodes {order!r}; choose one of breadth, depth")
    codes = []
    pending = deque([0])
    for arity in arities:
        if arity > k:
            raise ValueError(f"a node has {arity} children, but the tree has {k} branches")
        node = pending.popleft() if pending else None
        children = [] if node is None else [child(node, b, k) for b in range(arity)]
        if order == "breadth":
            pending.extend(children)
        else:
            pending.extendleft(reversed(children))
        codes.append(node or 0)
    return codes


def _too_deep(k: int) -> str:
    return (
        f"the tree is too deep: with {k} branches int64 codes reach down to depth {max_depth(k)}; "
        "choose fewer branches or cut the tree"
    )
