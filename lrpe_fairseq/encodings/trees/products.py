"""Products of matrices along the paths of a k-ary tree: x -> W_(w_1) ... W_(w_n) x.

All vectors climb to the root together: in each round, those whose node is the same child of its
parent are multiplied by the same W. Nodes are int64 codes (``nodes``).

Axes: B batch, H heads, T time, D width, M nodes of the vectors, K vectors that share a node.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lrpe_fairseq.encodings.core.positions import PositionCache
from lrpe_fairseq.encodings.trees import nodes
from lrpe_fairseq.kernels.conditions import (
    gradients_of,
    gradients_without_autocast,
    is_plain,
    may_read_values,
)
from lrpe_fairseq.kernels.recomputed import RecomputedOperator


class Step(NamedTuple):
    """A step towards the root. branch: 0 to k - 1. nodes: indices among M of those that take it."""

    branch: int
    nodes: Tensor


def steps_to_root(positions: Tensor, k: int) -> list[Step]:
    """Return the steps of ``positions`` (int64 codes, any shape with M entries), deepest first.

    Raises: ValueError for a negative position.
    """
    if (positions < 0).any():
        raise ValueError(
            "the positions in a tree are the codes of its nodes, which are not negative"
        )
    codes = positions.flatten()
    path_steps = []
    while (codes > 0).any():
        branches = nodes.branch(codes, k).masked_fill(codes == 0, -1)
        steps = [Step(b, (branches == b).nonzero().squeeze(1)) for b in range(k)]
        path_steps += [step for step in steps if len(step.nodes)]
        codes = nodes.parent(codes, k)
    return path_steps


def tree_turn(x: Tensor, matrices: Tensor, positions: Tensor, cache: PositionCache) -> Tensor:
    """Multiply each vector by the matrices on the path from the root to its node.

    Args:
        x: (B, H, T, D), float32 or float64. matrices: W, float64 (k, H, D, D).
        positions: int64 codes, (T,) or (B, T). cache: of the steps of these positions.
    Returns: (B, H, T, D) in the dtype of x.
    Raises: ValueError for a negative position.
    """
    if torch.compiler.is_compiling():
        return _turned(x, matrices, positions)[0]
    if not (is_plain(x, matrices) and may_read_values(positions)):
        return definition(x, matrices, positions)
    k = len(matrices)
    steps = cache.get(positions, k, lambda: steps_to_root(positions, k))
    return _TreeTurn.apply(x, matrices, positions, steps)


# A graph of the definition has the products of the deepest tree that a code can name.
_turned = RecomputedOperator(
    "tree_turn",
    "Tensor x, Tensor matrices, Tensor positions",
    lambda x, matrices, positions: [tree_turn(x, matrices, positions, PositionCache())],
    lambda x, matrices, positions: [x.new_empty(x.shape)],
)


def definition(x: Tensor, matrices: Tensor, positions: Tensor) -> Tensor:
    """Compute :func:`tree_turn` one step at a time, from the node up to the root.

    As many products of x by every W as the tree is deep.
    """
    k = len(matrices)
    codes = positions
    branch_matrices = matrices.to(x.dtype)
    deepest = nodes.max_depth(k) + 1
    if may_read_values(codes) and codes.numel():
        deepest = int(nodes.depth(codes, k).max())
    for _ in range(deepest):
        step = nodes.branch(codes, k).where(codes > 0, torch.full_like(codes, -1))
        step = (step if codes.dim() == 1 else step.unsqueeze(1)).unsqueeze(-1)
        turned = x
        for b in range(k):
            turned = torch.where(
                step == b, torch.einsum("hij,bhtj->bhti", branch_matrices[b], x), turned
            )
        x = turned
        codes = nodes.parent(codes, k)
    return x


class _TreeTurn(torch.autograd.Function):
    """:func:`tree_turn`; its gradient computes the vectors at every step again."""

    @staticmethod
    def forward(ctx, x, matrices, positions, steps):
        ctx.steps = steps
        ctx.save_for_backward(x, matrices, positions)
        vectors = _by_node(x, positions)
        for _ in _climb(vectors, matrices.to(x.dtype), steps):
            pass
        return _by_token(vectors, x.shape, positions)

    @staticmethod
    @gradients_without_autocast
    def backward(ctx, grad):
        x, matrices, positions = ctx.saved_tensors
        needs = ctx.needs_input_grad
        if torch.is_grad_enabled():
            inputs = (x, matrices, positions)
            return *gradients_of(definition, inputs, needs[:3], (grad,)), None
        branch_matrices = matrices.to(x.dtype)
        grads = _by_node(grad, positions)
        seen = [*_climb(_by_node(x, positions), branch_matrices, ctx.steps)] if needs[1] else None
        grad_own = torch.zeros_like(branch_matrices) if needs[1] else None
        for branch, taken_by in reversed(ctx.steps):
            chosen = grads[taken_by]
            if needs[1]:
                grad_own[branch].baddbmm_(_by_head(chosen).mT, _by_head(seen.pop()))
            grads[taken_by] = _times(chosen, branch_matrices[branch])
        grad_x = _by_token(grads, x.shape, positions) if needs[0] else None
        return grad_x, grad_own.to(matrices.dtype) if needs[1] else None, None, None


def _climb(vectors: Tensor, matrices: Tensor, steps: list[Step]) -> Iterator[Tensor]:
    """Multiply ``vectors`` (M, K, H, D) in place; yield those that take each step, before it."""
    for branch, taken_by in steps:
        chosen = vectors[taken_by]
        vectors[taken_by] = _times(chosen, matrices[branch].mT)
        yield chosen


def _times(vectors: Tensor, matrix: Tensor) -> Tensor:
    """Return the rows of ``vectors`` (M, K, H, D) times ``matrix`` (H, D, D)."""
    out = torch.empty_like(vectors)
    torch.bmm(_by_head(vectors), matrix, out=_by_head(out))
    return out


def _by_head(vectors: Tensor) -> Tensor:
    """(M, K, H, D) -> (H, M K, D), a view."""
    return vectors.flatten(0, 1).transpose(0, 1)


def _by_node(x: Tensor, positions: Tensor) -> Tensor:
    """(B, H, T, D) -> a copy (M, K, H, D): M = T and K = B, or M = B T and K = 1 for (B, T)."""
    if positions.dim() == 1:
        return x.permute(2, 0, 1, 3).clone(memory_format=torch.contiguous_format)
    return x.transpose(1, 2).flatten(0, 1).unsqueeze(1).clone(memory_format=torch.contiguous_format)


def _by_token(vectors: Tensor, shape: torch.Size, positions: Tensor) -> Tensor:
    """Invert :func:`_by_node`; ``shape`` is (B, H, T, D)."""
    if positions.dim() == 1:
        return vectors.permute(1, 2, 0, 3)
    return vectors.squeeze(1).unflatten(0, (shape[0], shape[2])).transpose(1, 2)
