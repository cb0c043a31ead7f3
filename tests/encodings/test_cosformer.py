"""cosFormer against its equation."""

import math

import pytest
import torch

from lrpe_fairseq.encodings import EncodingOptions, build_encoding
from tests.references import score_matrix

LENGTH = 12


def encoding_of(width=6, **options):
    return build_encoding("cosformer", width, 2, options=EncodingOptions(**options))


def example(time=40, width=6):
    generator = torch.Generator().manual_seed(0)
    shape = (2, 2, time, width)
    return [torch.rand(shape, generator=generator, dtype=torch.float64) for _ in range(3)]


def cosines(time, length):
    """cos(pi (s - t) / 2M), one by one."""
    rows = [[math.cos(math.pi * (s - t) / (2 * length)) for t in range(time)] for s in range(time)]
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("width", [6, 5])
@pytest.mark.parametrize("length", [LENGTH, 4096])
def test_the_score_is_the_content_times_the_cosine(length, width):
    q, k, _ = example(width=width)
    at = torch.arange(40)
    found = score_matrix(encoding_of(width, cosformer_length=length), q, k, at, at)
    expected = q @ k.transpose(-1, -2) * cosines(40, length)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
