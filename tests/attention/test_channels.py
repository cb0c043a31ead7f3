"""Linear attention with a decay of every feature: its forms against the recurrence, in float64."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from lrpe_fairseq.attention.linear import (
    NORMALIZERS,
    SHARE,
    linear_attention,
    linear_attention_block,
    linear_attention_naive,
)
from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.encodings import build_encoding
from lrpe_fairseq.encodings.wrappers.channel import channels_of
from lrpe_fairseq.errors import ChoiceError
from lrpe_fairseq.kernels.linear.channels import CHUNK

B, H, D, E = 2, 3, 6, 5
LENGTHS = (0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5)


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def example(length, strength=1.0):
    q, k = (draw(B, H, length, D, seed=s).abs() for s in (0, 1))
    log_decay = -strength * draw(B, H, length, D, seed=3).exp()
    return q, k, draw(B, H, length, E, seed=2), log_decay


def bounding(q, k):
    """Return features without encoding that bound some of the denominators of ``bounded``."""
    return q.flip(-1) / SHARE, k


def recurrence(q, k, v, log_decay, normalizer="rotated", content=None):
    """S <- diag(f_s) S + k_s v_s^T, one token after another."""
    state, keys = torch.zeros(B, H, D, E).double(), torch.zeros(B, H, D).double()
    plain, decayed, out = torch.zeros(B, H, D).double(), torch.zeros(B, H, D).double(), []
    for s in range(q.shape[2]):
        f = log_decay[:, :, s].exp()
        state = f.unsqueeze(-1) * state + k[:, :, s, :, None] * v[:, :, s, None]
        keys = f * keys + k[:, :, s]
        found = torch.einsum("bhd,bhde->bhe", q[:, :, s], state)
        if normalizer == "rotated":
            found = found / (q[:, :, s] * keys).sum(-1, keepdim=True)
        if normalizer == "content":
            plain = plain + content[1][:, :, s]
            found = found / (content[0][:, :, s] * plain).sum(-1, keepdim=True)
        if normalizer == "bounded":
            decayed = f * decayed + content[1][:, :, s]
            sums = ((x[:, :, s] * y).sum(-1) for x, y in ((q, keys), (content[0], decayed)))
            own, bound = sums
            found = found / torch.maximum(own, SHARE * bound).unsqueeze(-1)
        out.append(found)
    return torch.stack(out, 2) if out else v


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("length", LENGTHS)
def test_all_forms_and_their_gradients_are_those_of_the_recurrence(length, normalizer):
    q, k, v, log_decay = given = [x.requires_grad_() for x in example(length)]
    content = bounding(q, k)
    own = {"normalizer": normalizer, "content": content}
    wanted = recurrence(q, k, v, log_decay, normalizer, content)
    weight = draw(*wanted.shape, seed=5)
    forms = (linear_attention, linear_attention_naive)
    found = [form(q, k, v, causal=True, log_decay=log_decay, **own) for form in forms]
    options = {"materialize_grads": True, "retain_graph": True}  # all forms share content
    expected = torch.autograd.grad((wanted * weight).sum(), given, **options)
    for out in found:
        torch.testing.assert_close(out, wanted, rtol=1e-10, atol=1e-10)
        if length:
            grads = torch.autograd.grad((out * weight).sum(), given, **options)
            torch.testing.assert_close(grads, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_pieces_of_any_size_continue_from_the_state(normalizer):
    q, k, v, log_decay = example(3 * CHUNK + 5)
    wanted = recurrence(q, k, v, log_decay, normalizer, bounding(q, k))
    state, parts = None, []
    for first, last in itertools.pairwise([0, 1, 2, 20, 36, 37, 53]):
        part = slice(first, last)
        content = [x[:, :, part] for x in bounding(q, k)]
        own = {"normalizer": normalizer, "content": content}
        out, state = linear_attention_block(
            *(x[:, :, part] for x in (q, k, v)), state=state, log_decay=log_decay[:, :, part], **own
        )
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 2), wanted, rtol=1e-10, atol=1e-10)


def test_equal_decays_of_all_features_are_a_decay_per_head():
    q, k, v, log_decay = example(50)
    per_head = log_decay[..., 0]
    same = per_head.unsqueeze(-1).expand_as(log_decay)
    for form in (linear_attention, linear_attention_naive):
        torch.testing.assert_close(
            form(q, k, v, causal=True, log_decay=same),
            form(q, k, v, causal=True, log_decay=per_head),
            rtol=1e-10,
            atol=1e-10,
        )


def test_gates_of_zero_and_of_a_thousandth_are_finite_in_float32_and_exact():
    q, k, v, log_decay = example(50, strength=1e-3)
    log_decay[:, :, 20] = -torch.inf  # forgets all that was before
    log_decay[:, :, 30, ::2] = -500.0
    given = [x.float().requires_grad_() for x in (q, k, v)]
    out = linear_attention(*given, causal=True, log_decay=log_decay.float())
    alone = recurrence(*(x[:, :, 20:] for x in (q, k, v, log_decay.clamp_min(-1000))))
    torch.testing.assert_close(out[:, :, 20:].double(), alone, rtol=2e-5, atol=2e-5)
    grads = torch.autograd.grad(out.sum(), given)
    assert all(g.isfinite().all() for g in grads)
    assert all(g[:, :, :20].isfinite().all() for g in grads)


def test_padding_and_documents_are_the_text_alone():
    q, k, v, log_decay = example(40)
    padding = torch.zeros(B, 40, dtype=torch.bool)
    padding[:, [0, 1, 9, 25, 39]] = True
    kept = [x[:, :, ~padding[0]] for x in (q, k, v, log_decay)]
    starts = torch.zeros(B, 40, dtype=torch.bool)
    starts[:, 17] = True
    for form in (linear_attention, linear_attention_naive):
        own = {"causal": True, "log_decay": log_decay}
        found = form(q, k, v, key_padding_mask=padding, **own)
        torch.testing.assert_close(
            found[:, :, ~padding[0]], recurrence(*kept), rtol=1e-10, atol=1e-10
        )
        packed = form(q, k, v, starts=starts, **own)[:, :, 17:]
        alone = recurrence(*(x[:, :, 17:] for x in (q, k, v, log_decay)))
        torch.testing.assert_close(packed, alone, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("form", [linear_attention, linear_attention_naive])
def test_a_decay_of_features_is_refused_without_causality(form):
    q, k, v, log_decay = example(5)
    with pytest.raises(ValueError, match="causal=True"):
        form(q, k, v, causal=False, log_decay=log_decay)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("none", [*range(8)]),
        ("rope", [0, 0, 1, 1, 2, 2, 3, 3]),
        ("lrpe-type1", [0, 0, 1, 1, 2, 3, 4, 5]),
        ("lrpe-type8", [*range(8)] * 2),
        ("lrpe:fourier:rotation", [0, 0, 1, 1, 2, 2, 3, 3] * 2),
    ],
)
def test_features_that_turn_together_have_one_gate(name, wanted):
    assert channels_of(build_encoding(name, 8, 2)).tolist() == wanted
    encoding = build_encoding(f"gated-channel:{name}", 8, 2, causal=True)
    logs = encoding.log_gates(draw(1, 3, 16).float())
    assert logs.shape == (1, 2, 3, encoding.feature_dim)
    assert torch.equal(logs, logs[..., [wanted.index(c) for c in wanted]])


@pytest.mark.parametrize("name", ["rope", "lrpe-type2", "lrpe-type1", "lrpe:fourier:rotation"])
def test_a_gate_before_the_rotation_is_a_gate_after_it(name):
    """They commute: the recurrence on features that turn step by step gives the same scores."""
    encoding = build_encoding(f"gated-channel:{name}", 8, 2, causal=True).double()
    inner = build_encoding(name, 8, 2).double()
    q, k = draw(1, 2, 9, 8).abs(), draw(1, 2, 9, 8, seed=1).abs()
    logs, at = encoding.log_gates(5 * draw(1, 9, 16)), torch.arange(9)
    zero, wanted = torch.zeros(1).long(), torch.zeros(1, 2, 9, 9).double()
    for s in range(9):
        for t in range(s + 1):
            factor = logs[:, :, t + 1 : s + 1].sum(2, keepdim=True).exp()
            q_s, k_t = inner(q[:, :, s : s + 1], k[:, :, t : t + 1], at[s : s + 1], zero + t)
            # the key is gated before it turns to its position, in the space after P
            k_0 = inner(k[:, :, t : t + 1], k[:, :, t : t + 1], zero, zero)[1] * factor
            planes = inner.core(k_0.split(8, -1), inner.core.powers(zero + t, torch.float64))
            turned = torch.cat(planes, -1)
            wanted[:, :, s, t] = (q_s * turned).sum((-1, -2))
            torch.testing.assert_close(turned, k_t * factor, rtol=1e-10, atol=1e-10)
    q2, k2 = encoding(q, k, at, at)
    value = torch.eye(9, dtype=torch.float64).expand(1, 2, 9, 9)
    found = linear_attention(q2, k2, value, causal=True, normalizer="none", log_decay=logs)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_the_gates_are_those_of_the_authors_formula():
    encoding = build_encoding("gated-channel:none", 8, 2, causal=True).double()
    gate, x = encoding.forget_gate, draw(1, 4, 16)
    for u in range(4):
        logits = gate.up @ (gate.down @ x[0, u]) + gate.bias
        wanted = (logits.sigmoid() ** (1 / 16)).log().view(2, 8)
        torch.testing.assert_close(encoding.log_gates(x)[0, :, u], wanted, rtol=1e-10, atol=1e-12)
    assert F.sigmoid(gate.bias).tolist() == [0.5] * 16


@pytest.mark.parametrize(
    "inner", ["permuteformer", "lrpe-type4", "spe", "liere", "fox", "alibi", "gated:rope", "t5"]
)
def test_encodings_that_do_not_commute_are_refused_with_the_reason(inner):
    with pytest.raises(ChoiceError, match="commute with rotations of pairs only") as refused:
        build_encoding(f"gated-channel:{inner}", 8, 2, causal=True)
    assert "\n" not in str(refused.value)


def test_softmax_attention_refuses_a_decay_of_features_in_one_sentence():
    with pytest.raises(ChoiceError, match="no bias of a score; use it with linear") as refused:
        MultiheadAttention(
            16, 2, attention_type="softmax", position_encoding="gated-channel:rope", causal=True
        )
    assert "\n" not in str(refused.value)


def test_gates_of_more_features_than_the_heads_have_refuse_bounded():
    options = {"attention_type": "linear", "position_encoding": "gated-channel:lrpe-tmlr-type1"}
    MultiheadAttention(16, 2, causal=True, normalizer="content", **options)
    with pytest.raises(ChoiceError, match="16 features by a factor of its own"):
        MultiheadAttention(16, 2, causal=True, normalizer="bounded", **options)
