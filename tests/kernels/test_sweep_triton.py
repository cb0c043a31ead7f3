"""Linear attention with states in registers, against the T x T matrix in float64.

Without a GPU the kernels run in Triton's interpreter (TRITON_INTERPRET=1, see tests/conftest.py).
"""

from functools import partial

import pytest
import torch

from lrpe_fairseq.attention.linear import EPS

pytest.importorskip("triton", reason="the kernels need triton, which is a test dependency")

from lrpe_fairseq.kernels import tiles_triton
from lrpe_fairseq.kernels.linear import full_triton, linear_proof, sweep_triton
from tests import triton_probe
from tests.kernels.flash_cases import stored
from tests.pairwise import pairwise

pytestmark = pytest.mark.skipif(bool(triton_probe.why_not()), reason=triton_probe.why_not())

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, HEADS = 2, 2
BOUND = {torch.float32: 5e-6, torch.float16: 3e-3, torch.bfloat16: 3e-2}
"""Largest error of outputs and gradients, relative to the largest reference (at least 0.02)."""


SHAPES = [(1, 32, 32), (17, 24, 16), (70, 64, 64), (50, 128, 64), (130, 20, 48), (20, 192, 64)]
"""Time, key width and value width."""


def definition(q, k, v, wanted, log_decay, eps, causal=True):
    """The T x T matrix. A decay of 0 or less than e^-1000 is the same."""
    scores = q @ k.mT
    if log_decay is not None:
        rate = log_decay if log_decay.dim() == 3 else log_decay[None, :, None].expand(q.shape[:3])
        total = rate.clamp_min(-1e3).cumsum(-1)
        scores = scores * (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp()
    scores = scores.tril() if causal else scores
    out, denominator = scores @ v, scores.sum(-1)
    if wanted == "normalized":
        out = out / denominator.clamp_min(eps).unsqueeze(-1)
    return out, denominator if wanted == "sums" else None


full_definition = partial(definition, causal=False)


def full_sums(q, k, v, wanted, log_decay, eps):
    return full_triton.full_sums(q, k, v, wanted, eps)


def decay_of(kind, batch, time):
    """Gates may be open, weak, strong and shut."""
    if kind == "head":
        return -torch.tensor([0.0, 0.3])
    gates = -0.1 * torch.rand(batch, HEADS, time)
    gates[..., 3::17], gates[..., 5::23], gates[..., 7::41] = 0.0, -1e4, -30.0
    gates[:, 1, ::29] = -torch.inf
    return gates if kind in ("token", "fixed") else None


def example(time, keys, values, dtype, decay=None, batch=None):
    """q and k positive, all views of (B, T, H, .); the decay."""
    torch.manual_seed(time)
    batch = batch or (BATCH if time < 40 else 1)
    widths = (keys, keys, values)
    rows = (torch.randn(batch, time, HEADS, w).to(dtype) for w in widths)
    q, k, v = (stored(x).transpose(1, 2) for x in rows)
    q, k = (torch.nn.functional.elu(x) + 1 for x in (q, k))
    rate = decay_of(decay, batch, time)
    leaves = [x.to(dtype) for x in (q, k, v)] + ([] if rate is None else [rate])
    leaves = [x.to(DEVICE) for x in leaves]
    if decay == "fixed":  # as that of documents
        leaves[3].fixed = True
    return leaves


def results(form, leaves, wanted, dtype=None):
    """Return the results and the gradients of a weighted sum of their elements."""
    q, k, v, *rest = own = [x.detach().to(dtype or x.dtype) for x in leaves]
    pairs = zip(own, leaves, strict=True)
    learned = [x.requires_grad_() for x, given in pairs if not hasattr(given, "fixed")]
    found = form(q, k, v, wanted, rest[0] if rest else None, EPS)
    found = [x for x in found if x is not None]
    torch.manual_seed(0)
    weights = [torch.randn(x.shape).to(leaves[0].dtype).to(x) for x in found]
    return [*found, *torch.autograd.grad(found, learned, weights)]


def errors(leaves, wanted, form=sweep_triton.causal_sums, reference=definition):
    """The error of every result and gradient, relative to the largest number.

    The gradients of q and k of a single token are 0; their errors are compared with 1.
    """
    found = results(form, leaves, wanted)
    exact = results(reference, leaves, wanted, torch.float64)
    pairs = list(zip(found, exact, strict=True))
    assert all(a.shape == b.shape for a, b in pairs)
    largest = [max(b.abs().max().item(), 0.02) if b.abs().max() > 1e-12 else 1.0 for _, b in pairs]
    differences = ((a.double() - b).abs().max().item() for a, b in pairs)
    return [a / b for a, b in zip(differences, largest, strict=True)]


FACTORS = (SHAPES, ["normalized", "sums", "numerator"], [None, "head", "token", "fixed"],
           [1, 1000], list(BOUND))  # fmt: skip
SLOW = ((70, 64, 64), (50, 128, 64))
"""Shapes that take the interpreter longest."""


LONGEST_TILES = [((130, 20, 48), "numerator", None, n, torch.bfloat16) for n in (1, 1000)]
"""Forms whose tiles have 64 tokens on a large GPU, with a last tile of two."""


def cases(*factors):
    found = pairwise(*factors)
    return [pytest.param(*x, marks=[pytest.mark.exhaustive] * (x[0] in SLOW)) for x in found]


@pytest.mark.parametrize(
    ("shape", "wanted", "decay", "programs", "dtype"),
    [*cases(*FACTORS), *LONGEST_TILES],
)
def test_outputs_and_gradients_equal_the_definition(
    shape, wanted, decay, programs, dtype, monkeypatch
):
    """In one part and in many."""
    monkeypatch.setattr(sweep_triton, "PROGRAMS", programs)
    assert max(errors(example(*shape, dtype, decay), wanted)) <= BOUND[dtype]


@pytest.fixture
def tiles_of_64(monkeypatch):
    """What LRPE_FAIRSEQ_LINEAR_TILE=64 chooses."""
    monkeypatch.setenv(tiles_triton.TILE, "64")
    tiles_triton.chosen_tile.cache_clear()
    yield sweep_triton.Tile(64, 8, 2)
    tiles_triton.chosen_tile.cache_clear()


def tiles_of(leaves, wanted="normalized", decays=False):
    q, _, v = leaves[:3]
    call = sweep_triton._Call(q, v, wanted, EPS, decays, decays)
    return {sweep_triton.tile_of(name, call) for name in ("forward", "query", "key")}


@pytest.mark.parametrize("programs", [1, 1000])
@pytest.mark.parametrize("shape", [(70, 64, 64), (130, 20, 48), (64, 32, 16)])
def test_quotients_in_tiles_of_64_tokens_equal_the_definition(
    shape, programs, tiles_of_64, monkeypatch
):
    monkeypatch.setattr(sweep_triton, "PROGRAMS", programs)
    leaves = example(*shape, torch.bfloat16)
    if DEVICE == "cpu" or tiles_triton.capability(leaves[0]) >= 9:
        assert tiles_of(leaves) == {tiles_of_64}
    assert max(errors(leaves, "normalized")) <= BOUND[torch.bfloat16]


@pytest.mark.skipif(DEVICE == "cuda", reason="the tiles of an H100")
def test_other_forms_and_short_texts_keep_their_tiles(tiles_of_64, monkeypatch):
    long, short = (example(time, 64, 64, torch.bfloat16) for time in (70, 32))
    others = [
        (long, "sums", False),
        (long, "normalized", True),
        (short, "normalized", False),
        ([x.half() for x in long], "normalized", False),
        (example(70, 128, 64, torch.bfloat16), "normalized", False),
    ]
    found = [tiles_of(*given) for given in others]
    monkeypatch.setattr(sweep_triton, "chosen_tile", lambda: 32)
    assert found == [tiles_of(*given) for given in others]
    assert tiles_of(long) == {sweep_triton.Tile(32, 4, 3)}
    monkeypatch.setattr(sweep_triton, "capability", lambda x: 8)
    assert tiles_of_64 not in tiles_of(long)


def test_tiles_of_64_tokens_are_proved_anew(tiles_of_64, monkeypatch):
    given = [*example(70, 16, 16, torch.bfloat16), "normalized", None, EPS]
    keys = [linear_proof.causal_key_of(*given)]
    monkeypatch.setenv(tiles_triton.TILE, "32")
    tiles_triton.chosen_tile.cache_clear()
    assert keys[0] != linear_proof.causal_key_of(*given)
    monkeypatch.delenv(tiles_triton.TILE)
    tiles_triton.chosen_tile.cache_clear()
    assert tiles_triton.chosen_tile() == 32
    monkeypatch.setenv(tiles_triton.TILE, "48")
    tiles_triton.chosen_tile.cache_clear()
    with pytest.raises(ValueError, match="LRPE_FAIRSEQ_LINEAR_TILE must be 32 or 64"):
        linear_proof.causal_key_of(*given)


def test_older_tritons_which_do_not_compile_tiles_of_64_tokens_keep_32(
    tiles_of_64, monkeypatch, caplog
):
    for version, expected in (("3.4.0", 32), ("3.5.1", 64), ("3.10.0", 64)):
        monkeypatch.setattr(tiles_triton.triton, "__version__", version)
        tiles_triton.chosen_tile.cache_clear()
        assert tiles_triton.chosen_tile() == expected
    assert "=64 needs Triton 3.5 or newer, and this is 3.4.0: tiles have 32" in caplog.text


@pytest.mark.parametrize(
    ("dtype", "time", "part"), [(torch.float32, 150, 64), (torch.float16, 300, 1024)]
)
def test_gates_of_a_long_text_have_exact_gradients(dtype, time, part, monkeypatch):
    """Their sums over later tokens cancel, and start anew in every part."""
    monkeypatch.setattr(sweep_triton, "GATED", part)
    monkeypatch.setattr(sweep_triton, "tile_of", lambda *_: sweep_triton.Tile(64))
    monkeypatch.setattr(sweep_triton, "PROGRAMS", 1)
    leaves = example(time, 16, 16, dtype, "token")
    leaves[3][:, 0] *= 1e-3  # a long memory
    assert max(errors(leaves, "normalized")) <= BOUND[dtype]


def both_forms(dtype=torch.float16):
    """The forms, their definitions, and arguments for them."""
    leaves = example(20, 16, 16, dtype, "token")
    yield sweep_triton.causal_sums, definition, leaves
    yield full_sums, full_definition, leaves[:3]


def test_every_number_is_written_and_two_runs_give_equal_bits(monkeypatch):
    """Memory is full of NaN before the kernels write to it."""

    def poison(form):
        def poisoned(*args, **options):
            x = form(*args, **options)
            return x.fill_(torch.nan) if x.is_floating_point() else x

        return poisoned

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))
    for form, _, leaves in both_forms():
        for wanted in ("normalized", "sums"):
            once, again = (results(form, leaves, wanted) for _ in range(2))
            assert all(x.isfinite().all() for x in once)
            assert all(a.equal(b) for a, b in zip(once, again, strict=True))


def test_clamped_denominators_saturate_float16_without_a_gradient():
    for form, _, (q, k, v, *_) in both_forms():
        q, k, v = (x.detach().requires_grad_() for x in (-q, k, v))
        out, _ = form(q, k, v, "normalized", None, EPS)
        assert out.abs().max() == 65504 / 64
        grads = torch.autograd.grad(out, (q, k, v), (out.abs() == 65504 / 64).to(out))
        assert not any(g.any() for g in grads)


def test_scores_and_states_may_exceed_the_range_of_float16():
    for form, reference, (q, k, v, *_) in both_forms():
        q, k = (torch.full_like(x, 60.0) for x in (q, k))  # scores of 115,200
        leaves = [x.detach() for x in (q, k, v)]
        assert errors(leaves, "normalized", form, reference)[0] <= BOUND[torch.float16]


def test_second_derivatives_are_those_of_the_definition():
    for form, reference, leaves in both_forms(torch.float32):
        seconds, leaves = [], [x.clamp_min(-1e3) for x in leaves]
        for by, dtype in ((form, torch.float32), (reference, torch.float64)):
            own = [x.detach()[:, :, :5].to(dtype).requires_grad_() for x in leaves]
            gates = own[3] if len(own) > 3 else None
            out, _ = by(*own[:3], "normalized", gates, EPS)
            firsts = torch.autograd.grad(out.square().sum(), own, create_graph=True)
            seconds.append(torch.autograd.grad(sum(x.square().sum() for x in firsts), own))
        for a, b in zip(*seconds, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-4)


def test_one_of_two_results_may_be_used_alone():
    for form, reference, leaves in both_forms(torch.float32):
        own = [x.detach().requires_grad_() for x in leaves[:3]]
        _, denominator = form(*own, "sums", None, EPS)
        _, expected = reference(*own, "sums", None, EPS)
        found = torch.autograd.grad(denominator.sum(), own)
        wanted = torch.autograd.grad(expected.sum(), own, materialize_grads=True)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "wanted", "keys", "programs", "dtype"),
    cases([*SHAPES[:4], (33, 128, 128)], FACTORS[1], [None, 7, 90], [1, 1000], list(BOUND)),
)
def test_sums_over_all_keys_equal_the_definition(shape, wanted, keys, programs, dtype, monkeypatch):
    monkeypatch.setattr(full_triton, "PROGRAMS", programs)
    leaves = example(*shape, dtype)
    if keys is not None:
        leaves[1:] = example(keys, *shape[1:], dtype, batch=len(leaves[0]))[1:]
    found = errors(leaves, wanted, full_sums, full_definition)
    assert max(found) <= BOUND[dtype]


@pytest.mark.parametrize(
    ("which", "causal", "dtype"), pairwise(["q", "k", "v", "gates"], [True, False], list(BOUND))
)
def test_a_nan_is_not_hidden(which, causal, dtype):
    """No number of the result hides it that has it by definition, and no gradient as a whole.

    Gradients of the definition have more of them, from products with masked zeros.
    """
    if which == "gates" and not causal:
        pytest.skip("without a causal mask there are no gates")
    leaves = example(20, 16, 16, dtype, "token" if causal else None, batch=1)
    leaves[["q", "k", "v", "gates"].index(which)][0, 1, 5, ...] = torch.nan
    form, wanted = (
        (sweep_triton.causal_sums, definition) if causal else (full_sums, full_definition)
    )
    found = results(form, leaves, "normalized")
    expected = results(wanted, leaves, "normalized", torch.float64)
    assert not (found[0].isfinite() & ~expected[0].isfinite()).any()
    for ours, exact in zip(found, expected, strict=True):
        assert ours.isfinite().all() == exact.isfinite().all()
