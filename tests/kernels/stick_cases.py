"""Calls of stick-breaking attention for tests, and its definition."""

from functools import partial

from lrpe_fairseq.encodings import build_encoding
from lrpe_fairseq.kernels.flash import flash
from tests.kernels import flash_cases

WEIGH = build_encoding("stick-breaking", 16, 2, causal=True).weigh


def inputs(size=None, near=None, **form):
    """Return tensors and arguments as ``flash_cases.inputs``.

    size: the largest |z|. near: what is added to all z.
    """
    tensors, options = flash_cases.inputs(**form)
    options = {name: x for name, x in options.items() if name not in ("causal", "first_lag")}
    q, k = tensors["q"], tensors["k"]
    if size:
        options["scale"] = size / (q.double() @ k.double().mT).abs().max().item()
    if near:
        q[..., 0], k[..., 0] = near / options["scale"], 1.0
    return tensors, options


def definition(q, k, v, *, scale, padding=None, segments=None, window=None, dropout=0.0, seed=None):
    """Compute the attention with all weights in memory."""
    seen = flash.visible(flash.lags(q, k, True), True, padding, segments, window)
    weights = WEIGH(q @ k.mT * scale, seen, q.dtype)
    return flash.dropped(weights, dropout, seed) @ v


def results(attention, tensors, options, weights=None):
    """Return the output and the gradients of a weighted sum of it, by name."""
    without_gates = partial(_without_gates, attention)
    return flash_cases.results(without_gates, tensors, options, weights)


def _without_gates(attention, *given, gates, **options):
    return attention(*given, **options)


def exact(tensors, options):
    """Return the results of the definition in float64."""
    return results(definition, {n: x.double() for n, x in tensors.items()}, options)


CASES = {
    "plain": {"T": 130},
    "large scores": {"size": 60.0, "D": 64},
    "a long reach": {"near": -6.0, "T": 130, "B": 1},
    "a reach of a few keys": {"near": 8.0, "T": 130, "B": 1},
    "padding": {"padding": True, "T": 130},
    "documents": {"documents": 19, "T": 130, "near": -3.0},
    "window": {"window": 20, "T": 130, "near": -6.0},
    "window of the own key": {"window": 1},
    "dropout": {"dropout": 0.3},
    "all, after a cache": {
        "T": 66, "S": 130, "padding": True, "documents": 40, "window": 90, "dropout": 0.1,
        "D": 40, "E": 24,
    },
    "one query": {"T": 1, "S": 70},
    "one token": {"T": 1},
    "queries without keys": {"T": 110, "S": 70},
    "wide": {"T": 66, "D": 128, "E": 128, "B": 1, "H": 1, "scale": 0.1},
}  # fmt: skip
