"""``position_grid``: encodings of sequences on a grid."""

import copy

import pytest
import torch
from torch import nn

from lrpe_fairseq.attention.multihead import feature_map
from lrpe_fairseq.encodings import ENCODINGS, EncodingOptions, QueryKeyEncoding, build_encoding
from lrpe_fairseq.encodings.core.grids import rows_and_columns
from lrpe_fairseq.encodings.core.sharing import share_across_layers
from lrpe_fairseq.errors import ChoiceError
from lrpe_fairseq.kernels.encode import encode_cpu
from tests.references import score_matrix

HEADS, WIDTH = 2, 8
AT = torch.arange(12)


def encoding_of(name, kind, grid=4, width=WIDTH, seed=0, causal=False, **options):
    own = EncodingOptions(grid_width=grid, position_grid=kind, **options)
    return build_encoding(name, width, HEADS, seed=seed, causal=causal, options=own).eval()


def example(time=12, width=WIDTH, dtype=torch.float64):
    generator = torch.Generator().manual_seed(width)
    shape = (2, HEADS, time, width)
    return [torch.randn(shape, generator=generator, dtype=dtype) for _ in range(2)]


def refusal(name, kind, **options):
    try:
        encoding_of(name, kind, **options)
    except ChoiceError as error:
        return str(error)


SEQUENCES = [
    name
    for name in ENCODINGS
    if isinstance(build_encoding(name, WIDTH, HEADS, causal=True), QueryKeyEncoding)
    and refusal(name, "sum") is None
]


def test_rows_and_columns():
    row, column = rows_and_columns(torch.tensor([[0, 5], [-1, 2**31 - 1]]), 4)
    assert row.tolist() == [[0, 1], [-1, 2**29 - 1]]
    assert column.tolist() == [[0, 1], [3, 3]]
    row, column = rows_and_columns(AT, 0)
    assert row is AT
    assert column.tolist() == [0] * 12
    assert row.dtype == column.dtype == torch.int64


@pytest.mark.parametrize("name", SEQUENCES)
def test_axial_is_one_encoding_by_the_row_and_one_by_the_column(name):
    encoding, (q, k) = encoding_of(name, "axial", seed=3), example()
    row, column = rows_and_columns(AT, 4)
    expected = torch.zeros(())
    for axis, (at, half) in enumerate([(row, slice(0, 4)), (column, slice(4, 8))]):
        part = build_encoding(name, 4, HEADS, seed=6 + axis).eval()
        expected = expected + score_matrix(part, q[..., half], k[..., half], at, at)
    found = score_matrix(encoding, q, k, AT, AT)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert encoding(q, k, AT, AT)[0].shape[-1] == encoding.feature_dim


@pytest.mark.parametrize("name", SEQUENCES)
def test_sum_is_the_encoding_at_row_plus_column(name):
    encoding, (q, k) = encoding_of(name, "sum"), example()
    plain, at = build_encoding(name, WIDTH, HEADS).eval(), AT // 4 + AT % 4
    for found, expected in zip(encoding(q, k, AT, AT), plain(q, k, at, at), strict=True):
        assert torch.equal(found, expected)
    assert encoding.feature_dim == plain.feature_dim


@pytest.mark.parametrize(
    "name", ["rope", "lrpe-type2", "lrpe-type8", "lrpe-tmlr-type1", "lrpe-type4"]
)
@pytest.mark.parametrize("kind", ["sum", "axial"])
def test_one_pass_is_the_encoding_and_its_gradients(name, kind):
    if encode_cpu.library() is None:
        pytest.skip("encode_cpu.cpp does not compile here")
    encoding, (x, _) = encoding_of(name, kind), example(dtype=torch.float32)
    x.requires_grad_()
    found = encoding.encode_both(x, x, AT, AT, phi=True)[0]
    exact, y = copy.deepcopy(encoding).double(), x.detach().double().requires_grad_()
    expected = exact(feature_map(y), feature_map(y), AT, AT)[0]
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    weights = torch.linspace(-1, 1, found.numel()).view_as(found)
    grads = torch.autograd.grad(found, [x, *encoding.parameters()], weights)
    wanted = torch.autograd.grad(expected, [y, *exact.parameters()], weights.double())
    for a, b in zip(grads, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


def test_a_part_without_a_kernel_is_encoded_by_its_definition():
    """Halves of odd width, and float64."""
    x, _ = example(width=6, dtype=torch.float32)
    for kind, rows in (("axial", x), ("sum", x.double())):
        encoding = encoding_of("rope", kind, width=6)
        found = encoding.encode_both(rows, rows, AT, AT, phi=True)
        expected = encoding(feature_map(rows), feature_map(rows), AT, AT)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_layers_share_the_parameters_of_one_axis():
    layers = nn.ModuleList(encoding_of("spe", "axial", spe_shared=True, seed=s) for s in (1, 2))
    share_across_layers(layers)
    first, second = layers
    assert second.row.code is first.row.code
    assert second.column.code is first.column.code
    assert first.row.code is not first.column.code


@pytest.mark.parametrize(
    ("name", "kind", "options", "message"),
    [
        ("t5", "axial", {}, "'t5' cannot .* 'axial': it needs the score matrix"),
        ("rope-2d", "sum", {}, "'rope-2d' cannot .* 'sum': it reads rows and columns itself"),
        ("gated:rope", "sum", {"causal": True}, "its decay counts tokens, not rows"),
        ("permuteformer", "axial", {"causal": True}, "its decay counts tokens, not rows"),
        ("ape:sequence", "axial", {"ape_decay": 0.5}, "its decay counts tokens, not rows"),
        ("ape:cycle5", "axial", {"ape_decay": 0.5}, "its decay counts .* leave --ape-decay at 1"),
        ("ape-tree", "sum", {"ape_decay": 0.5}, "its decay counts .* leave --ape-decay at 1"),
        ("rope", "axial", {"width": 7}, "the head width must be even, got 7"),
        ("rope", "axial", {"grid": 0}, "'axial' needs the number of columns .* set --grid-width"),
        (
            "rope",
            "flat",
            {"grid": -1},
            "--grid-width must be at least 0 and .*, not -1",
        ),
        ("rope", "both", {}, "unknown position grid 'both'; choose one of flat, sum, axial"),
        ("rope", "axial", {"width": 2}, "a rotation needs a head width of at least 2, got 1"),
    ],
)
def test_what_has_no_meaning_is_refused_in_one_sentence(name, kind, options, message):
    with pytest.raises(ChoiceError, match=message):
        encoding_of(name, kind, **options)
