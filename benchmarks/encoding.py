"""Cost of the encoding in linear attention (phi, P and Lambda) as multiples of a copy."""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.timing import Timing, contest
from benchmarks.training import VARIANTS
from lrpe_fairseq.encodings import (
    ENCODINGS,
    EncodingOptions,
    QueryKeyEncoding,
    build_encoding,
    canonical_name,
    encoding_class,
)
from lrpe_fairseq.kernels.encode import feature_map

PASSES = 5  # over all encodings; the time of an operation depends on where its memory lies
SHAPES = {"cpu": (1, 8, 4096, 64), "cuda": (8, 12, 16384, 128)}  # batch, heads, T, width


def measure(device: str, dtype: torch.dtype, rounds: int) -> list[dict]:
    """Return rows of {encoding, form, seconds, spread, copies, copies_quartiles, copies_backward,
    copies_backward_quartiles}.

    ``form``: "step by step", or "one pass" if supported. ``copies``: time of phi and encoding of
    queries and keys over the time of copying both, in the same rounds; ``copies_backward``: the
    same for the gradient only. ``rounds``: of each of :data:`PASSES` passes.
    """
    shape = (2, *SHAPES[device.split(":")[0]])
    found: dict[tuple[str, str], list[dict[str, Timing]]] = {}
    for _ in range(PASSES):
        pair = [x.requires_grad_() for x in torch.randn(shape, device=device, dtype=dtype)]
        for key, encode in forms(pair[0]).items():
            found.setdefault(key, []).append(contest(contestants(pair, encode), rounds))
    return [_row(*key, passes) for key, passes in found.items()]


def _row(name: str, form: str, passes: list[dict[str, Timing]]) -> dict:
    copy, forward, backward = (
        Timing(tuple(second for timings in passes for second in timings[what].seconds))
        for what in ("copy", "forward", "backward")
    )
    return {
        "encoding": name,
        "form": form,
        "seconds": forward.median,
        "spread": forward.spread,
        "copies": forward.ratio(copy),
        "copies_quartiles": forward.quartiles(copy),
        "copies_backward": backward.ratio(copy),
        "copies_backward_quartiles": backward.quartiles(copy),
    }


def contestants(pair: list[Tensor], encode: "Encode") -> dict[str, Callable[[], object]]:
    """Return the contestants: copying queries and keys, encoding them, and its gradient."""
    data = [x.detach() for x in pair]
    copies = [torch.empty_like(x) for x in pair]
    out = encode(pair)
    grads, inputs = [torch.randn_like(x) for x in out], [*pair, *encode.parameters]
    unused = {"retain_graph": True, "allow_unused": True}  # gates are not part of the features
    return {
        "copy": lambda: [copy.copy_(x) for copy, x in zip(copies, data, strict=True)],
        "forward": lambda: encode(data),
        "backward": lambda: torch.autograd.grad(out, inputs, grads, **unused),
    }


class Encode:
    """phi and one encoding, applied to queries and keys."""

    def __init__(self, encoding: QueryKeyEncoding, x: Tensor, one_pass: bool) -> None:
        """Prepare the encoding. one_pass: compute phi, P and Lambda together."""
        self.parameters = [p for p in encoding.parameters() if p.requires_grad]
        self._positions = torch.arange(x.shape[2], device=x.device)
        self._encoding, self._one_pass = encoding, one_pass

    def __call__(self, pair: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Encode two tensors (B, H, T, D) to two tensors (B, H, T, D')."""
        at = self._positions
        if self._one_pass:
            return self._encoding.one_pass(*pair, at, at, phi=True)(*pair)
        return self._encoding(*map(feature_map, pair), at, at)


def serves_linear(name: str) -> bool:
    """True if the encoding supports linear attention."""
    return encoding_class(name).serves_linear


def forms(x: Tensor) -> dict[tuple[str, str], Encode]:
    """Return every encoding of linear attention, in torch operations and in one pass.

    Of equal encodings only the first is there.
    """
    found, names = {}, {}
    for name in filter(serves_linear, ENCODINGS):
        names.setdefault(canonical_name(name), name)
    usual = {name: (name, {}) for name in names.values()}
    for name, (encoding_name, options) in {**usual, **VARIANTS}.items():
        encoding = build_encoding(
            encoding_name,
            x.shape[-1],
            x.shape[1],
            causal=True,
            options=EncodingOptions(**options),
        ).to(x.device)
        if encoding.before_feature_map:
            continue  # SPE is not applied after phi
        found[name, "step by step"] = Encode(encoding, x, one_pass=False)
        positions = torch.arange(x.shape[2], device=x.device)
        if encoding.one_pass(x, x, positions, positions, phi=True) is not None:
            found[name, "one pass"] = Encode(encoding, x, one_pass=True)
    return found
