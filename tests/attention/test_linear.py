"""Every form of linear attention against the naive one."""

import itertools
import math

import pytest
import torch

from lrpe_fairseq.attention.linear import (
    NORMALIZERS,
    SHARE,
    attend_to_memory,
    linear_attention,
    linear_attention_block,
    linear_attention_naive,
    linear_attention_window,
    summed_memory,
)
from lrpe_fairseq.attention.tokens import tokens_of
from lrpe_fairseq.kernels.linear import causal as in_pytorch
from lrpe_fairseq.kernels.linear import causal_cpu
from tests.pairwise import pairwise

LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 200, 300)
BATCH, HEADS, D, E = 3, 2, 6, 5


def example(length, dtype=torch.float64, keys=None):
    generator = torch.Generator().manual_seed(length)
    keys = keys or length
    sizes = ((length, D), (keys, D), (keys, E), (length, D), (keys, D))
    q, k, v, *content = (
        torch.rand((BATCH, HEADS, *s), generator=generator, dtype=dtype) for s in sizes
    )
    # about half of the denominators of "bounded" are at their bound
    content = [x / SHARE**0.5 for x in content]
    return [x.requires_grad_() for x in (q, k, v, *content)]


def padding(length):
    mask = torch.zeros(BATCH, length, dtype=torch.bool)
    mask[1, : length // 2] = True
    mask[2, length // 2 + 1 :] = True
    return mask


def documents(length):
    """Starts of documents: none but the first, one at every third token, and single tokens."""
    starts = torch.zeros(BATCH, length, dtype=torch.bool)
    starts[1, ::3] = starts[2, length // 3 : length // 2] = True
    return starts


def outputs_and_gradients(function, inputs, **options):
    q, k, v, *content = inputs
    out = function(q, k, v, content=tuple(content), **options)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    grads = torch.autograd.grad(out, inputs, weights, allow_unused=True)
    return [out, *(g for g in grads if g is not None)]


FORMS = {
    "chunked": {},
    "chunked, two states at a time": {"SCAN": 2},
    "native": {},
    "native, short segments": {"SEGMENT": 64},
}


def use(form, monkeypatch):
    """Let linear attention take that of FORMS."""
    name = form.split(",")[0]
    if name == "chunked":
        monkeypatch.setattr(causal_cpu, "serves", lambda *_: False)
    elif causal_cpu.library() is None:
        pytest.skip("causal_cpu.cpp does not compile here")
    for setting, value in FORMS[form].items():
        monkeypatch.setattr({"chunked": in_pytorch, "native": causal_cpu}[name], setting, value)


@pytest.mark.parametrize(
    ("form", "length", "normalizer", "decay", "mask", "packed"),
    pairwise(FORMS, LENGTHS, NORMALIZERS, [None, (-0.2, -0.01)], [False, True], [False, True]),
)
def test_every_fast_form_equals_the_naive_one_in_outputs_and_gradients(
    form, length, normalizer, decay, mask, packed, monkeypatch
):
    use(form, monkeypatch)
    options = {
        "starts": documents(length) if packed else None,
        "causal": True,
        "normalizer": normalizer,
        "log_decay": None if decay is None else torch.tensor(decay),
        "key_padding_mask": padding(length) if mask else None,
    }
    wanted = outputs_and_gradients(linear_attention_naive, example(length), **options)
    got = outputs_and_gradients(linear_attention, example(length), **options)
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", FORMS)
def test_documents_that_begin_at_any_place_of_a_chunk_are_those_alone(form, monkeypatch):
    use(form, monkeypatch)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.rand(65, 2, 130, 3, generator=generator).double() for _ in range(3))
    gates = -torch.rand(65, 2, 130, generator=generator, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (q, k, v, gates)]
    starts = torch.zeros(65, 130, dtype=torch.bool)
    starts[torch.arange(65), torch.arange(0, 130, 2)] = True  # a document of one token,
    starts[torch.arange(65), torch.arange(1, 130, 2)] = True  # and the rest
    out = linear_attention(q, k, v, causal=True, log_decay=gates, starts=starts)
    alone = []
    for row, first in enumerate(range(0, 130, 2)):
        own = (slice(0, first), slice(first, first + 1), slice(first + 1, 130))
        rows = ([x[row : row + 1, :, part] for x in inputs] for part in own)
        parts = [
            linear_attention_naive(a, b, c, causal=True, log_decay=d)
            for a, b, c, d in rows
            if a.shape[2]
        ]
        alone.append(torch.cat(parts, 2))
    alone, weight = torch.cat(alone), torch.rand_like(v)
    torch.testing.assert_close(out, alone, rtol=1e-10, atol=1e-10)
    found, wanted = (torch.autograd.grad((o * weight).sum(), inputs) for o in (out, alone))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("lengths", "normalizer", "mask"),
    pairwise([(1, 1), (65, 65), (7, 130), (130, 7)], NORMALIZERS, [False, True]),
)
def test_bidirectional_equals_naive_in_outputs_and_gradients(lengths, normalizer, mask):
    queries, keys = lengths
    hidden = padding(keys) if mask else None
    options = {"causal": False, "normalizer": normalizer, "key_padding_mask": hidden}
    forms = (linear_attention, linear_attention_naive)
    pair = (outputs_and_gradients(form, example(queries, keys=keys), **options) for form in forms)
    torch.testing.assert_close(*pair, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("length", "normalizer", "mask"), pairwise([1, 65, 130], NORMALIZERS, [False, True])
)
def test_a_bidirectional_decay_equals_the_naive_one_and_the_equation(length, normalizer, mask):
    rate = torch.tensor([-0.2, -3.0], dtype=torch.float64)
    options = {"normalizer": normalizer, "key_padding_mask": padding(length) if mask else None}
    options |= {"causal": False, "log_decay": rate}
    wanted = outputs_and_gradients(linear_attention_naive, example(length), **options)
    got = outputs_and_gradients(linear_attention, example(length), **options)
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
    if normalizer == "none" and not mask:
        q, k, v, *_ = example(length)
        step = torch.arange(length)
        lag = (step[:, None] - step).abs()
        equation = ((q @ k.mT) * torch.exp(rate[:, None, None] * lag)) @ v
        torch.testing.assert_close(got[0], equation, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_a_bidirectional_decay_counts_real_tokens_only(normalizer):
    """Padding on the left, on the right and between gives the outputs of the unpadded text."""
    places = {"left": range(5, 12), "right": range(7), "between": [0, 2, 3, 6, 7, 10, 11]}
    rate, short = torch.tensor([-0.2, -1.0]), [x.detach()[:1] for x in example(7)]
    options = {"causal": False, "normalizer": normalizer, "log_decay": rate}
    wanted = linear_attention(*short[:3], content=tuple(short[3:]), **options)
    for place in places.values():
        padded = [torch.full((1, HEADS, 12, x.shape[-1]), 5.0, dtype=x.dtype) for x in short]
        for x, y in zip(padded, short, strict=True):
            x[:, :, list(place)] = y
        mask = torch.ones(1, 12, dtype=torch.bool)
        mask[0, list(place)] = False
        options["key_padding_mask"] = mask
        for form in (linear_attention, linear_attention_naive):
            found = form(*padded[:3], content=tuple(padded[3:]), **options)[:, :, list(place)]
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("blocks", "normalizer", "decay", "packed"),
    pairwise(
        [(1,) * 70, (5, 1, 64), (70,), (1, 69), (69, 1)],
        NORMALIZERS,
        [None, (-0.2, -0.01)],
        [False, True],
    ),
)
def test_any_split_into_blocks_resumes_exactly(blocks, normalizer, decay, packed):
    q, k, v, *content = (x.detach() for x in example(70))
    log_decay = None if decay is None else torch.tensor(decay)
    mask, starts = padding(70), documents(70) if packed else None
    options = {"normalizer": normalizer, "log_decay": log_decay}
    given = {"key_padding_mask": mask, "content": tuple(content), "starts": starts, **options}
    whole = linear_attention_naive(q, k, v, causal=True, **given)
    state, parts, start = None, [], 0
    for size in blocks:
        cut = slice(start, start + size)
        own = {"key_padding_mask": mask[:, cut], "content": [x[:, :, cut] for x in content]}
        own["starts"] = None if starts is None else starts[:, cut]
        rows = (x[:, :, cut] for x in (q, k, v))
        part, state = linear_attention_block(*rows, state=state, **own, **options)
        parts.append(part)
        start += size
    torch.testing.assert_close(torch.cat(parts, 2), whole, rtol=1e-9, atol=1e-9)


def test_what_stands_at_padding_leaks_nowhere():
    mask = padding(64)
    for causal in (True, False):
        q, k, v, *_ = (x.detach() for x in example(64))
        clean = linear_attention(q, k, v, causal=causal, key_padding_mask=mask)
        for poison in (1e9, float("inf"), float("nan")):
            dead = mask[:, None, :, None]
            bad = (x.masked_fill(dead, poison) for x in (k, v))
            spoilt = linear_attention(q, *bad, causal=causal, key_padding_mask=mask)
            assert torch.equal(clean, spoilt)


def test_a_query_that_sees_no_key_gets_zeros():
    q, k, v, *_ = (x.detach() for x in example(8))
    hidden = torch.ones(BATCH, 8, dtype=torch.bool)
    out = linear_attention(q, k, v, causal=True, key_padding_mask=hidden)
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_half_types_are_kept_in_float32(dtype):
    q, k, v, *_ = (x.detach()[:1, :1].to(dtype) for x in example(4000, torch.float32))
    out = linear_attention(q, k, v, causal=True)
    exact = linear_attention_naive(q.double(), k.double(), v.double(), causal=True)
    assert out.dtype == dtype
    assert (out - exact).abs().max() < torch.finfo(dtype).eps
    _, state = linear_attention_block(q, k, v, state=None)
    assert state.kv.dtype == state.keys.dtype == torch.float32


def test_float32_stays_accurate_over_16384_tokens():
    q, k, v, *_ = (x.detach()[:1, :1] for x in example(16384, torch.float32))
    out = linear_attention(q, k, v, causal=True)
    exact = linear_attention_block(q.double(), k.double(), v.double(), state=None)[0]
    assert (out - exact).abs().max() < 1e-5


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("causal", [True, False])
def test_autocast_rounds_no_sum(causal, normalizer):
    plain, inside = (example(150, dtype=torch.float32) for _ in range(2))
    *qkv, cq, ck = inside
    options = {"normalizer": normalizer, "content": (cq, ck)}
    wanted = linear_attention(*plain[:3], causal=causal, normalizer=normalizer, content=plain[3:])
    with torch.autocast("cpu", torch.bfloat16):
        forms = [linear_attention, linear_attention_naive]
        found = [form(*qkv, causal=causal, **options) for form in forms]
        found += [linear_attention_block(*qkv, state=None, **options)[0]] if causal else []
    for out in found:
        torch.testing.assert_close(out, wanted)
    wanted = torch.autograd.grad(wanted.sum(), plain[:3])
    for backward_inside in (False, causal):
        with torch.autocast("cpu", torch.bfloat16, enabled=backward_inside):
            grads = torch.autograd.grad(found[0].sum(), inside[:3], retain_graph=True)
        torch.testing.assert_close(grads, wanted)


@pytest.mark.parametrize("form", ["chunked", "native"])
def test_memory_is_linear_in_length(form, monkeypatch):
    use(form, monkeypatch)

    def saved(length):
        q, k, v = (torch.rand(1, 1, length, 4).requires_grad_() for _ in range(3))
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: sizes.append(t.numel()) or t, lambda t: t
        ):
            linear_attention(q, k, v, causal=True)
        return sum(sizes)

    assert saved(4096) < 9 * saved(512)


def test_causal_attention_over_fewer_keys_is_refused():
    q, k, v, *_ = example(4, keys=3)
    with pytest.raises(ValueError, match="as many queries as keys"):
        linear_attention(q, k, v, causal=True)


@pytest.mark.parametrize(
    ("normalizer", "window", "decay"),
    pairwise(NORMALIZERS, [1, 64, 400], [None, (HEADS,), (BATCH, HEADS, 200)]),
)
def test_a_window_by_blocks_equals_the_naive_one_in_outputs_and_gradients(
    normalizer, window, decay
):
    generator = torch.Generator().manual_seed(window)
    hidden, rate = padding(200), None
    if decay:
        rate = -torch.rand(decay, generator=generator, dtype=torch.float64)
        rate = rate.masked_fill(hidden[:, None], 0.0) if len(decay) == 3 else rate
    options = {"normalizer": normalizer, "log_decay": rate, "window": window}
    options |= {"key_padding_mask": hidden, "starts": documents(200)}
    x = torch.empty(BATCH, 200, 1)
    tokens = tokens_of(x, hidden, starts=documents(200), one_sided=True, window=window)
    if decay and len(decay) == 3:
        tokens, rate = tokens._replace(sums=rate.cumsum(-1)), None

    def by_blocks(q, k, v, content):
        own = {"normalizer": normalizer, "log_decay": rate, "content": content}
        return linear_attention_window(q, k, v, tokens, tokens, **own)

    wanted = outputs_and_gradients(linear_attention_naive, example(200), causal=True, **options)
    got = outputs_and_gradients(by_blocks, example(200))
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


def test_an_unknown_normalizer_is_refused_also_with_a_memory_of_sums():
    x = torch.randn(1, 2, 3, 4)
    memory = summed_memory(x, x)
    with pytest.raises(ValueError, match="unknown normalizer 'rotate'; choose one of rotated, "):
        attend_to_memory(x, memory, normalizer="rotate", dtype=x.dtype)


def test_bounded_divides_by_the_encoded_sum_or_by_a_share_of_the_sum_without_encoding():
    """Both sums are written as loops; queries that turn away make the encoded sum negative."""
    q, k, v, *content = (x.detach() for x in example(9))
    q[..., 4:, :] *= -1.0
    content = [x * SHARE**0.5 for x in content]
    rate = torch.tensor([-0.3, -0.01], dtype=torch.float64)
    options = {"normalizer": "bounded", "content": content, "log_decay": rate}
    out = linear_attention(q, k, v, causal=True, **options)
    for b, h, s in itertools.product(range(BATCH), range(HEADS), range(9)):
        decays = [math.exp(rate[h] * (s - t)) for t in range(s + 1)]
        of_token = [(q[b, h, s] @ k[b, h, t]) * decays[t] for t in range(s + 1)]
        plain = sum(decays[t] * (content[0][b, h, s] @ content[1][b, h, t]) for t in range(s + 1))
        denominator = max(sum(of_token), plain / 16)
        assert (denominator == plain / 16) == (s >= 4)
        wanted = sum(score * v[b, h, t] for t, score in enumerate(of_token)) / denominator
        torch.testing.assert_close(out[b, h, s], wanted)
