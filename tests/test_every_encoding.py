"""The properties every encoding must have, for every name in ENCODINGS and every free form.

An exception is a capability field on the class, which the tests read; nothing is skipped.
"""

import math

import pytest
import torch

from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.encodings import ENCODINGS, FREE_FORMS, ScoreEncoding, build_encoding
from tests.references import score_matrix

NAMES = (*ENCODINGS, *FREE_FORMS)
WIDTH, HEADS, D = 16, 2, 8


def example(length=6, dtype=torch.float64, batch=2):
    generator = torch.Generator().manual_seed(length)
    shape = (batch, HEADS, length, D)
    return [torch.rand(shape, generator=generator, dtype=dtype) for _ in range(2)]


def encoding_of(name, causal=True, seed=0):
    return build_encoding(name, D, HEADS, causal=causal, seed=seed).eval()


def expected_scores(name, q, k, q_positions, k_positions, causal=True):
    """The score matrix; for random codes its mean over draws, with its standard error."""
    if encoding_of(name).relative == "exact":
        scores = score_matrix(encoding_of(name, causal), q, k, q_positions, k_positions)
        return scores, torch.zeros_like(scores)
    draws = torch.stack(
        [
            score_matrix(same_parameters(name, causal, seed), q, k, q_positions, k_positions)
            for seed in range(100)
        ]
    )
    return draws.mean(0), draws.std(0) / math.sqrt(len(draws))


def same_parameters(name, causal, seed):
    """The encoding whose random code comes from ``seed`` and whose parameters from seed 0."""
    encoding = encoding_of(name, causal, seed)
    first = dict(encoding_of(name, causal).named_parameters())
    for key, parameter in encoding.named_parameters():
        parameter.data = first[key].data
    return encoding


def attention_of(name, attention_type, seed=0, **options):
    torch.manual_seed(seed)
    module = MultiheadAttention(
        WIDTH,
        HEADS,
        attention_type=attention_type,
        position_encoding=name,
        **{"causal": True, **options},
    )
    return module.double().eval()


PAIRS = [
    (name, attention_type)
    for name in NAMES
    for attention_type in ("linear", "softmax")
    if attention_type == "softmax" or encoding_of(name).serves_linear
]


# --- the score ---------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("shift", [1, 7, 500, 100_000])
@pytest.mark.parametrize("name", NAMES)
def test_the_score_depends_on_t_minus_s_only(name, shift, causal):
    q, k = example()
    positions = torch.arange(6)
    here, error = expected_scores(name, q, k, positions, positions, causal)
    there, other = expected_scores(name, q, k, positions + shift, positions + shift, causal)
    seen = torch.ones(6, 6, dtype=torch.bool).tril() if causal else torch.ones(6, 6).bool()
    difference = ((here - there).abs() - 5 * (error + other)).masked_fill(~seen, 0)
    assert difference.max() < 1e-9


@pytest.mark.parametrize("name", [n for n in NAMES if n != "none"])
def test_the_score_does_depend_on_t_minus_s(name):
    q, k = example()
    q, k = q[:, :, :1].expand_as(q), k[:, :, :1].expand_as(k)  # the same content everywhere
    encoding = encoding_of(name)
    with torch.no_grad():
        for parameter in encoding.parameters():  # tables that start at zero say nothing yet
            parameter.add_(torch.rand(parameter.shape, generator=torch.Generator().manual_seed(1)))
    scores = score_matrix(encoding, q, k, torch.arange(6), torch.arange(6))
    assert (scores[..., 5, :] - scores[..., 5, 5:]).abs().max() > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_at_lag_zero_the_score_is_that_of_the_content(name):
    encoding = encoding_of(name)
    q, k = example()
    for position in (0, 3, 100_000):
        at = torch.full((6,), position)
        scores, error = expected_scores(name, q, k, at, at)
        plain = q @ k.transpose(-1, -2)
        if isinstance(encoding, ScoreEncoding):
            plain = encoding(plain, q, k, torch.zeros(6).long(), torch.zeros(6).long())
        elif not encoding.keeps_norm:
            continue  # a random code scales each feature; its own tests hold it to its template
        assert ((scores - plain).abs() - 5 * error).max() < 1e-9


@pytest.mark.parametrize("name", NAMES)
def test_norms_are_kept(name):
    encoding = encoding_of(name)
    if isinstance(encoding, ScoreEncoding) or not encoding.keeps_norm:
        assert isinstance(encoding, ScoreEncoding) or encoding.relative == "in expectation"
        return
    q, k = example()
    positions = torch.tensor([0, 1, 2, 511, 100_000, 2**31 - 1])
    for before, after in zip((q, k), encoding(q, k, positions, positions), strict=True):
        assert after.shape[-1] == encoding.feature_dim
        torch.testing.assert_close(after.norm(dim=-1), before.norm(dim=-1), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_positions_of_a_batch_are_positions_of_its_rows(name):
    encoding = encoding_of(name)
    q, k = example()
    positions = torch.stack([torch.arange(6), torch.arange(6) + 11])
    together = score_matrix(encoding, q, k, positions, positions)
    for row in range(2):
        alone = score_matrix(
            encoding, q[row : row + 1], k[row : row + 1], positions[row], positions[row]
        )
        torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-9, atol=1e-9)


# --- precision ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_half_types_are_finite_and_right_within_their_own_rounding(name, dtype):
    exact, rounded = encoding_of(name), encoding_of(name).to(dtype)
    q, k = (x.to(dtype) for x in example())
    positions = torch.tensor([0, 1, 511, 4096, 16383, 16384])
    if isinstance(exact, ScoreEncoding):
        wanted = [exact.bias(q.double(), k.double(), positions, positions)]
        got = [rounded.bias(q, k, positions, positions)]
        slack = 8 * WIDTH  # a projection of the model's width is summed in the type itself
    else:
        wanted = exact(q.double(), k.double(), positions, positions)
        got = rounded(q, k, positions, positions)
        slack = 1
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == dtype
        assert a.isfinite().all()
        largest = b.abs().max().clamp_min(1)
        assert (a.double() - b).abs().max() <= slack * torch.finfo(dtype).eps * largest


@pytest.mark.parametrize("name", NAMES)
def test_no_parameter_or_buffer_of_an_encoding_is_rounded_below_float32(name):
    encoding = encoding_of(name)
    before = {key: value.clone() for key, value in encoding.state_dict().items()}
    encoding.half().bfloat16().float()
    assert all(torch.equal(before[key], value) for key, value in encoding.state_dict().items())


# --- the module --------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "attention_type"), PAIRS)
def test_incremental_through_beam_reorder_equals_parallel(name, attention_type):
    module = attention_of(name, attention_type)
    x = torch.randn(9, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    orders = {3: torch.tensor([2, 0, 1]), 6: torch.tensor([1, 1, 0, 2])}
    state, history, outputs = {}, [], []
    for step in range(9):
        if step in orders:
            module.reorder_incremental_state(state, orders[step])
            history = [h[:, orders[step]] for h in history]
            outputs = [o[:, orders[step]] for o in outputs]
            x = x[:, orders[step]]
        history.append(x[step : step + 1])
        outputs.append(module(x[step : step + 1], incremental_state=state)[0])
    parallel, _ = module(torch.cat(history))
    torch.testing.assert_close(torch.cat(outputs), parallel, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("name", "attention_type"), PAIRS)
def test_a_prefix_in_one_block_then_single_tokens_equals_parallel(name, attention_type):
    module = attention_of(name, attention_type)
    x = torch.randn(9, 2, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    state = {}
    parts = [module(x[cut], incremental_state=state)[0] for cut in (slice(0, 5), slice(5, 6))]
    parts.append(module(x[6:], incremental_state=state)[0])
    torch.testing.assert_close(torch.cat(parts), module(x)[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize(("name", "attention_type"), PAIRS)
def test_left_padded_equals_right_padded_equals_unpadded(name, attention_type, causal):
    module = attention_of(name, attention_type, causal=causal)
    x = torch.randn(5, 1, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    junk = torch.full((3, 1, WIDTH), 7.0, dtype=torch.float64)
    full = torch.randn(8, 1, WIDTH, dtype=torch.float64)
    none, dead = torch.zeros(1, 5).bool(), torch.ones(1, 3).bool()
    mask = torch.cat([torch.cat([dead, none], 1), torch.cat([none, dead], 1), torch.zeros(1, 8)])
    batch = torch.cat([torch.cat([junk, x]), torch.cat([x, junk]), full], dim=1)
    out, _ = module(batch, key_padding_mask=mask.bool())
    alone, _ = module(x)
    torch.testing.assert_close(out[3:, :1], alone, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(out[:5, 1:2], alone, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(out[:, 2:], module(full)[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("name", "attention_type"), PAIRS)
def test_the_gradient_to_the_future_is_exactly_zero(name, attention_type):
    module = attention_of(name, attention_type)
    x = torch.randn(150, 1, WIDTH, dtype=torch.float64).requires_grad_()
    out, _ = module(x)
    (grad,) = torch.autograd.grad(out[:70].sum(), x)
    assert torch.count_nonzero(grad[70:]) == 0
    assert torch.count_nonzero(grad[:70]) > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("name", "attention_type"), PAIRS)
def test_a_module_in_half_precision_is_finite(name, attention_type, dtype):
    vanishes = encoding_of(name).denominator_vanishes and dtype == torch.float16
    x = torch.randn(200, 2, WIDTH, generator=torch.Generator().manual_seed(4)).to(dtype)
    x.requires_grad_()
    assert attention_of(name, attention_type).to(dtype)(x)[0].isfinite().all()
    normalizer = "layernorm" if vanishes else "rotated"
    out, _ = attention_of(name, attention_type, normalizer=normalizer).to(dtype)(x)
    out.float().sum().backward()
    assert out.isfinite().all()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("attention_type", ["linear", "softmax"])
def test_all_encodings_start_from_the_same_weights_elsewhere(attention_type):
    names = [name for name, kind in PAIRS if kind == attention_type]
    first = attention_of(names[0], attention_type).state_dict()
    for name in names:
        state = attention_of(name, attention_type).state_dict()
        for key in first:
            assert torch.equal(state[key], first[key]), (name, key)


@pytest.mark.parametrize(("name", "attention_type"), PAIRS)
def test_the_random_parts_are_saved(name, attention_type):
    one = attention_of(name, attention_type, seed=0)
    two = attention_of(name, attention_type, seed=1)
    x = torch.randn(9, 2, WIDTH, dtype=torch.float64)
    one(x), two(x)  # whatever is cached must follow the loaded state
    two.load_state_dict(one.state_dict())
    assert torch.equal(one(x)[0], two(x)[0])


@pytest.mark.parametrize("name", NAMES)
def test_two_layers_of_one_seed_draw_the_same_and_of_two_seeds_differ(name):
    state, same, other = (encoding_of(name, seed=s).state_dict() for s in (5, 5, 6))
    assert all(torch.equal(state[key], same[key]) for key in state)
    random = [key for key in state if key.endswith(("v", "permutation"))]
    assert all(not torch.equal(state[key], other[key]) for key in random)


@pytest.mark.parametrize("name", [n for n in NAMES if not encoding_of(n).serves_linear])
def test_an_encoding_that_needs_scores_is_refused_by_linear_attention(name):
    with pytest.raises(ValueError, match="softmax attention"):
        attention_of(name, "linear")
