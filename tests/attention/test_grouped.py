"""Grouped queries: every encoding, with both attention types, against heads that are repeated.

Also a head width of its own, an output projection without bias, and a scale of the scores.
"""

from unittest import mock

import pytest
import torch

from lrpe_fairseq.attention.cross import CrossAttention
from lrpe_fairseq.attention.multihead import Memory, MultiheadAttention
from lrpe_fairseq.attention.parts import PARTS
from lrpe_fairseq.attention.softmax import blocks
from lrpe_fairseq.encodings import ENCODINGS, build_encoding, encoding_class, is_causal_only
from lrpe_fairseq.errors import ChoiceError
from tests.end_to_end.cases import computes
from tests.test_every_encoding import ALGEBRAIC, BY_CHANNEL, CARRIED, FREE, GATED, SELECTIVE

WIDTH, HEADS, KV, D = 20, 4, 2, 8
"""The width of the layer is not H D."""
GROUP = HEADS // KV
NAMES = (*ENCODINGS, *FREE, *ALGEBRAIC, *GATED, *CARRIED, *SELECTIVE)
PAIRS = [
    (name, attention_type)
    for name in NAMES
    for attention_type in ("linear", "softmax")
    if computes(attention_type, name)
]
PAIRS += [(name, "linear") for name in BY_CHANNEL]
SAME = {"rtol": 1e-9, "atol": 1e-9}


def attention_of(name, attention_type, kv_heads=KV, causal=True, **options):
    """Attention with an encoding that has no zeros left, in float64."""
    options = {"normalizer": "content", "head_dim": D, "score_scale": 0.3, **options}
    options |= {"attention_type": attention_type, "position_encoding": name, "causal": causal}
    torch.manual_seed(0)
    module = MultiheadAttention(WIDTH, HEADS, num_kv_heads=kv_heads, **options).double().eval()
    generator = torch.Generator().manual_seed(7)
    for parameter in module.encoding.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return module


def repeated(rows, axis=0):
    """Repeat the heads of a tensor whose ``axis`` is of K D features."""
    return rows.unflatten(axis, (KV, -1)).repeat_interleave(GROUP, axis).flatten(axis, axis + 1)


def expanded(module, name, attention_type, **options):
    """The same function with a head of keys and values for every query head."""
    plain = attention_of(name, attention_type, None, **options)
    state = module.state_dict()
    for key in state:
        if key.startswith(("k_proj.", "v_proj.", "k_norm.")):
            state[key] = repeated(state[key])
        elif key == "kv_shift.weight":  # the gates of keys, and those of values
            state[key] = torch.cat([w.repeat_interleave(GROUP, 0) for w in state[key].chunk(2)])
    plain.load_state_dict(state)
    return plain


def gradients(module, x, weight):
    """The output, and the gradients of x and of all parameters by name; those of shared heads are
    summed over the queries that share them."""
    x = x.clone().requires_grad_()
    out, _ = module.attend(x)
    parameters = dict(module.named_parameters())
    found = torch.autograd.grad(
        (out * weight).sum(), [x, *parameters.values()], materialize_grads=True
    )
    grads = dict(zip(["x", *parameters], found, strict=True))
    if module.group == 1:
        for key in grads:
            if key.startswith(("k_proj.", "v_proj.")):
                grads[key] = grads[key].unflatten(0, (KV, GROUP, -1)).sum(1).flatten(0, 1)
    return out, grads


def inputs(length=9, batch=2):
    generator = torch.Generator().manual_seed(length)
    shape = batch, length, WIDTH
    return torch.randn(shape, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize(("name", "attention_type"), PAIRS)
def test_grouped_queries_are_heads_of_keys_and_values_repeated(name, attention_type):
    """In outputs and gradients. P of an encoding is multiplied into the weights for 24 tokens."""
    for causal in (True, False):
        if not causal and is_causal_only(name):
            continue
        module = attention_of(name, attention_type, causal=causal)
        plain = expanded(module, name, attention_type, causal=causal)
        for x in (inputs(), inputs(24)):
            weight = torch.randn_like(x)
            out, grads = gradients(module, x, weight)
            expected, wanted = gradients(plain, x, weight)
            torch.testing.assert_close(out, expected, **SAME)
            torch.testing.assert_close(grads, wanted, **SAME)


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("name", "attention_type"), PAIRS)
def test_decoding_with_grouped_queries_is_attention_to_the_whole_text(name, attention_type, window):
    """In blocks, through a reordering of beams, with a state as small as the encoding allows."""
    module, x = attention_of(name, attention_type, window=window), inputs()
    order, state, outs = torch.tensor([1, 0, 0]), {}, []
    for first, last in ((0, 3), (3, 4), (4, 5), (5, 9)):
        block = x[:, first:last].transpose(0, 1)
        outs.append(module(block, incremental_state=state)[0].transpose(0, 1))
        if last == 4:
            module.reorder_incremental_state(state, order)
            x, outs = x[order], [out[order] for out in outs]
    whole, _ = module.attend(x)
    torch.testing.assert_close(torch.cat(outs, 1), whole, **SAME)
    (held,) = state.values()
    assert module.state_size(9) == sum(part[0].numel() for part in held.past[:2])


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_keys_of_a_group_are_equal_unless_the_encoding_says_that_it_treats_heads_apart(name):
    """``keys_by_head``; and a state of keys has one key for a group unless so."""
    kind = "softmax" if computes("softmax", name) else "linear"
    window = None if kind == "softmax" else 4  # a state of keys, not of sums
    module = attention_of(name, kind, window=window)
    encoding, at = module.encoding, torch.arange(3, 9)
    k = torch.randn(2, 1, 6, D, dtype=torch.float64).expand(-1, HEADS, -1, -1)
    x = inputs(6)
    if encoding.decomposable:
        phases, _ = encoding.phases(x, None, None, {})
        keys = encoding.in_parts(k, k, *[at if phases is None else phases] * 2)[1]
    else:
        keys = encoding.widened(x, k, k, at)[1]
    transport, _ = encoding.transport(x, at, None, None, {})
    moved = [] if transport is None else [part for part in transport if part is not None]
    if encoding.has_states:
        keys = encoding.turned(k, torch.randn(1, HEADS, 6, D, dtype=torch.float64))
    alike = all(torch.equal(part, part[:, :1].expand_as(part)) for part in (keys, *moved))
    assert alike is not encoding.keys_by_head
    _, state = module.attend(inputs(), keep_state=True)
    assert state.past.keys.shape[1] == (HEADS if encoding.keys_by_head else KV)


@torch.no_grad()
@pytest.mark.parametrize("name", ["rope", "lrpe-type2", "none", "cosformer", "fox", "alibi"])
def test_sums_of_linear_attention_are_one_for_a_group_without_decays_of_heads(name):
    module = attention_of(name, "linear")
    _, state = module.attend(inputs(), keep_state=True)
    assert len(state.past.kv[0]) == (HEADS if name in ("fox", "alibi") else KV)


@torch.no_grad()
@pytest.mark.parametrize(("name", "heads"), [("rope", KV), ("lrpe-type1", KV), ("alibi", HEADS)])
def test_a_decoding_step_repeats_no_keys_in_memory_if_torchs_kernel_reads_groups(name, heads):
    module, x = attention_of(name, "softmax"), inputs()
    _, state = module.attend(x[:, :8], keep_state=True)
    seen = []

    def spy(q, k, v, **options):
        seen.append((k.shape[1], v.shape[1]))
        return attend(q, k, v, **options)

    attend = torch.nn.functional.scaled_dot_product_attention
    with mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", spy):
        module.attend(x[:, 8:], state=state)
    assert seen == [(heads, heads)]


@torch.no_grad()
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("attention_type", ["linear", "softmax"])
def test_parts_of_a_layer_serve_grouped_queries(attention_type, parts):
    module = attention_of("rope", attention_type, parts=parts)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in module.named_parameters():
        if name.startswith(("q_norm", "k_norm", "out_norm", "kv_shift", "out_gate")):
            parameter += 0.5 * torch.randn(parameter.shape, generator=generator)
    plain = expanded(module, "rope", attention_type, parts=parts)
    torch.testing.assert_close(module.attend(inputs())[0], plain.attend(inputs())[0], **SAME)


@torch.no_grad()
@pytest.mark.parametrize("name", ["rope", "t5", "fox"])
def test_documents_padding_blocks_and_memories_serve_grouped_queries(name):
    module = attention_of(name, "softmax")
    plain, x = expanded(module, name, "softmax"), inputs()
    padding, starts = torch.zeros(2, 9, dtype=torch.bool), torch.zeros(2, 9, dtype=torch.bool)
    padding[0, 6:] = starts[1, 4] = True
    real = ~padding.unsqueeze(-1)
    with mock.patch.object(blocks, "BLOCK", 5 * 2 * HEADS * 9):  # five queries at a time
        for given in ({"key_padding_mask": padding}, {"starts": starts}, {"window": 3}):
            out, expected = (each.attend(x, **given)[0] for each in (module, plain))
            torch.testing.assert_close(out * real, expected * real, **SAME)
    memory = Memory(inputs(5).transpose(0, 1))
    out, expected = (each.attend(x, state=memory)[0] for each in (module, plain))
    torch.testing.assert_close(out, expected, **SAME)


@torch.no_grad()
@pytest.mark.parametrize("attention_type", ["linear", "softmax"])
@pytest.mark.parametrize("normalizer", ["rotated", "bounded", "content", "layernorm", "none"])
def test_score_scale_is_the_factor_of_every_score(attention_type, normalizer):
    """A factor of the queries in softmax attention, and of their features in linear attention."""
    scaled, plain = (
        attention_of("rope", attention_type, normalizer=normalizer, score_scale=scale)
        for scale in (0.05, None)
    )
    if attention_type == "softmax":
        for part in plain.q_proj.parameters():
            part *= 0.05 * D**0.5
        expected = plain.attend(inputs())[0]
    else:
        encode = plain.encoding.encode_both

        def scaled_queries(*given, **options):
            q, k = encode(*given, **options)
            return 0.05 * q, k

        with mock.patch.object(plain.encoding, "encode_both", scaled_queries):
            expected = plain.attend(inputs())[0]
    if normalizer in ("bounded", "content") and attention_type == "linear":
        expected = plain.attend(inputs())[0]  # the factor is also that of the denominator
    torch.testing.assert_close(scaled.attend(inputs())[0], expected, **SAME)


@torch.no_grad()
@pytest.mark.parametrize("name", [n for n in ENCODINGS if not encoding_class(n).decomposable])
def test_a_score_encoding_reads_queries_with_their_scale(name):
    """The default scale, given as a number, changes nothing."""
    given, usual = (attention_of(name, "softmax", score_scale=s) for s in (D**-0.5, None))
    assert torch.equal(given.attend(inputs())[0], usual.attend(inputs())[0])
    assert not torch.allclose(
        attention_of(name, "softmax").attend(inputs())[0], usual.attend(inputs())[0]
    )


@torch.no_grad()
@pytest.mark.parametrize("attention_type", ["linear", "softmax"])
def test_cross_attention_has_grouped_queries(attention_type):
    options = {"attention_type": attention_type, "position_encoding": "rope", "memory_dim": 12}
    options |= {"head_dim": D, "score_scale": 0.3, "out_bias": False, "normalizer": "content"}
    torch.manual_seed(3)
    module = CrossAttention(WIDTH, HEADS, num_kv_heads=KV, **options).double().eval()
    plain = CrossAttention(WIDTH, HEADS, **options).double().eval()
    state = module.state_dict()
    for key in state:
        if key.startswith(("k_proj.", "v_proj.")):
            state[key] = repeated(state[key])
    plain.load_state_dict(state)
    memory = torch.randn(2, 7, 12, dtype=torch.float64)
    expected, *_ = plain.attend(inputs(), memory)
    torch.testing.assert_close(module.attend(inputs(), memory)[0], expected, **SAME)
    first, _, kept = module.attend(inputs()[:, :4], memory, keep_state=True)
    rest, _, _ = module.attend(inputs()[:, 4:], memory, state=kept)
    torch.testing.assert_close(torch.cat([first, rest], 1), expected, **SAME)


def test_an_output_projection_may_have_no_bias():
    with_bias, without = (attention_of("rope", "softmax", out_bias=bias) for bias in (True, False))
    assert without.out_proj.bias is None
    assert torch.equal(with_bias.out_proj.weight, without.out_proj.weight)


REFUSED = {
    "3 heads of keys and values cannot be shared equally by 4": {"num_kv_heads": 3},
    "num_kv_heads must be at least 1": {"num_kv_heads": 0},
    "num_kv_heads must be a whole number": {"num_kv_heads": 1.5},
    "head_dim must be at least 1": {"head_dim": 0},
    "head_dim must be a whole number": {"head_dim": "8"},
    "score_scale must be above 0": {"score_scale": 0.0},
    "score_scale must be a finite number": {"score_scale": float("inf")},
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_sizes_that_do_not_fit_are_refused(sentence):
    with pytest.raises(ChoiceError, match=sentence):
        MultiheadAttention(
            *(WIDTH, HEADS),
            attention_type="softmax",
            position_encoding="none",
            causal=True,
            **REFUSED[sentence],
        )


def test_a_state_of_other_heads_is_refused():
    two, four = attention_of("rope", "softmax"), attention_of("rope", "softmax", HEADS)
    _, state = two.attend(inputs(), keep_state=True)
    with pytest.raises(ValueError, match="4 heads of width 8 and 2 of keys and values"):
        four.attend(inputs(), state=state)


def test_an_encoding_that_slices_the_input_refuses_a_width_that_heads_do_not_divide():
    with pytest.raises(ChoiceError, match="selective encodings slice the input of width 21"):
        build_encoding("selective:rope", D, HEADS, causal=True, width=21)
