"""FoPE against its equation."""

import math

import pytest
import torch
from torch import nn

from lrpe_fairseq.encodings import EncodingOptions, build_encoding
from tests.references import score_matrix

HEADS, WIDTH = 3, 16
AT = torch.tensor([0, 1, 2, 63, 511, 100_003])


def encoding_of(width=WIDTH, departures=(), seed=0, **options):
    own = EncodingOptions(frozenset(departures), **options)
    return build_encoding("fope", width, HEADS, seed=seed, options=own)


def example(time=len(AT), width=WIDTH, dtype=torch.float64):
    generator = torch.Generator().manual_seed(width)
    shape = (2, HEADS, time, width)
    return [torch.randn(shape, generator=generator, dtype=dtype) for _ in range(2)]


def frequencies(width, length):
    """RoPE's frequencies as a list, 0 for those that complete no period within ``length``."""
    even = width - width % 2
    all_of_them = [10000 ** (-2 * i / even) for i in range(even // 2)]
    return [w if w >= 2 * math.pi / length else 0.0 for w in all_of_them]


def dense(encoding, x, at, length, filler=0.0):
    """The series of every head and pair, one by one; ``filler`` is the sine of frequency 0."""
    a, b = encoding.core.coefficients.double()
    omega = frequencies(x.shape[-1], length)
    kept, out = [w for w in omega if w], x.clone()
    for head in range(HEADS):
        for t, s in enumerate(at.tolist()):
            for j, w in enumerate(omega):
                c, sn = 1.0, filler
                if w:
                    c = sum(a[head, i, j] * math.cos(u * s) for i, u in enumerate(kept))
                    sn = sum(b[head, i, j] * math.sin(u * s) for i, u in enumerate(kept))
                x0, x1 = x[:, head, t, 2 * j], x[:, head, t, 2 * j + 1]
                out[:, head, t, 2 * j] = x0 * c - x1 * sn
                out[:, head, t, 2 * j + 1] = x0 * sn + x1 * c
    return out


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize(("width", "length"), [(WIDTH, 512), (WIDTH, 7), (9, 64), (16, 10**7)])
def test_features_are_the_series_of_the_equation(width, length, learned):
    encoding = encoding_of(width, fope_length=length, fope_learned=learned)
    q, k = example(width=width)
    for x, found in zip((q, k), encoding(q, k, AT, AT), strict=True):
        expected = dense(encoding, x, AT, length)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    assert [p.requires_grad for p in encoding.parameters()] == ([True] if learned else [])


@pytest.mark.parametrize("kind", ["shared", "own"])
def test_the_kernel_gives_the_features_and_gradients_of_float64(kind):
    at = AT if kind == "shared" else torch.stack([AT, AT + 5])
    results = []
    for dtype in (torch.float32, torch.float64):
        encoding = encoding_of(fope_learned=True).to(dtype)
        x = example(dtype=torch.float32)[0].to(dtype).requires_grad_()
        out = encoding(x, x, at, at)[0]
        weights = torch.linspace(-1, 1, out.numel()).view_as(out).to(out)
        results.append([out, *torch.autograd.grad(out, [x, *encoding.parameters()], weights)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


def test_the_departure_doubles_the_score_of_frequency_zero():
    name = "fope-zero-frequency-doubled"
    encoding, (q, k) = encoding_of(departures=[name], fope_length=100), example()
    found = encoding(q, k, AT, AT)
    torch.testing.assert_close(found[0], dense(encoding, q, AT, 100, 1.0), rtol=0, atol=1e-9)
    kept = 2 * len(encoding.core.theta)
    q0, k0 = (x[..., kept:] for x in (q, k))
    score = found[0][..., kept:] @ found[1][..., kept:].transpose(-1, -2)
    torch.testing.assert_close(score, 2 * q0 @ k0.transpose(-1, -2))


def test_the_coefficients_are_the_identity_and_a_draw_of_xavier():
    noise = torch.stack(
        [encoding_of(64, seed=s, fope_sigma=0.5).core.coefficients for s in range(20)]
    )
    count = noise.shape[-1]
    noise = noise - torch.eye(count)
    assert abs(noise.mean()) < 1e-2
    torch.manual_seed(0)
    draws = [nn.init.xavier_normal_(torch.empty(HEADS, count, count), 0.5) for _ in range(40)]
    assert float(noise.std()) == pytest.approx(float(torch.stack(draws).std()), rel=0.03)


@pytest.mark.parametrize("count", [True, False])
def test_gradients_of_learned_coefficients_equal_finite_differences(count):
    encoding = encoding_of(4, fope_learned=True, fope_length=10_000 if count else 50).double()
    (q, k), at = example(4, 4), torch.tensor([0, 1, 5, 11])
    assert torch.autograd.gradcheck(
        lambda *_: score_matrix(encoding, q, k, at, at), list(encoding.parameters())
    )
