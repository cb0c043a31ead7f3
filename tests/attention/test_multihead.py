"""The module that fairseq's layers call: its choices, its cache, its folded projections."""

import pytest
import torch
from torch.utils._pytree import tree_map

from lrpe_fairseq.attention.multihead import MultiheadAttention, feature_map
from lrpe_fairseq.encodings import ENCODINGS, FAMILIES
from tests.end_to_end.cases import computes

WIDTH, HEADS = 16, 2
FOLDABLE = [name for name in FAMILIES["lrpe"].names if ":identity:" not in name]


def module_of(**changes):
    torch.manual_seed(0)
    options = {"attention_type": "softmax", "position_encoding": "lrpe-type3", "causal": True}
    return MultiheadAttention(WIDTH, HEADS, **{**options, **changes}).double().eval()


@pytest.mark.parametrize("name", FOLDABLE)
def test_folding_p_into_the_weights_changes_neither_outputs_nor_gradients(name, monkeypatch):
    module = module_of(position_encoding=name)
    x = torch.randn(20, 2, WIDTH, dtype=torch.float64).requires_grad_()
    inputs = [x, *module.parameters()]
    results = []
    for folds in (True, False):
        monkeypatch.setattr(MultiheadAttention, "_folds", lambda *_, folds=folds: folds)
        out, _ = module(x)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)


def test_p_is_folded_for_many_tokens_and_not_where_a_hook_rewrites_the_weights():
    module = module_of()
    many, one = torch.empty(2, 8, WIDTH), torch.empty(1, 1, WIDTH)
    assert module._folds(many, many)
    assert not module._folds(one, one)  # a single token while generating
    assert not module._folds(many, one)
    module.k_proj.register_forward_pre_hook(lambda *_: None)
    assert not module._folds(many, many)


@pytest.mark.parametrize("attention_type", ["linear", "softmax"])
def test_dropout_acts_on_softmax_weights_in_training_only(attention_type):
    module = module_of(attention_type=attention_type, dropout=0.5)
    x = torch.randn(20, 2, WIDTH, dtype=torch.float64)
    assert torch.equal(module(x)[0], module(x)[0])
    module.train()
    assert torch.equal(module(x)[0], module(x)[0]) == (attention_type == "linear")


def test_the_normalizer_layernorm_adds_a_norm_after_the_heads_and_no_denominator():
    module = module_of(attention_type="linear", normalizer="layernorm")
    assert module.norm.normalized_shape == (WIDTH,)
    x = torch.randn(20, 2, WIDTH, dtype=torch.float64)
    before = module(x)[0]
    module.v_proj.weight.data *= 1000  # the norm takes any scale away again
    module.v_proj.bias.data *= 1000
    torch.testing.assert_close(module(x)[0], before, rtol=1e-3, atol=1e-3)
    assert module_of(attention_type="linear").norm is None


@pytest.mark.parametrize("options", [{"normalizer": "layernorm"}, {"parts": "output-norm"}])
def test_sums_before_a_norm_do_not_overflow_float16(options):
    module = module_of(attention_type="linear", **options)
    module.v_proj.weight.data *= 1000
    x = torch.randn(200, 2, WIDTH)
    found = module.half()(x.half())[0]
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.double(), module.double()(x.double())[0], rtol=0, atol=0.02)


def test_the_softmax_scale_is_that_of_the_original_width():
    plain, wide = module_of(position_encoding="none"), module_of(position_encoding="lrpe-type8")
    x = torch.randn(1, 2, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(plain(x)[0], wide(x)[0])  # one token: position says nothing
    x = x.expand(7, -1, -1)  # the same token seven times, all keys equal
    q, k, _ = plain._project(x.transpose(0, 1))
    assert (q * k).sum(-1).abs().max() > 0.1
    torch.testing.assert_close(plain(x)[0], wide(x)[0])


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("attention_type", ["linear", "softmax"])
def test_the_last_block_reads_the_past_too(attention_type, window):
    module = module_of(attention_type=attention_type, window=window)
    x = torch.randn(2, 12, WIDTH, dtype=torch.float64)
    _, state = module.attend(x[:, :7], keep_state=True)
    last = module.attend(x[:, 7:], state=state)[0]
    torch.testing.assert_close(last, module.attend(x)[0][:, 7:])
    with pytest.raises(ValueError, match="the state belongs to another layer or batch"):
        module.attend(x[:1], state=state)


def test_what_is_added_to_a_projection_is_not_folded_away():
    module = module_of(position_encoding="lrpe-type2")
    module.q_proj.register_forward_hook(lambda own, given, out: out.sin())
    x = torch.randn(1, 2 * WIDTH, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(module.attend(x)[0][:, :7], module.attend(x[:, :7])[0])


def test_documents_and_explicit_positions_are_not_mixed_in_a_text():
    module, x = module_of(), torch.randn(1, 3, WIDTH, dtype=torch.float64)
    given = {"positions": torch.arange(3)}, {"starts": torch.zeros(1, 3, dtype=torch.bool)}
    for first, then in (given, given[::-1]):
        _, state = module.attend(x, None, None, True, **first)
        with pytest.raises(ValueError, match="counted in all blocks of a text"):
            module.attend(x, state=state, **then)


@torch.no_grad()
def test_a_state_whose_tensors_are_replaced_is_read_as_it_is():
    module, x, state = module_of(), torch.randn(2, 9, WIDTH, dtype=torch.float64), None
    for block in x.split(3, 1)[:2]:
        _, state = module.attend(block, state=state, keep_state=True)
    state = tree_map(lambda part: part.flip(0) if torch.is_tensor(part) else part, state)
    last = module.attend(x[:, 6:].flip(0), state=state, keep_state=True)[0]
    torch.testing.assert_close(last.flip(0), module.attend(x)[0][:, 6:])


def test_the_next_position_follows_the_last_real_token_of_explicit_positions():
    x, module = torch.randn(2, 4, WIDTH).double(), module_of()
    padded = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0]]).bool()
    at = 100 + torch.arange(4)
    _, state = module.attend(x, padded, None, True, positions=at)
    assert state.next_position.tolist() == [102, 104]
    _, state = module.attend(x, torch.ones_like(padded), state, True, positions=at + 4)
    assert state.next_position.tolist() == [102, 104]  # no real token


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_features_of_half_precision_are_rounded_but_do_not_cancel(dtype):
    x = torch.linspace(-9, 9, 500).to(dtype)
    wanted = 1 + torch.nn.functional.elu(x.double())
    error = (feature_map(x).double() - wanted).abs() / wanted
    assert error.max() <= torch.finfo(dtype).eps


def test_what_is_cached_follows_a_change_of_length_mask_and_device_dtype():
    for name in ENCODINGS:
        kind = "softmax" if computes("softmax", name) else "linear"
        own = {"attention_type": kind, "position_encoding": name}
        module = module_of(**own)
        for length in (5, 9, 5):
            x = torch.randn(length, 2, WIDTH, dtype=torch.float64)
            mask = torch.zeros(2, length).bool()
            mask[0, length // 2 :] = True
            module(x)
            with torch.inference_mode():
                module(x)
            new = module_of(**own)
            found, wanted = (m(x, key_padding_mask=mask)[0] for m in (module, new))
            torch.testing.assert_close(found, wanted)
        assert new.state_dict().keys() == module.state_dict().keys()
        module.train()(x)[0].sum().backward()  # inference left nothing behind


def test_a_width_that_the_heads_do_not_divide_is_refused():
    with pytest.raises(ValueError, match="not divisible"):
        MultiheadAttention(10, 4, attention_type="linear", position_encoding="none", causal=True)


@pytest.mark.parametrize("options", [{}, "fox_bias=3"])
def test_options_of_another_type_are_refused(options):
    with pytest.raises(ValueError, match=r"options must be an EncodingOptions, not .* by keyword"):
        module_of(options=options)
