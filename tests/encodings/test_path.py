"""``path`` and ``path:<name>`` against products of matrices, in float64, with gradients."""

import math
from unittest import mock

import pytest
import torch
from torch.nn import functional as F

from lrpe_fairseq.attention import softmax, transport
from lrpe_fairseq.attention.cross import CrossAttention
from lrpe_fairseq.attention.linear import (
    linear_attention,
    linear_attention_block,
    linear_attention_naive,
)
from lrpe_fairseq.attention.multihead import Memory, MultiheadAttention, feature_map
from lrpe_fairseq.attention.softmax import encoded_attention
from lrpe_fairseq.attention.tokens import Tokens
from lrpe_fairseq.encodings import EncodingOptions, build_encoding
from lrpe_fairseq.encodings.core.forms import Transport
from lrpe_fairseq.encodings.wrappers.path import RANK, TAPS
from lrpe_fairseq.errors import ChoiceError
from tests.references import assert_near, carried_scores

B, H, T, D, E = 2, 2, 37, 8, 5
WIDTH = H * D
NORMALIZERS = ("none", "rotated", "content")
KINDS = ("softmax", "linear")


def draw(time=T, top=2.0, seed=0):
    """q, k, w (B, H, T, D), v (B, H, T, E), beta and log gates (B, H, T)."""
    generator = torch.Generator().manual_seed(seed)
    q, k, w, v = (
        torch.randn(B, H, time, n, generator=generator, dtype=torch.float64) for n in (D, D, D, E)
    )
    beta, gates = torch.rand(2, B, H, time, generator=generator, dtype=torch.float64)
    return q, k, v, F.normalize(w, dim=-1), top * beta, F.logsigmoid(4 * gates)


def gate_sums(gates):
    total = gates.cumsum(-1)
    return (total.unsqueeze(-1) - total.unsqueeze(-2)).tril()


def softmax_of(scores, v, gates):
    logits = scores / math.sqrt(D) + gate_sums(gates)
    future = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
    return logits.masked_fill(future, -math.inf).softmax(-1) @ v


def softmax_by_blocks(q, k, v, w, beta, gates, window=None):
    encoding = build_encoding("fox", D, H, causal=True)
    tokens = Tokens(torch.arange(q.shape[2]), sums=gates.cumsum(-1), window=window)
    queries = tokens._replace(transport=Transport(w, beta))
    return encoded_attention(encoding, q, k, v, queries, tokens, causal=True)


def with_gradients(function, given):
    given = [x.detach().requires_grad_() for x in given]
    out = function(*given)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=out.dtype)
    return [out, *torch.autograd.grad((out * weight).sum(), given)]


# --- forms -------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_softmax_in_blocks_of_chunks_is_the_product_of_matrices(chunk):
    given = draw()
    wanted = with_gradients(
        lambda q, k, v, w, b, f: softmax_of(carried_scores(q, k, w, b), v, f), given
    )
    for limit in (1, softmax.blocks.BLOCK):
        chunks = mock.patch.object(transport, "CHUNK", chunk)
        with chunks, mock.patch.object(softmax.blocks, "BLOCK", limit):
            assert_near(with_gradients(softmax_by_blocks, given), wanted, 1e-12, least=0)


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_linear_attention_in_chunks_and_pieces_is_the_product_of_matrices(normalizer):
    q, k, *rest = draw()

    def narrow(x):  # as features without a complex encoding
        return x[..., ::2]

    def options(q, k, w, beta, gates):
        own = {"content": (narrow(q), narrow(k))} if normalizer == "content" else {}
        own |= {"log_decay": gates, "transport": Transport(w, beta)}
        return {"normalizer": normalizer, **own}

    def written_out(q, k, v, w, beta, gates):
        scores = carried_scores(q, k, w, beta) * gate_sums(gates).exp()
        plain = (narrow(q) @ narrow(k).mT).tril() if normalizer == "content" else scores
        total = plain.sum(-1, keepdim=True).clamp_min(1e-6)
        return scores @ v / (1 if normalizer == "none" else total)

    def in_pieces(*given):
        state, parts = None, []
        for cut in (slice(13), slice(13, 14), slice(14, 36), slice(36, T)):
            q, k, v, *rest = (x[:, :, cut] for x in given)
            out, state = linear_attention_block(q, k, v, state=state, **options(q, k, *rest))
            parts.append(out)
        return torch.cat(parts, 2)

    def at_once(attention):
        return lambda q, k, v, *more: attention(q, k, v, causal=True, **options(q, k, *more))

    given = [feature_map(q), feature_map(k), *rest]
    wanted = with_gradients(written_out, given)
    for function in (at_once(linear_attention_naive), at_once(linear_attention), in_pieces):
        with mock.patch.object(transport, "CHUNK", 7):
            assert_near(with_gradients(function, given), wanted, 1e-11, least=0)


@pytest.mark.parametrize("window", [1, 5, 20])
def test_a_window_hides_keys_and_not_the_reflections_between_them(window):
    q, k, v, w, beta, gates = draw()
    scores = carried_scores(q, k, w, beta) / math.sqrt(D) + gate_sums(gates)
    seen = torch.ones(T, T, dtype=torch.bool).tril().triu(1 - window)
    wanted = scores.masked_fill(~seen, -math.inf).softmax(-1) @ v
    with mock.patch.object(transport, "CHUNK", 4), mock.patch.object(softmax.blocks, "BLOCK", 1):
        found = softmax_by_blocks(q, k, v, w, beta, gates, window)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("top", "tolerance"), [((0.0, 2.0), 2e-6), ((1.9, 2.0), 5e-6)])
def test_float32_is_right_after_1024_tokens(top, tolerance):
    generator = torch.Generator().manual_seed(5)
    q, k, w = torch.randn(3, 1, 2, 1024, 64, generator=generator, dtype=torch.float64)
    w, beta = F.normalize(w, dim=-1), torch.empty(1, 2, 1024).double().uniform_(*top)

    def scores(*given):
        q, k, w, beta = given
        ((*_, compute),) = transport.score_blocks(q, k, Transport(w, beta), softmax.blocks.BLOCK)
        return compute()

    exact = scores(q, k, w, beta)
    rounded = scores(*(x.float() for x in (q, k, w, beta)))
    assert (rounded - exact).abs().max() <= tolerance * exact.abs().max()


# --- the encoding ------------------------------------------------------------------------------


def module_of(name, kind, **options):
    torch.manual_seed(0)
    options = {"attention_type": kind, "position_encoding": name, "causal": True, **options}
    return MultiheadAttention(WIDTH, H, **options).double().eval()


def text(length, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, length, WIDTH, generator=generator, dtype=torch.float64)


def enlarged(module, factor=50.0):
    """The module whose reflections differ from token to token, which they hardly do at first."""
    for parameter in module.encoding.reflections.parameters():
        parameter.data *= factor
    return module


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("normalizer", ["rotated", "layernorm"])
@pytest.mark.parametrize(
    ("name", "inner"),
    [("path", "none"), ("gated:path", "fox"), ("gated:path:rope", "gated:rope")]
    + [(f"path:{name}", name) for name in ("lrpe-type2", "lrpe-type8", "alibi")],
)
def test_without_reflections_it_is_the_inner_encoding(name, inner, kind, normalizer):
    plain = module_of(inner, kind, normalizer=normalizer)
    module = enlarged(module_of(name, kind, normalizer=normalizer))
    module.load_state_dict(plain.state_dict(), strict=False)
    assert (module.attend(text(70))[0] - plain.attend(text(70))[0]).abs().max() > 1e-3
    module.encoding.reflections.weight.data.zero_()
    module.encoding.reflections.bias.data.fill_(-math.inf)
    found, wanted = module.attend(text(70))[0], plain.attend(text(70))[0]
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


def test_w_and_beta_are_those_of_a_loop_over_tokens():
    encoding, x = enlarged(module_of("path", "linear")).encoding, text(6)
    own = encoding.reflections
    low = x @ own.down.mT @ own.up.mT
    for t in range(6):
        y = sum(own.filter[j] * low[:, t - j] for j in range(TAPS) if j <= t)
        y = (y * y.sigmoid()).view(2, H, D)
        w, beta = encoding.transport(x, torch.arange(6), None, None, {})[0]
        torch.testing.assert_close(w[:, :, t], y / y.norm(dim=-1, keepdim=True))
        logits = x[:, t] @ own.weight.mT + own.bias
        torch.testing.assert_close(beta[:, :, t], 2 / (1 + (-logits).exp()))


def test_the_start_is_the_published_one_and_path_bias_changes_it():
    for bias, beta in ((0.0, 1.0), (-4.0, 2 / (1 + math.exp(4)))):
        encoding = build_encoding(
            "path:rope", D, H, causal=True, options=EncodingOptions(path_bias=bias)
        )
        given = torch.zeros(1, 3, WIDTH), torch.arange(3), None, None, {}
        torch.testing.assert_close(encoding.transport(*given)[0].beta, torch.full((1, H, 3), beta))
        shapes = {n: tuple(p.shape) for n, p in encoding.reflections.named_parameters()}
        rest = {"weight": (H, WIDTH), "bias": (H,), "filter": (TAPS, WIDTH)}
        assert shapes == {"down": (RANK, WIDTH), "up": (WIDTH, RANK), **rest}
        assert 0.015 < encoding.reflections.down.std() < 0.025


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_w_keeps_norm_1_at_the_start_in_half_precision_and_under_autocast(dtype):
    """The squares of w before it is normalized are near 1e-6."""
    encoding = build_encoding("path:lrpe-type2", 64, 2, causal=True).to(dtype)
    x = torch.randn(1, 50, 128, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        w, beta = encoding.transport(x, torch.arange(50), None, None, {})[0]
    assert w.dtype == beta.dtype == torch.float32
    assert (w.norm(dim=-1) - 1).abs().max() < 1e-6


def test_the_encoding_acts_as_a_power_between_reflections():
    """q~_s.H~_s ... H~_(t+1) k~_t = q_s.G_s ... G_(t+1) k_t with G_u = H_u E_u^T E_(u-1)."""
    encoding = enlarged(module_of("path:lrpe-type2", "softmax")).encoding
    q, k, *_ = draw(9)
    x, at, eye = text(9), torch.arange(9), torch.eye(D, dtype=torch.float64)

    def scores(at):
        carry = encoding.transport(x, at, None, None, {})[0]
        return carried_scores(*encoding(q, k, at, at), *carry)

    w, beta, _ = encoding.reflections(x)
    places = ([p.expand(D)] * 2 for p in at)
    power = [encoding(eye[None, None], eye[None, None], *p)[0][0, 0] for p in places]  # E_p^T
    for s in range(9):
        row = q[:, :, s]
        for t in range(s, -1, -1):
            found = (row * k[:, :, t]).sum(-1)
            torch.testing.assert_close(found, scores(at)[:, :, s, t], rtol=1e-10, atol=1e-10)
            row = row - beta[:, :, t, None] * (row * w[:, :, t]).sum(-1, keepdim=True) * w[:, :, t]
            row = row @ power[t] @ power[t - 1].mT if t else row
    assert (scores(at + 10**9) - scores(at)).abs().max() < 1e-6 * scores(at).abs().max()


def test_a_reflection_changes_pairs_around_its_token_only_and_lengthens_no_key():
    q, k, _, w, beta, _ = draw()
    changed = beta.clone()
    changed[:, :, 11] = 2 - beta[:, :, 11]
    blocks = [
        next(transport.score_blocks(q, k, Transport(w, b), softmax.blocks.BLOCK))[2]()
        for b in (beta, changed)
    ]
    differs = (blocks[0] - blocks[1]).abs().amax((0, 1)) > 1e-9
    wanted = torch.zeros(T, T, dtype=torch.bool)
    wanted[11:, :11] = True
    assert torch.equal(differs, wanted)
    carried = transport.carried(k, Transport(w, beta))
    with torch.autocast("cpu", torch.bfloat16):
        again = transport.carried(k.float(), Transport(w, beta))
    torch.testing.assert_close(again.double(), carried, rtol=1e-5, atol=1e-5)
    assert (carried.norm(dim=-1) <= k.norm(dim=-1) + 1e-12).all()


@pytest.mark.parametrize("name", ["path", "gated:path:lrpe-type2"])
def test_a_memory_of_earlier_segments_is_carried(name):
    module, x = enlarged(module_of(name, "softmax")), text(20)
    with mock.patch.object(transport, "CHUNK", 4):
        out, _ = module.attend(x[:, 11:], None, Memory(x[:, :11].transpose(0, 1)))
    torch.testing.assert_close(out, module.attend(x)[0][:, 11:], rtol=1e-10, atol=1e-10)


def test_keys_are_carried_in_float32_while_decoding_in_bfloat16():
    module = enlarged(module_of("path", "softmax")).bfloat16()
    _, state = module.attend(text(4).bfloat16(), None, None, True)
    assert state.past.keys.dtype == torch.float32
    assert state.past.values.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["path", "path:rope", "gated:path:lrpe-type2"])
def test_it_is_refused_without_causality_and_on_grids(name):
    options = {"attention_type": "softmax", "position_encoding": name}
    for refused in (
        lambda: MultiheadAttention(WIDTH, H, causal=False, **options),
        lambda: CrossAttention(WIDTH, H, **options),
    ):
        with pytest.raises(ChoiceError, match="for causal attention only; choose another"):
            refused()
    grid = {"grid_width": 4, "position_grid": "sum"}
    with pytest.raises(ChoiceError, match="reflections follow the order of tokens"):
        MultiheadAttention(WIDTH, H, causal=True, **options, **grid)


@pytest.mark.parametrize("name", ["none", "spe", "fox", "path", "gated:rope", "t5"])
def test_reflections_of_an_encoding_without_norms_are_refused(name):
    with pytest.raises(ChoiceError, match="to encodings that keep norms; choose path, or path:"):
        build_encoding(f"path:{name}", D, H, causal=True)


def test_reflections_by_the_keys_make_the_sums_of_the_delta_rule():
    """S <- S - beta k (k^T S) + beta k v^T; docs/encodings.md, The delta rule."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 70, 4, dtype=torch.float64) for _ in range(3))
    k, beta = F.normalize(k, dim=-1), 2 * torch.rand(1, 1, 70, dtype=torch.float64)
    state, sums = torch.zeros(4, 4, dtype=torch.float64), []
    for s in range(70):
        key, value = k[0, 0, s], v[0, 0, s]
        state = state + beta[0, 0, s] * torch.outer(key, value - key @ state)
        sums.append(q[0, 0, s] @ state)
    scores = transport.scores_naive(q, k, Transport(k, beta))
    found = scores @ (beta.unsqueeze(-1) * v)
    torch.testing.assert_close(found[0, 0], torch.stack(sums), rtol=1e-12, atol=1e-12)
