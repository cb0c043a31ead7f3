"""FoPE against its equation."""

import math

import pytest
import torch
from torch import nn

from lrpe_fairseq.encodings import EncodingOptions, build_encoding

HEADS, WIDTH = 3, 16
AT = torch.tensor([0, 1, 2, 63, 511, 100_003])


def encoding_of(width=WIDTH, departures=(), seed=0, **options):
    own = EncodingOptions(frozenset(departures), **options)
    return build_encoding("fope", width, HEADS, seed=seed, options=own)


def example(width):
    generator = torch.Generator().manual_seed(width)
    return torch.randn(2, 2, HEADS, len(AT), width, generator=generator, dtype=torch.float64)


def frequencies(width, length):
    """RoPE's frequencies as a list, 0 for those that complete no period within ``length``."""
    even = width - width % 2
    all_of_them = [10000 ** (-2 * i / even) for i in range(even // 2)]
    return [w if w >= 2 * math.pi / length else 0.0 for w in all_of_them]


def dense(encoding, x, at, length):
    """The series of every head and pair, one by one."""
    a, b = encoding.core.coefficients.double()
    omega = frequencies(x.shape[-1], length)
    kept, out = [w for w in omega if w], x.clone()
    for head in range(HEADS):
        for t, s in enumerate(at.tolist()):
            for j, w in enumerate(omega):
                c, sn = 1.0, 0.0
                if w:
                    c = sum(a[head, i, j] * math.cos(u * s) for i, u in enumerate(kept))
                    sn = sum(b[head, i, j] * math.sin(u * s) for i, u in enumerate(kept))
                x0, x1 = x[:, head, t, 2 * j], x[:, head, t, 2 * j + 1]
                out[:, head, t, 2 * j] = x0 * c - x1 * sn
                out[:, head, t, 2 * j + 1] = x0 * sn + x1 * c
    return out


@pytest.mark.parametrize(("width", "length"), [(WIDTH, 512), (WIDTH, 7), (9, 64), (16, 10**7)])
def test_features_are_the_series_of_the_equation(width, length):
    encoding = encoding_of(width, fope_length=length)
    q, k = example(width)
    for x, found in zip((q, k), encoding(q, k, AT, AT), strict=True):
        expected = dense(encoding, x, AT, length)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    assert not list(encoding.parameters())


def test_the_coefficients_are_the_identity_and_a_draw_of_xavier():
    noise = torch.stack([encoding_of(64, seed=s).core.coefficients for s in range(20)])
    count = noise.shape[-1]
    noise = noise - torch.eye(count)
    assert abs(noise.mean()) < 1e-2
    torch.manual_seed(0)
    draws = [nn.init.xavier_normal_(torch.empty(HEADS, count, count), 0.3) for _ in range(40)]
    assert float(noise.std()) == pytest.approx(float(torch.stack(draws).std()), rel=0.03)
