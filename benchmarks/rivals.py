"""Forms of attention that compete: ours, torch's and fla's, each with its definition in float64.

Queries, keys and values are (B, H, T, D) views of memory (B, T, H, D), as layers make them.
"""

import importlib.util
import math
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import attention
from lrpe_fairseq.attention.linear import linear_attention, linear_attention_naive
from lrpe_fairseq.kernels import loader, triton_calls
from lrpe_fairseq.kernels.flash import flash

HEADS, WIDTH = 8, 64
CHECKED = 200
"""Tokens of the comparison with float64, which no tile divides."""
TOLERANCE = {torch.bfloat16: 4e-2, torch.float16: 6e-3, torch.float32: 2e-3}
"""Largest error of output and gradients, relative to the largest number."""

Step = Callable[[], list[Tensor]]


class Form(NamedTuple):
    """A function (q, k, v, *extra) -> (B, H, T, E), and the same in float64.

    base: the form that it is compared with. features: q and k are positive. extra: "table", biases
    by lag (H, T), or "gates", log gates (B, H, T); both have gradients.
    """

    attend: Callable[..., Tensor]
    definition: Callable[..., Tensor]
    base: str = "sdpa"
    features: bool = False
    extra: str = ""


def forms(device: str) -> dict[str, Form]:
    """Return the forms that the device can run, most important first."""
    sums = partial(linear_attention, causal=True, normalizer="none")
    exact_sums = partial(linear_attention_naive, causal=True, normalizer="none")
    table, gates, decay, plain = (
        partial(_defined, kind) for kind in ("table", "gates", "decay", "")
    )
    full = partial(plain, causal=False)
    decayed = [partial(_decayed, form) for form in (linear_attention, linear_attention_naive)]
    found = {
        "sdpa": Form(attention.sdpa, plain),
        "linear": Form(attention.ours, attention.naive, features=True),
        "linear, sums": Form(sums, exact_sums, features=True),
        "linear, gates": Form(*decayed, features=True, extra="gates"),
        "flash, table": Form(partial(_flash, "table"), table, extra="table"),
        "flash, decay": Form(partial(_flash, "decay"), decay),
        "flash, gates": Form(partial(_flash, "gates"), gates, extra="gates"),
        "flash": Form(partial(_flash, ""), plain),
        "sdpa, full": Form(F.scaled_dot_product_attention, full, "sdpa, full"),
        "linear, full": Form(
            attention.bidirectional, attention.naive_bidirectional, "sdpa, full", features=True
        ),
        "linear, decay": Form(*decayed, features=True),
        "linear, chunked": Form(_chunked, attention.naive, features=True),
    }
    if device == "cuda" and importlib.util.find_spec("fla") is not None:
        for name in ("fused_chunk_simple_gla", "chunk_simple_gla"):
            found[f"fla {name}"] = Form(partial(_fla, name), exact_sums, features=True)
        found["fla parallel_forgetting_attn"] = Form(_forgetting, gates, extra="gates")
    return found


def flex_forms(device: str) -> dict[str, Form]:
    """Return FlexAttention, which compiles for a minute and has no gradient on a CPU."""
    if device != "cuda":
        return {}
    return {
        "FlexAttention": Form(partial(_flex, ""), partial(_defined, "")),
        "FlexAttention, table": Form(
            partial(_flex, "table"), partial(_defined, "table"), extra="table"
        ),
    }


def step(form: Form, length: int, tokens: int, device: str, dtype: torch.dtype) -> Step:
    """Return a forward and backward pass on ``tokens`` tokens in sequences of ``length``."""
    return _step(form.attend, inputs(form, max(1, tokens // length), length, device, dtype))


def inputs(
    form: Form, batch: int, length: int, device: str, dtype: torch.dtype, heads: int = HEADS
) -> list[Tensor]:
    """Return q, k, v, the gradient of the output, and the extra tensor of a form."""
    generator = torch.Generator(device).manual_seed(length)
    normal = partial(torch.randn, device=device, generator=generator)
    q, k, v, grad = (normal(batch, length, heads, WIDTH).transpose(1, 2) for _ in range(4))
    if form.features:
        q, k = F.elu(q) + 1, F.elu(k) + 1
    given = [x.to(dtype) for x in (q, k, v, grad)]
    if form.extra == "table":
        given.append(_decay(given[0])[:, None] * torch.arange(length, device=device))
    if form.extra == "gates":
        given.append(F.logsigmoid(normal(batch, heads, length) + 3))
    return given


def _step(attend: Callable[..., Tensor], given: list[Tensor]) -> Step:
    q, k, v, grad, *extra = given
    learned = [x.detach().requires_grad_() for x in (q, k, v, *extra)]

    def run() -> list[Tensor]:
        out = attend(*learned)
        return [out.detach(), *torch.autograd.grad(out, learned, grad.to(out.dtype))]

    return run


def error(form: Form, device: str, dtype: torch.dtype) -> float:
    """Return the largest error of output and gradients, relative to the largest number."""
    given = inputs(form, 2, CHECKED, device, dtype)
    found = _step(form.attend, given)()
    exact = _step(form.definition, [x.double() for x in given])()
    pairs = zip(found, exact, strict=True)
    errors = [((a.double() - b).abs().max() / b.abs().max()).item() for a, b in pairs]
    return max(errors, key=lambda x: (math.isnan(x), x))


# --- forms -------------------------------------------------------------------------------------


def _decay(q: Tensor) -> Tensor:
    """Return the decay of ALiBi for every head of q (B, H, T, D)."""
    return -(2.0 ** -torch.arange(1, q.shape[1] + 1, device=q.device))


def _extra(
    kind: str, q: Tensor, extra: tuple[Tensor, ...]
) -> dict[str, Tensor | tuple[Tensor, Tensor]]:
    """Return the argument of flash attention."""
    if not extra:
        return {"decay": _decay(q)} if kind else {}
    sums = extra[0].double().cumsum(-1) if kind == "gates" else None
    return {"table": extra[0]} if sums is None else {"gates": (sums, sums)}


def _defined(
    kind: str, q: Tensor, k: Tensor, v: Tensor, *extra: Tensor, causal: bool = True
) -> Tensor:
    """Softmax attention by its definition."""
    options = {"causal": causal, "scale": q.shape[-1] ** -0.5}
    return flash.definition(q, k, v, **options, **_extra(kind, q, extra))


def _flash(kind: str, q: Tensor, k: Tensor, v: Tensor, *extra: Tensor) -> Tensor:
    """Our flash kernel; on a CPU its definition."""
    in_triton = q.is_cuda and loader.triton_kernels(triton_calls.FLASH)
    form = in_triton.flash_attention if in_triton else flash.definition
    return form(q, k, v, causal=True, scale=q.shape[-1] ** -0.5, **_extra(kind, q, extra))


def _decayed(
    attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *gates: Tensor
) -> Tensor:
    """Linear attention with gates, or with a constant decay."""
    return attend(q, k, v, causal=True, log_decay=gates[0] if gates else _decay(q))


def _chunked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Our form with states in memory: in Triton on a GPU, in PyTorch on a CPU."""
    if not q.is_cuda:
        return attention.chunked(q, k, v)
    with mock.patch.object(
        loader.triton_kernels(triton_calls.CAUSAL), "fits_registers", return_value=False
    ):
        return attention.ours(q, k, v)


def _fla(name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    import fla.ops.simple_gla

    rows = (x.transpose(1, 2) for x in (q, k, v))
    return getattr(fla.ops.simple_gla, name)(*rows, scale=1.0)[0].transpose(1, 2)


def _forgetting(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
    from fla.ops.forgetting_attn import parallel_forgetting_attn

    rows = (x.transpose(1, 2) for x in (q, k, v, gates))
    return parallel_forgetting_attn(*rows).transpose(1, 2)


def _flex(kind: str, q: Tensor, k: Tensor, v: Tensor, *extra: Tensor) -> Tensor:
    mask = _causal_mask(q.shape[2], str(q.device))
    table = extra[0] if kind else None

    def biased(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + table[h, (i - j).clamp(min=0)]

    return _compiled_flex()(q, k, v, score_mod=biased if kind else None, block_mask=mask)


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


@cache
def _causal_mask(length: int, device: str) -> object:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=device)
