"""Products of generators along the paths of a k-ary tree: M(w_1 ... w_n) = W_(w_1) ... W_(w_n).

One product is computed for each distinct node instead of one per step and token. Nodes are int64
codes (``domains``).

Axes: B batch, H heads, T time, D width, N distinct nodes and their ancestors, K vectors that share
the nodes, M nodes of the vectors.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lrpe_fairseq.encodings import domains
from lrpe_fairseq.encodings.base import PositionCache
from lrpe_fairseq.kernels.dispatch import gradients_of, has_values, is_plain

ENTRIES = 1 << 22
"""Entries (M, H, D, D) of one step of the application of products to vectors; bounds its memory."""


class Level(NamedTuple):
    """Nodes of one depth, which are consecutive among the distinct nodes.

    own: their slice of N. parents: indices of their parents among N. branches: 0 to k - 1.
    """

    own: slice
    parents: Tensor
    branches: Tensor


class Paths(NamedTuple):
    """The distinct nodes of some positions and their ancestors, in the order of their depth."""

    count: int  # N
    levels: list[Level]  # without the root, which is node 0
    index: Tensor  # of each position among the N nodes, in the shape of the positions


def paths(positions: Tensor, k: int) -> Paths:
    """Return the distinct nodes of ``positions`` (int64 codes) and how they follow each other.

    Raises: ValueError for a negative position.
    """
    nodes = _with_ancestors(domains.check_nodes(positions), k)
    parents = torch.searchsorted(nodes, domains.parent(nodes, k))
    branches, found = domains.branch(nodes, k), []
    sizes = torch.unique_consecutive(domains.depth(nodes, k), return_counts=True)[1].tolist()
    first = 0
    for size in sizes:
        own = slice(first, first + size)
        found.append(Level(own, parents[own], branches[own]))
        first += size
    return Paths(len(nodes), found[1:], torch.searchsorted(nodes, positions.contiguous()))


def _with_ancestors(positions: Tensor, k: int) -> Tensor:
    """Return the distinct nodes of ``positions`` and all their ancestors (N,), ascending."""
    frontier = torch.cat([positions.new_zeros(1), positions.flatten()]).unique()
    found = [frontier]
    while len(frontier) > 1:  # the root is always one of them
        frontier = domains.parent(frontier, k).unique()
        found.append(frontier)
    return torch.cat(found).unique()


def products(steps: Tensor, given: Paths) -> Tensor:
    """Return M of every node, (N, H, D, D), level by level from ``steps`` W (k, H, D, D)."""
    table = steps.new_empty(given.count, *steps.shape[1:])
    table[0] = torch.eye(steps.shape[-1], dtype=steps.dtype, device=steps.device)
    for level in given.levels:
        table[level.own] = table[level.parents] @ steps[level.branches]
    return table


class TreeCache:
    """A cache of the products for two sets of positions, of a source and of a target, and one W.

    Positions are compared by identity and W by value; see ``PositionCache`` and ``Spectrum``.
    """

    def __init__(self) -> None:
        self._paths, self._entries = PositionCache(2), ()

    def of(self, steps: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Paths, Tensor]:
        """Return the paths of ``positions`` and the products (N, H, D, D) in ``dtype``."""
        k = len(steps)
        given = self._paths.get(positions, k, lambda: paths(positions, k))
        for entry in self._entries:
            if entry[:2] == (id(given), dtype) and _equal(entry[3], steps):
                return entry[2], entry[4]
        with torch.inference_mode(False), torch.no_grad():
            own = steps.detach().clone()
            table = products(own, given).to(dtype)
        self._entries = ((id(given), dtype, given, own, table), *self._entries[:1])
        return given, table

    def __deepcopy__(self, memo: dict) -> "TreeCache":
        return TreeCache()

    def __reduce__(self) -> tuple:
        return TreeCache, ()


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.device == other.device and torch.equal(one, other)


def tree_turn(x: Tensor, steps: Tensor, positions: Tensor, cache: TreeCache) -> Tensor:
    """Apply M of the node of each vector to it.

    Args:
        x: (B, H, T, D), float32 or float64. steps: W, float64 (k, H, D, D).
        positions: int64 codes, (T,) or (B, T).
    Returns: (B, H, T, D) in the dtype of x.
    Raises: ValueError for a negative position.
    """
    if not (is_plain(x, steps) and has_values(positions)):
        return definition(x, steps, positions)
    return _TreeTurn.apply(x, steps, positions, *cache.of(steps, positions, x.dtype))


def definition(x: Tensor, steps: Tensor, positions: Tensor) -> Tensor:
    """Compute :func:`tree_turn` one step at a time, from the node up to the root.

    Ordinary differentiable operations without a table of products: as many products of x by every
    W as the tree is deep.
    """
    k, codes = len(steps), positions
    own = steps.to(x.dtype)
    for _ in range(_depth(codes, k)):
        step = domains.branch(codes, k).where(codes > 0, torch.full_like(codes, -1))
        step = (step if codes.dim() == 1 else step.unsqueeze(1)).unsqueeze(-1)
        turned = x
        for b in range(k):
            turned = torch.where(step == b, torch.einsum("hij,bhtj->bhti", own[b], x), turned)
        x, codes = turned, domains.parent(codes, k)
    return x


def _depth(codes: Tensor, k: int) -> int:
    """Return the depth of the deepest node, or that of all int64 codes if values are not known."""
    if not has_values(codes):
        return domains.levels(k)
    return int(domains.depth(codes, k).max()) if codes.numel() else 0


class _TreeTurn(torch.autograd.Function):
    """:func:`tree_turn` from the table of products, without storing one matrix per token."""

    @staticmethod
    def forward(ctx, x, steps, positions, given, table):
        ctx.given = given
        ctx.save_for_backward(x, steps, positions, table)
        vectors = _by_node(x, given)
        out = torch.empty_like(vectors)
        for part, index in _pieces(given, table):
            out[part] = vectors[part] @ table[index].mT
        return _by_token(out, x.shape, given)

    @staticmethod
    def backward(ctx, grad):
        x, steps, positions, table = ctx.saved_tensors
        needs, given = ctx.needs_input_grad, ctx.given
        if torch.is_grad_enabled():
            grads = gradients_of(definition, (x, steps, positions), needs[:3], (grad,))
            return *grads, None, None
        grads, vectors = _by_node(grad, given), _by_node(x, given)
        grad_x = torch.empty_like(vectors) if needs[0] else None
        grad_table = torch.zeros_like(table) if needs[1] else None
        for part, index in _pieces(given, table):
            if grad_x is not None:
                grad_x[part] = grads[part] @ table[index]
            if grad_table is not None:
                grad_table.index_add_(0, index, grads[part].mT @ vectors[part])
        grad_x = None if grad_x is None else _by_token(grad_x, x.shape, given)
        if grad_table is None:
            return grad_x, None, None, None, None
        return grad_x, _gradient_of_steps(grad_table, steps, table, given), None, None, None


def _gradient_of_steps(grad_table: Tensor, steps: Tensor, table: Tensor, given: Paths) -> Tensor:
    """Return the gradient of W (k, H, D, D) from that of the products (N, H, D, D)."""
    grads, table = grad_table.to(steps.dtype), table.to(steps.dtype)
    grad_steps = torch.zeros_like(steps)
    for level in reversed(given.levels):
        own = grads[level.own]
        grads.index_add_(0, level.parents, own @ steps[level.branches].mT)
        grad_steps.index_add_(0, level.branches, table[level.parents].mT @ own)
    return grad_steps


def _pieces(given: Paths, table: Tensor) -> list[tuple[slice, Tensor]]:
    """Return slices of the M nodes of the vectors and the indices of these among the N nodes."""
    index = given.index.flatten()
    size = max(1, ENTRIES // table[0].numel())
    starts = range(0, len(index), size)
    return [(slice(first, first + size), index[first : first + size]) for first in starts]


def _by_node(x: Tensor, given: Paths) -> Tensor:
    """(B, H, T, D) -> (M, H, K, D): M = T and K = B, or M = B T and K = 1 for positions (B, T)."""
    if given.index.dim() == 1:
        return x.permute(2, 1, 0, 3).contiguous()
    return x.transpose(1, 2).flatten(0, 1).unsqueeze(2)


def _by_token(x: Tensor, shape: torch.Size, given: Paths) -> Tensor:
    """Invert :func:`_by_node`; ``shape`` is (B, H, T, D)."""
    if given.index.dim() == 1:
        return x.permute(2, 1, 0, 3)
    return x.squeeze(2).unflatten(0, (shape[0], shape[2])).transpose(1, 2)
