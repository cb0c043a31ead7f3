"""LieRE and ComRoPE against their equations, and the equalities between them and with RoPE."""

import pytest
import torch

from lrpe_fairseq.encodings import EncodingOptions, build_encoding
from lrpe_fairseq.encodings.rotations.generators import Spectrum, definition, exponential, turn
from tests.references import gradients_in_and_out_of_autocast

NAMES = ("liere", "comrope-ap", "comrope-ld")


def build(name, head_dim=8, heads=2, width=0, block=4, seed=0):
    options = EncodingOptions(grid_width=width, rotation_block=block)
    return build_encoding(name, head_dim, heads, seed=seed, options=options)


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def skew(*shape, seed=0):
    a = normal(*shape, seed=seed)
    return a - a.transpose(-1, -2)


def generators(encoding, name):
    """A_a of every axis, head and block, (N, H, J, b, b), entry by entry from the parameters."""
    heads, blocks, b, axes = encoding.spec.num_heads, encoding.blocks, encoding.block, encoding.axes
    if name == "liere":
        found = torch.zeros(axes, heads, blocks, b, b, dtype=torch.float64)
        below = [(i, j) for i in range(b) for j in range(i)]
        for number, (i, j) in enumerate(below):
            found[..., i, j] = encoding.lower[..., number].double()
            found[..., j, i] = -encoding.lower[..., number].double()
        return found
    p = encoding.p.double()
    factors = torch.zeros(axes, blocks, dtype=torch.float64)
    for axis in range(axes):
        for block in range(blocks):
            ld = name == "comrope-ld"
            factors[axis, block] = encoding.theta[axis, block] if ld else block % axes == axis
    return factors[:, None, :, None, None] * (p - p.transpose(-1, -2))


def reference(encoding, name, x, positions):
    """R(p) x, one matrix exponential per head, block and position; x (B, H, T, D)."""
    if positions.dim() == 2:
        rows = zip(x.split(1), positions, strict=True)
        return torch.cat([reference(encoding, name, *row) for row in rows])
    width, a, b = encoding.spec.options.grid_width, generators(encoding, name), encoding.block
    out = x.clone()
    for t, s in enumerate(positions.tolist()):
        span = max(width - (name == "liere"), 1)
        p = (s // width / span, s % width / span) if width else (s,)
        for h in range(encoding.spec.num_heads):
            for j in range(encoding.blocks):
                rotation = torch.matrix_exp(sum(c * m for c, m in zip(p, a[:, h, j], strict=True)))
                own = slice(j * b, (j + 1) * b)
                out[:, h, t, own] = x[:, h, t, own] @ rotation.T
    return out


AT = torch.tensor([0, 1, 2, 5, 5, 11, 30])


@pytest.mark.parametrize("positions", [AT, torch.stack([AT, AT + 3, AT.flip(0)])])
@pytest.mark.parametrize("width", [0, 3])
@pytest.mark.parametrize("name", NAMES)
def test_outputs_and_gradients_equal_the_equation(name, width, positions):
    """Also for a head width that is not a multiple of b, in float64."""
    encoding = build(name, head_dim=10, width=width).double()
    for parameter in encoding.parameters():
        parameter.data += 0.3 * normal(*parameter.shape, seed=5)
    x = normal(3, 2, 7, 10).requires_grad_()
    weights = normal(3, 2, 7, 10, seed=1)
    inputs = [x, *encoding.parameters()]
    results = []
    both = encoding(x, 2 * x, positions, positions)
    apart = [encoding(y, y, positions, positions.clone())[0] for y in (x, 2 * x)]
    expected = [reference(encoding, name, y, positions) for y in (x, 2 * x)]
    for q, k in (both, apart, expected):
        loss = (weights * (q + k.sin())).sum()
        results.append([q, k, *torch.autograd.grad(loss, inputs)])
    for found in results[:2]:
        torch.testing.assert_close(found, results[2], rtol=1e-9, atol=1e-9)


def equal_eigenvalues():
    """Generators with zero and with repeated eigenvalues, (3, 4, 4)."""
    a = torch.zeros(3, 4, 4, dtype=torch.float64)
    a[1, 1, 0], a[1, 3, 2] = 0.7, 0.7  # twice the same rotation
    a[2, 1, 0] = 0.4  # one rotation, two features unchanged
    return a - a.transpose(-1, -2)


@pytest.mark.parametrize(
    ("a", "count"),
    [
        (equal_eigenvalues(), 4),
        (equal_eigenvalues()[1:2], 2),
        (skew(3, 5, 5), 3),
        (skew(2, 6, 6), 3),
    ],
    ids=["zero", "repeated", "odd", "even"],
)
def test_the_gradient_is_right_at_equal_and_zero_eigenvalues(a, count):
    """Half of the spectrum is used, unless zero is an eigenvalue twice."""
    groups, width = a.shape[:2]
    assert Spectrum().entry(a).values.shape == (groups, count)
    x, a = normal(groups, 2, 5, width).requires_grad_(), a.clone().requires_grad_()
    u = torch.tensor([0.0, 1.0, 2.5, -3.0, 40.0], dtype=torch.float64)
    u, weights = u.repeat(groups, 1).requires_grad_(), normal(groups, 2, 5, width, seed=2)

    def gradients(function):
        made = function(x, a - a.transpose(-1, -2), u)
        return [made, *torch.autograd.grad((weights * made).sum(), (x, a, u))]

    for found, wanted in zip(gradients(turn), gradients(definition), strict=True):
        assert found.isfinite().all()
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def test_exponentials_of_large_generators_are_orthogonal():
    large = 1e8 * skew(5, 2, 4, 4)
    rotation = exponential(large)
    eye = torch.eye(4).double().expand_as(rotation)
    torch.testing.assert_close(rotation @ rotation.mT, eye, rtol=0, atol=1e-13)
    torch.testing.assert_close(exponential(1e-8 * large), torch.matrix_exp(1e-8 * large))


def test_float32_and_half_gradients_are_close_to_those_of_float64():
    encoding, positions = build("liere"), torch.arange(4000, 4512)
    x, weights = normal(2, 2, 512, 8), normal(2, 2, 512, 8, seed=1)
    grads = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        out = encoding(x.to(dtype), x.to(dtype), positions, positions)[0]
        assert out.dtype == dtype
        grads.append(torch.autograd.grad((out.double() * weights).sum(), encoding.lower)[0])
    for found, limit in zip(grads[1:], (1e-5, 2e-2), strict=True):
        assert (found - grads[0]).norm() < limit * grads[0].norm()


def test_autocast_does_not_round_a_rotation():
    encoding, at = build("comrope-ld"), torch.arange(1000, 1006)
    x = normal(1, 2, 6, 8).float()
    wanted = encoding(x, x, at, at)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(encoding(x, x, at, at)[0], wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("name", "head_dim"), [("liere", 12), ("comrope-ap", 5), ("comrope-ld", 5), ("comrope-ld", 8)]
)
def test_autocast_does_not_round_the_gradients_of_a_rotation(name, head_dim, dtype):
    encoding, at = build(name, head_dim), torch.arange(1000, 1006)
    x = normal(1, 2, 6, head_dim).float().requires_grad_()
    wanted, found = gradients_in_and_out_of_autocast(encoding, x, at, dtype)
    assert all(map(torch.equal, found, wanted))


def scores(encoding, q, k, positions):
    q, k = encoding(q, k, positions, positions)
    return q @ k.transpose(-1, -2)


@pytest.mark.parametrize("name", NAMES)
def test_on_a_line_without_noise_it_is_rope(name, monkeypatch):
    monkeypatch.setattr("lrpe_fairseq.encodings.rotations.lie.NOISE", 0.0)
    x, at = normal(2, 2, 6, 10), torch.tensor([0, 1, 2, 31, 512, 700])
    encoding = build(name, head_dim=10, block=5 if name == "liere" else 2)
    if name == "liere":  # an odd block has two pairs and one feature that is not rotated
        order = [0, 1, 2, 3, 5, 6, 7, 8]
        rope = build_encoding("rope", 8, 2)
        wanted = x.clone()
        wanted[..., order] = rope(x[..., order], x[..., order], at, at)[0]
    else:
        wanted = build_encoding("rope", 10, 2)(x, x, at, at)[0]
    # the frequencies are float32, so an angle at position 700 is off by up to 4e-5
    torch.testing.assert_close(encoding(x, x, at, at)[0], wanted, rtol=0, atol=2e-4)


def test_coordinates_of_a_grid_are_those_of_the_authors_codes():
    """linspace(0, 1) in LieRE and arange / size in ComRoPE, each axis by its own size."""
    at, options = torch.arange(6), EncodingOptions(grid_width=3, grid_height=2)
    for name, rows, columns in (
        ("liere", torch.linspace(0, 1, 2), torch.linspace(0, 1, 3)),
        ("comrope-ap", torch.arange(2) / 2, torch.arange(3) / 3),
    ):
        found = build_encoding(name, 8, 2, options=options).coordinates(at)
        wanted = torch.cartesian_prod(rows, columns)
        torch.testing.assert_close(found.float(), wanted)
    one = build_encoding("liere", 8, 2, options=EncodingOptions(grid_width=1))
    assert one.coordinates(torch.arange(1)).tolist() == [[0.0, 0.0]]


def on_grid(name, rows, columns):
    options = EncodingOptions(grid_width=columns, grid_height=rows, rotation_block=4)
    return build_encoding(name, 8, 2, options=options)


@pytest.mark.parametrize("name", NAMES)
def test_a_trained_encoding_keeps_its_rotations_on_another_grid(name):
    """The cells of the trained grid have the same scores within a larger or smaller one."""
    trained = on_grid(name, 4, 3)
    q, k = normal(1, 2, 4, 8), normal(1, 2, 4, 8, seed=1)
    rows, columns = torch.tensor([0, 1, 1, 3]), torch.tensor([0, 2, 1, 1])
    expected = scores(trained, q, k, 3 * rows + columns)
    largest = expected.abs().max()
    for shape in ((8, 8), (4, 4), (2, 3), (5, 4)):
        other = on_grid(name, *shape)
        before = scores(other, q, k, shape[1] * rows + columns)
        other.load_state_dict(trained.state_dict())
        found = scores(other, q, k, shape[1] * rows + columns)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
        assert (before - expected).abs().max() > 0.05 * largest  # it had another grid before
    again = on_grid(name, 8, 8)
    again.load_state_dict(other.state_dict())  # saved after it was read on another grid
    torch.testing.assert_close(scores(again, q, k, 8 * rows + columns), expected)


@pytest.mark.parametrize("name", NAMES)
def test_coordinates_on_a_larger_grid_go_beyond_those_of_training(name):
    trained, wide = on_grid(name, 4, 4), on_grid(name, 8, 8)
    wide.load_state_dict(trained.state_dict())
    found = wide.coordinates(torch.arange(64)).unflatten(0, (8, 8))
    last = trained.coordinates(torch.arange(16)).unflatten(0, (4, 4))[3, 3]
    torch.testing.assert_close(found[3, 3], last)
    torch.testing.assert_close(found[7, 7], last * 7 / 3)


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_that_is_too_old_to_contain_its_grid_has_that_of_the_model(name):
    encoding, other = on_grid(name, 4, 3), on_grid(name, 4, 3)
    state = encoding.state_dict()
    assert state.pop("grid").tolist() == [4, 3]
    other.load_state_dict(state)
    assert other.grid.tolist() == [4, 3]
    assert "grid" not in state
    assert "grid" not in build(name).state_dict()  # on a line there is none


@pytest.mark.parametrize("name", ["comrope-ap", "comrope-ld"])
def test_comrope_on_a_grid_depends_on_the_differences_of_rows_and_columns(name):
    """Cells moved right by one within a wider grid, or down by one, keep all scores."""
    encoding = build(name, width=8)
    a = generators(encoding, name)
    torch.testing.assert_close(a[0] @ a[1], a[1] @ a[0], rtol=1e-9, atol=1e-9)
    q, k = normal(1, 2, 12, 8), normal(1, 2, 12, 8, seed=1)
    cells = torch.tensor([8 * row + column for row in range(3) for column in range(4)])
    for moved in (cells + 1, cells + 4, cells + 8, cells + 8 * 100_000 + 3):
        torch.testing.assert_close(
            scores(encoding, q, k, cells), scores(encoding, q, k, moved), rtol=0, atol=1e-9
        )


def test_blocks_are_at_most_as_wide_as_the_head_and_each_axis_has_one():
    assert build("liere", head_dim=6, block=8).block == 6
    assert build("comrope-ap", head_dim=6, block=8).block == 6
    axial = build("comrope-ap", head_dim=6, block=8, width=4)
    assert (axial.block, axial.blocks) == (3, 2)
