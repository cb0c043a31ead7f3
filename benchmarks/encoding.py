"""What encoding costs in linear attention: phi, P and Lambda, as multiples of a plain copy."""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.timing import contest
from benchmarks.training import serves_linear
from lrpe_fairseq.attention.multihead import feature_map
from lrpe_fairseq.encodings import ENCODINGS, QueryKeyEncoding, build_encoding

SHAPES = {"cpu": (1, 8, 4096, 64), "cuda": (12, 12, 32768, 128)}  # batch, heads, T, width


def measure(device: str, dtype: torch.dtype, rounds: int) -> list[dict]:
    """Rows of {encoding, form, seconds, spread, copies, copies_backward}.

    ``form``: "torch", or "kernel" where there is one (see ``encodings.kernels``). ``copies``: the
    time of phi and encoding of one tensor, over that of reading it and writing a copy, in the same
    rounds; ``copies_backward``: the same of the gradient alone.
    """
    x = torch.randn(SHAPES[device.split(":")[0]], device=device, dtype=dtype).requires_grad_()
    rows = []
    for (name, form), encode in forms(x).items():
        timings = contest(contestants(x, encode), rounds)
        rows.append(
            {
                "encoding": name,
                "form": form,
                "seconds": timings["forward"].median,
                "spread": timings["forward"].spread,
                "copies": timings["forward"].ratio(timings["copy"]),
                "copies_backward": timings["backward"].ratio(timings["copy"]),
            }
        )
    return rows


def contestants(x: Tensor, encode: "Encode") -> dict[str, Callable[[], object]]:
    """A copy of x, encoding it, and the gradient of that."""
    data, copy, out = x.detach(), torch.empty_like(x), encode(x)
    grad, inputs = torch.randn_like(out), [x, *encode.parameters]
    return {
        "copy": lambda: copy.copy_(data),
        "forward": lambda: encode(data),
        "backward": lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True),
    }


class Encode:
    """phi and one encoding, on queries alone."""

    def __init__(self, encoding: QueryKeyEncoding, x: Tensor, kernel: bool) -> None:
        """``kernel``: in one pass."""
        self.parameters = [p for p in encoding.parameters() if p.requires_grad]
        self._positions = torch.arange(x.shape[2], device=x.device)
        self._encoding, self._one_pass = encoding, encoding.one_pass(x) if kernel else None

    def __call__(self, x: Tensor) -> Tensor:
        """(B, H, T, D) -> (B, H, T, D')."""
        if self._one_pass is not None:
            return self._one_pass(x, self._positions)
        first = x[:, :, :1]  # a key of one token costs nothing
        at = self._positions
        return self._encoding(feature_map(x), feature_map(first), at, at[:1])[0]


def forms(x: Tensor) -> dict[tuple[str, str], Encode]:
    """Every encoding of linear attention, as torch does it and as a kernel does."""
    found = {}
    for name in filter(serves_linear, ENCODINGS):
        encoding = build_encoding(name, x.shape[-1], x.shape[1], causal=True).to(x.device)
        if encoding.before_feature_map:
            continue  # SPE: not after phi
        found[name, "torch"] = Encode(encoding, x, kernel=False)
        if encoding.one_pass(x) is not None:
            found[name, "kernel"] = Encode(encoding, x, kernel=True)
    return found
