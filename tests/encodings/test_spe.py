"""SPE in expectation against its analytic template, and what must hold exactly."""

import math
from fractions import Fraction

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lrpe_fairseq.encodings import EncodingOptions, build_encoding
from lrpe_fairseq.encodings.core.sharing import share_across_layers
from lrpe_fairseq.encodings.rotations.spe import noise_like

HEADS, WIDTH = 2, 4
FORWARDS = 300
MANY = 10_000
STRIDE = 11
"""Tokens between the positions of a comparison: a sine starts with waves of 50 and more."""
WITHIN = 5.0
"""Standard errors: a mean of a few hundred entries exceeds this with probability 1e-4."""


def build(head_dim=WIDTH, heads=HEADS, seed=0, departures=(), **knobs):
    knobs = {"spe_sines": 3, **knobs}
    options = EncodingOptions(fidelity=frozenset(departures), **knobs)
    return build_encoding("spe", head_dim, heads, seed=seed, options=options)


def example(length, batch=2, head_dim=WIDTH, heads=HEADS):
    generator = torch.Generator().manual_seed(length)
    return torch.randn(2, batch, heads, length, head_dim, generator=generator)


def expected_scores(encoding, q, k, q_positions, k_positions):
    """sum_d q_s[d] k_t[d] c_d(s - t) from the template: (B, H, T, S)."""
    lag = q_positions[:, None] - k_positions
    c = encoding.template(lag.flatten()).unflatten(-1, lag.shape)  # H D T S
    return torch.einsum("bhtd,bhsd,hdts->bhts", q.double(), k.double(), c)


@torch.no_grad()
def sampled_scores(encoding, q, k, q_positions, k_positions, forwards=FORWARDS):
    """Mean and standard error of q~.k~ over training forwards, each (B, H, T, S)."""
    torch.manual_seed(1)
    draws = []
    for _ in range(forwards):
        q2, k2 = encoding(q, k, q_positions, k_positions)
        draws.append((q2 @ k2.transpose(-1, -2)).double())
    draws = torch.stack(draws)
    return draws.mean(0), draws.std(0) / forwards**0.5


def deviation(encoding, q, k, q_positions, k_positions):
    """The largest distance of the sampled from the expected scores, in standard errors."""
    mean, error = sampled_scores(encoding, q, k, q_positions, k_positions)
    expected = expected_scores(encoding, q, k, q_positions, k_positions)
    return ((mean - expected).abs() / error).max()


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("realizations", [WIDTH, 64])
def test_mean_scores_are_the_plain_scores_times_the_template(realizations, gated):
    encoding = build(spe_realizations=realizations, spe_gated=gated).train()
    q, k = example(9, batch=1)
    positions = torch.arange(20, 29) * STRIDE
    assert deviation(encoding, q, k, positions, positions) < WITHIN


def test_queries_and_keys_at_different_positions_share_their_noise():
    encoding = build(spe_realizations=64).train()
    q, k = example(9, batch=1)
    q_positions, k_positions = torch.arange(30, 34), torch.tensor([28, 30, 33, 36, 90])
    assert deviation(encoding, q[:, :, :4], k[:, :, :5], q_positions, k_positions) < WITHIN


def test_the_fixed_noise_of_evaluation_has_the_same_template():
    encoding = build(spe_realizations=MANY, spe_gated=False).eval()
    q, k = example(5, batch=1)
    positions = torch.arange(253, 258)
    with torch.no_grad():
        q2, k2 = encoding(q, k, positions, positions)
        expected = expected_scores(encoding, q, k, positions, positions)
    scale = q.norm(dim=-1).max() * k.norm(dim=-1).max() * encoding.template(positions[:1] * 0).max()
    error = ((q2 @ k2.transpose(-1, -2)).double() - expected).abs().max() / scale
    assert error < WITHIN / math.sqrt(MANY)


def library_sine_features(encoding, q, k, length):
    """SineSPE and SPEFilter as published, on (B, T, H, D), under the encoding's fixed noise."""
    code, width = encoding.code, q.shape[-1]
    sines, realizations = code.frequency.shape[-1], encoding.realizations
    freqs = torch.sigmoid(code.frequency[:, :, None, :]) / 2.0
    phases_k = 2 * math.pi * freqs * torch.arange(length)[None, None, :, None]
    phases_q = phases_k + code.offset[:, :, None, :]
    omega = [torch.cat([p.cos(), p.sin()], dim=-1) for p in (phases_q, phases_k)]
    gains = F.softplus(code.gain).repeat(1, 1, 2)
    z = code.noise / math.sqrt(2 * sines) * gains[..., None]
    scale = (realizations * width) ** 0.25
    qbar, kbar = ((o @ z).permute(2, 0, 1, 3) / scale for o in omega)  # T H D R
    gate = torch.sigmoid(encoding.gate)[..., None]
    eps = encoding.gate_noise / scale
    qbar, kbar = (torch.sqrt(1 - gate) * c + torch.sqrt(gate) * eps for c in (qbar, kbar))
    return (qbar * q[..., None]).sum(-2), (kbar * k[..., None]).sum(-2)


@pytest.mark.parametrize("realizations", [WIDTH, 9])
def test_features_are_those_of_the_published_library_up_to_the_documented_factor(realizations):
    encoding = build(spe_realizations=realizations).double().eval()
    q, k = example(11).double()
    positions = torch.arange(11)
    ours = encoding(q, k, positions, positions)
    theirs = library_sine_features(encoding, q.transpose(1, 2), k.transpose(1, 2), 11)
    factor = (WIDTH / realizations) ** 0.25  # 1 where R = D
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, factor * b.transpose(1, 2), rtol=1e-9, atol=1e-12)


def test_parameters_start_as_in_the_published_library():
    code = build(head_dim=64, heads=8, spe_sines=10).code
    assert abs(code.frequency.mean() + 4) < 0.1
    assert abs(code.frequency.std() - 1) < 0.1
    assert abs(code.offset.std() - 1) < 0.1
    # lambda 2 / sqrt(|lambda|) has the norm 2 sqrt(|lambda|), about 2 sqrt(sqrt(10))
    assert abs(code.gain.norm(dim=-1).mean() - 2 * 10**0.25) < 0.2


def test_evaluation_is_deterministic_and_training_is_not():
    encoding = build()
    q, k = example(7)
    positions = torch.arange(7)
    fixed = [encoding.eval()(q, k, positions, positions) for _ in range(2)]
    drawn = [encoding.train()(q, k, positions, positions) for _ in range(2)]
    for place in range(2):
        assert torch.equal(fixed[0][place], fixed[1][place])
        assert (drawn[0][place] - drawn[1][place]).abs().min() > 0


def noise_of(rank, monkeypatch, encoding, seed=3):
    """Codes of two forward passes and the noise of the gates, drawn in a process of this rank."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: rank is not None)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    torch.manual_seed(seed)
    drawn = []
    for _ in range(2):
        encoding.code.draw()
        drawn += [encoding.code.drawn, encoding._through_gate(fixed=False)[1]]
    return torch.cat([part.flatten() for part in drawn])


def test_every_process_draws_noise_of_its_own_and_the_same_again(monkeypatch):
    encoding = build(spe_realizations=64).train()
    alone, *ranks = (noise_of(rank, monkeypatch, encoding) for rank in (None, 0, 1, 2, 3))
    assert torch.equal(ranks[0], alone)
    for rank, noise in enumerate(ranks):
        assert torch.equal(noise, noise_of(rank, monkeypatch, encoding))
        assert not torch.equal(noise, noise_of(rank, monkeypatch, encoding, seed=4))
    correlation = torch.corrcoef(torch.stack(ranks)) - torch.eye(4)
    assert correlation.abs().max() < WITHIN / math.sqrt(len(alone))


def test_the_noise_of_another_process_is_standard_normal(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    torch.manual_seed(0)
    for like in (torch.zeros(2, MANY), torch.zeros(2, MANY, dtype=torch.float64)):
        noise = noise_like(like)
        assert (noise.shape, noise.dtype) == (like.shape, like.dtype)
        assert noise.mean().abs() < WITHIN / math.sqrt(2 * MANY)
        assert (noise.square().mean() - 1).abs() < WITHIN * math.sqrt(2 / (2 * MANY))


def test_gradients_are_the_derivatives_of_the_features():
    encoding = build(head_dim=2, heads=1, spe_sines=2).double().eval()
    parameters = list(encoding.parameters())
    x, positions = example(4, 1, 2, 1)[0].double(), torch.tensor([0, 1, 2, 9])

    def features(*values):
        named = dict(zip(dict(encoding.named_parameters()), values, strict=True))
        return torch.func.functional_call(encoding, named, (x, x, positions, positions))

    assert torch.autograd.gradcheck(features, parameters)


@pytest.mark.parametrize("position", [1, 511, 100_000, 2**24 + 1, 2**31])
def test_waves_have_the_exact_phase_at_any_position(position):
    code = build(head_dim=1, heads=1, spe_sines=1).code
    with torch.no_grad():
        waves = code.waves(torch.tensor([position])).flatten()
        frequency = float(torch.sigmoid(code.frequency.double()) / 2)
    turns = float(Fraction(frequency) * position % 1)
    exact = torch.tensor([math.cos(2 * math.pi * turns), math.sin(2 * math.pi * turns)])
    torch.testing.assert_close(waves, exact, rtol=0, atol=2e-6)


def test_a_shared_code_has_one_noise_per_forward():
    layers = nn.ModuleList([build(seed=s, spe_shared=True) for s in range(3)])
    share_across_layers(layers)
    q, k = example(7)
    positions = torch.arange(7)
    with torch.no_grad():
        for layer in layers:  # what passes the gate is each layer's own: close it
            layer.gate.fill_(-math.inf)
        first, second = ([layer(q, k, positions, positions)[0] for layer in layers] for _ in "ab")
        for forward in (first, second):
            assert torch.equal(forward[0], forward[1])
            assert torch.equal(forward[0], forward[2])
        assert not torch.equal(first[0], second[0])


def test_along_batch_codes_carry_no_position_and_depend_on_the_place_in_the_batch():
    encoding = build(departures=["spe-along-batch"]).eval()
    x = torch.ones(3, HEADS, 6, WIDTH)
    q, k = encoding(x, x, torch.arange(6), torch.arange(6))
    for features in (q, k):
        torch.testing.assert_close(features, features[:, :, :1].expand_as(features))
        assert (features[1:] - features[:-1]).abs().min() > 1e-6


def test_the_published_filter_comes_after_the_feature_map_and_has_one_sine():
    encoding = build(departures=["spe-after-feature-map", "spe-one-sine"])
    assert not encoding.before_feature_map
    assert encoding.code.frequency.shape[-1] == 1


def test_noise_at_evaluation_is_drawn_anew_under_its_departure():
    encoding = build(departures=["spe-noise-at-eval"]).eval()
    q, k = example(7)
    one, other = (encoding(q, k, torch.arange(7), torch.arange(7))[0] for _ in range(2))
    assert (one - other).abs().min() > 0
