"""Calls of flash attention for tests: inputs of every form, on any device and in any dtype."""

import torch

from lrpe_fairseq.kernels.flash import flash

ARGUMENTS = ("q", "k", "v", "table", "c", "d", "by_query", "by_key")
"""What may need a gradient; c and d are the sums of gates of queries and keys."""


def stored(x):
    """x (B, T, ...), in half types in the order (T, B, ...) of memory, as in fairseq's layers."""
    return x if x.dtype == torch.float32 else x.transpose(0, 1).contiguous().transpose(0, 1)


def inputs(
    T=70, S=None, D=16, E=16, B=2, H=2, dtype=torch.float32, device="cpu", causal=True,
    table=False, decays="", gates=False, by_query=0, by_key=0, padding=False, documents=0,
    **others,
):  # fmt: skip
    """Return tensors by the names of ARGUMENTS, and the other arguments of attention.

    table, gates, padding: whether they are given. decays: their names. by_query, by_key: numbers
    of lags.
    documents: tokens per packed document. far: the table is constant from this lag on, both ways.
    Documents of the last sequence have other borders, and an order that does not ascend.
    """
    torch.manual_seed(0)
    S = S or T
    rows = ((T, D), (S, D), (S, E))
    found = {name: torch.randn(B, t, H, w) for name, (t, w) in zip("qkv", rows, strict=True)}
    found = {name: stored(x.to(dtype)).transpose(1, 2) for name, x in found.items()}
    options = {"causal": causal, "scale": 0.3, "first_lag": 1 - max(T, S), **others}
    lags = 2 * max(T, S) - 1
    if table:
        columns = torch.arange(lags)
        if others.get("far"):
            columns = (columns + options["first_lag"]).clamp(-others["far"], others["far"])
            columns = (columns - options["first_lag"]).clamp(0, lags - 1)
        found["table"] = torch.randn(H, lags)[:, columns]
    options |= {name: -torch.rand(H, device=device) / 8 for name in decays.split()}
    if gates:
        sums = (-torch.rand(B, H, S, dtype=torch.float64) / 5).cumsum(2)
        found |= {"c": sums[..., S - T :].clone(), "d": sums}
    sides = {"by_query": (T, by_query), "by_key": (S, by_key)}
    found |= {n: torch.randn(B, H, t, lags).to(dtype) for n, (t, lags) in sides.items() if lags}
    if padding:
        hidden = torch.zeros(B, S, dtype=torch.bool)
        hidden[0, : S // 8] = hidden[-1, S // 2 :] = True
        options["padding"] = hidden.to(device)
    if documents:
        number = (torch.arange(S) // documents).int().repeat(B, 1)
        number[-1] = number[-1].flip(0)
        options["segments"] = number[:, S - T :].to(device), number.to(device)
    if others.get("dropout"):
        options["seed"] = torch.tensor([2**40 + 7], device=device)
    return {name: x.to(device) for name, x in found.items()}, options


def results(attention, tensors, options, weights=None):
    """Return the output and the gradients of a weighted sum of it, by name."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
    given = dict(leaves)
    gates = (given.pop("c"), given.pop("d")) if "c" in given else None
    rows = [given.pop(name) for name in "qkv"]
    out = attention(*rows, gates=gates, **given, **options)
    if weights is None:
        weights = torch.arange(out.numel(), device=out.device).cos().view_as(out)
    grads = torch.autograd.grad(out, list(leaves.values()), weights.to(out.dtype))
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


def exact(tensors, options):
    """Return the results of the definition in float64."""
    return results(flash.definition, {n: x.double() for n, x in tensors.items()}, options)


def assert_near(found, wanted, bound):
    """Compare tensors by their norms; those of ``wanted`` below 1 count as 1."""
    for name, expected in wanted.items():
        assert found[name].isfinite().all(), name
        error = (found[name].double() - expected).norm() / expected.norm().clamp_min(1.0)
        assert error <= bound, f"{name}: {error:.2g} above {bound:.2g}"


CASES = {
    "plain": {"T": 130},
    "full": {"causal": False},
    "table of a text longer than a tile": {"T": 130, "table": True, "B": 1},
    "table, full": {"table": True, "causal": False, "T": 130, "B": 1},
    "far table": {"table": True, "far": 20, "T": 200, "B": 1, "H": 1},
    "far table, full": {
        "table": True, "far": 9, "causal": False, "T": 200, "B": 1, "padding": True,
    },
    "far table of a short text": {"table": True, "far": 300, "T": 130, "B": 1, "H": 1},
    "far table, after a cache": {
        "T": 66, "S": 200, "table": True, "far": 1, "documents": 140, "gates": True, "B": 1,
    },
    "far table, queries without keys": {"T": 200, "S": 70, "table": True, "far": 3, "B": 1},
    "decay": {"decays": "decay", "T": 130, "B": 1},
    "score decay": {"decays": "score_decay"},
    "decays, full": {"decays": "decay score_decay", "causal": False, "T": 130, "B": 1},
    "gates": {"gates": True, "T": 130, "B": 1},
    "gates, full": {"gates": True, "causal": False, "H": 1},
    "padding": {"padding": True, "T": 130},
    "padding, full": {"padding": True, "causal": False, "T": 130},
    "documents": {"documents": 19, "T": 130, "H": 1},
    "documents, full": {"documents": 50, "causal": False, "T": 130},
    "window": {"window": 20, "T": 130, "table": True, "B": 1},
    "by query": {"by_query": 144, "first_lag": 0, "T": 130, "B": 1},
    "by query, full": {"by_query": 259, "causal": False, "T": 130, "B": 1, "H": 1},
    "by key, clipped": {"by_key": 16, "first_lag": 0, "T": 130, "B": 1},
    "by query and key, clipped, full": {
        "by_query": 32, "by_key": 32, "first_lag": -16, "causal": False, "T": 130, "padding": True,
        "dropout": 0.1, "B": 2, "H": 1,
    },
    "by query and key, after a cache": {
        "T": 66, "S": 150, "by_query": 16, "by_key": 16, "first_lag": 9, "documents": 60,
        "window": 50, "D": 40, "E": 24, "B": 2, "H": 1,
    },
    "dropout": {"dropout": 0.3},
    "all, after a cache": {
        "T": 66, "S": 130, "table": True, "decays": "decay score_decay", "gates": True,
        "padding": True, "documents": 40, "window": 90, "dropout": 0.1, "D": 40, "E": 24, "B": 1,
    },
    "all, full": {
        "causal": False, "table": True, "decays": "decay score_decay", "gates": True,
        "padding": True, "documents": 40, "dropout": 0.1, "D": 20, "E": 36, "H": 1,
    },
    "one query": {"T": 1, "S": 70, "table": True, "gates": True},
    "one token": {"T": 1, "table": True, "by_query": 1, "by_key": 1},
    "queries without keys": {"T": 110, "S": 70, "table": True, "B": 1},
    "cross-attention": {"T": 70, "S": 40, "causal": False, "padding": True},
    "wide": {"T": 66, "D": 256, "E": 128, "B": 1, "H": 1, "table": True, "scale": 0.05},
}  # fmt: skip
