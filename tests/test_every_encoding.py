"""The properties every encoding must have: each name of ENCODINGS, the free forms, a
multiplicative score encoding that exists here only, "NAME@W" or "NAME@W:GRID", NAME on a grid of
width W with ``position_grid`` GRID, "NAME~S", NAME with context scaling S, and "NAME^F-P", NAME
with floor F and parameter P of the angles.

An exception is a capability field on the class, which a test asserts; no name is skipped.
"""

import ast
import itertools
import math
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lrpe_fairseq.attention import projected, softmax, transport
from lrpe_fairseq.attention.linear import NORMALIZERS
from lrpe_fairseq.attention.multihead import MultiheadAttention, reorder_attention_state
from lrpe_fairseq.encodings import (
    ENCODINGS,
    FAMILIES,
    EncodingOptions,
    EncodingSpec,
    QueryKeyEncoding,
    ScoreEncoding,
    build_encoding,
    is_causal_only,
)
from lrpe_fairseq.encodings.core.positions import check_positions
from tests.end_to_end.cases import sampled
from tests.references import assert_near, score_matrix, weight_matrix


class Multiplicative(ScoreEncoding):
    """score_st (1 + w_h[clipped s - t]): neither additive nor decomposable."""

    REACH = 4

    def __init__(self, spec):
        super().__init__(spec)
        shape = (2 * self.REACH + 1, spec.num_heads)
        self.table = nn.Parameter(0.3 * torch.randn(shape, generator=spec.generator("toy")))

    def forward(self, scores, q, k, q_positions, k_positions, visible=None):
        check_positions(q_positions, q)
        check_positions(k_positions, k)
        lag = q_positions.unsqueeze(-1) - k_positions.unsqueeze(-2)
        index = lag.clamp(-self.REACH, self.REACH) + self.REACH
        return scores * F.embedding(index, (1 + self.table).to(scores.dtype)).movedim(-1, -3)


HERE_ONLY = {"multiplicative": Multiplicative}
GRIDS = (
    *("rope-2d@4", "rope-2d-mixed@4", "lrpe-type2@4:axial", "lrpe-type2@4:sum", "spe@4:axial"),
    *("fope@4:axial", "liere@4", "comrope-ap@4", "comrope-ld@4", "ape@4:axial"),
    "ape:sequence+cycle7@4",
)
GATED = (
    *("gated:lrpe-type2", "gated:rope", "gated:lrpe-type4", "gated:spe", "gated:lrpe-type8"),
    *("gated:permuteformer", "gated:alibi", "gated:ape-tree"),
)
BY_CHANNEL = (
    *("gated-channel:none", "gated-channel:rope", "gated-channel:lrpe-type2"),
    *("gated-channel:lrpe-type1", "gated-channel:lrpe-tmlr-type1"),
)
CARRIED = (
    *("path:lrpe-type2", "path:lrpe-type8", "path:permuteformer", "path:ape-tree"),
    *("gated:path", "gated:path:lrpe-type2", "gated:delta"),
)
SELECTIVE = (
    *("selective:rope", "selective:lrpe-type2", "selective:lrpe-type8"),
    "gated:selective:lrpe-type1",
)
ALGEBRAIC = tuple(n for n in FAMILIES["ape"].names if n != "ape:sequence")
FREE = (
    *("lrpe:identity:permutation", "lrpe:householder-learned:unitary-learned"),
    *("lrpe:odd-even:unitary", "lrpe:fourier:rotation"),
)
"""Pairs of P and Lambda that no named encoding has; tests/encodings/test_lrpe.py has them all."""
SCALED = (
    *("rope~yarn", "lrpe-type2~yarn", "lrpe-type2~yarn-printed", "lrpe-tmlr-type1~ntk"),
    *("fope~linear", "lrpe-type2~llama3"),
)
FLOORED = (
    *("rope^turn-plain", "lrpe-type2^turn-log", "lrpe-type8^turn-plain", "lrpe-type3^clip-plain"),
    *("gated:lrpe-tmlr-type1^none-log", "selective:lrpe-type1^turn-plain"),
    "path:lrpe-type6^turn-plain",
)
CHOSEN = (
    *("lrpe-type2%angle_lr_scale=0.1", "lrpe-type2%rotation_spectrum='turns',context_length=128"),
    *("rope%rotation_spectrum='proportional',rotation_fraction=0.5", "grape-a%grape_gates='query'"),
    "grape-a%grape_gates='query-key'",
)
NAMES = (
    *(*ENCODINGS, *HERE_ONLY, *FREE, *ALGEBRAIC, *GATED, *BY_CHANNEL, *CARRIED),
    *(*SELECTIVE, *GRIDS, *SCALED, *FLOORED, *CHOSEN),
)
WIDTH, HEADS, D = 16, 2, 8


def example(length=6, dtype=torch.float64, batch=2):
    generator = torch.Generator().manual_seed(length)
    shape = (batch, HEADS, length, D)
    return [torch.rand(shape, generator=generator, dtype=dtype) for _ in range(2)]


@pytest.fixture(autouse=True)
def _registered():
    with mock.patch.dict(ENCODINGS, HERE_ONLY):
        yield


def inputs(length=6, batch=2):
    """The input of a layer, (B, T, C): the same for all tokens, so that all gates are equal."""
    row = torch.rand(1, 1, WIDTH, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    return row.expand(batch, length, WIDTH)


def parts_of(name):
    """Return the name and options of "NAME", also with "^F-P", "~S", "@W", "@W:GRID", "%O=V"."""
    name, _, chosen = name.partition("%")
    name, _, angles = name.partition("^")
    name, _, scaling = name.partition("~")
    name, _, grid = name.partition("@")
    width, _, kind = grid.partition(":")
    own = {"context_scaling": scaling, "context_factor": 4.0, "context_length": 128}
    floor, _, parameter = angles.partition("-")
    of_angles = {"angle_floor": floor, "angle_parameter": parameter}
    of_angles |= {"context_length": 128} if floor != "none" else {}
    own = (own if scaling else {}) | (of_angles if angles else {})
    for option in filter(None, chosen.split(",")):
        key, _, value = option.partition("=")
        own[key] = ast.literal_eval(value)
    return name, EncodingOptions(grid_width=int(width or 0), position_grid=kind or "flat", **own)


def is_causal(name):
    """True for an encoding of causal attention only."""
    with mock.patch.dict(ENCODINGS, HERE_ONLY):
        return is_causal_only(parts_of(name)[0])


def encoding_of(name, causal=True, seed=0):
    with mock.patch.dict(ENCODINGS, HERE_ONLY):
        name, options = parts_of(name)
        return build_encoding(name, D, HEADS, causal=causal, seed=seed, options=options).eval()


def expected_scores(name, q, k, q_positions, k_positions, causal=True):
    """The score matrix; for random codes its mean over draws, with its standard error."""
    if encoding_of(name).properties.relative != "in expectation":
        encoding = encoding_of(name, causal)
        scores = score_matrix(encoding, q, k, q_positions, k_positions, inputs())
        return scores, torch.zeros_like(scores)
    drawn = (same_parameters(name, causal, seed) for seed in range(100))
    draws = torch.stack([score_matrix(one, q, k, q_positions, k_positions) for one in drawn])
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
    name, own = parts_of(name)
    options = {"causal": True, "options": own, "attention_type": attention_type, **options}
    return MultiheadAttention(WIDTH, HEADS, position_encoding=name, **options).double().eval()


def serves(name, attention_type):
    """True if the attention type supports the encoding."""
    encoding = encoding_of(name)
    return encoding.serves_linear if attention_type == "linear" else not encoding.no_softmax


PAIRS = [
    (name, attention_type)
    for name in NAMES
    for attention_type in ("linear", "softmax")
    if serves(name, attention_type)
]
MODES = [(*p, causal) for p in PAIRS for causal in (True, False) if causal or not is_causal(p[0])]
HALVES = [
    (*pair, dtype)
    for pair in PAIRS
    for dtype in (torch.float16, torch.bfloat16)
    if dtype == torch.float16 or pair[1] == "linear" or not encoding_of(pair[0]).serves_linear
]


def in_turn(cases):
    """``cases``, of which ``make test`` has one for each name, in turn."""
    own = {name: [case for case in cases if case[0] == name] for name in NAMES}
    return sampled(cases, [own[name][turn % len(own[name])] for turn, name in enumerate(NAMES)])


DECOMPOSABLE = [n for n in NAMES if isinstance(encoding_of(n), QueryKeyEncoding)]
NORMS_KEPT = [n for n in DECOMPOSABLE if encoding_of(n).properties.keeps_norm]


SHIFTS = [
    (name, shift, causal)
    for name in NAMES
    for shift, causal in [(7, True), (500, False), (100_000, True), (100_000, False)]
    if shift != 500 or encoding_of(name).properties.relative != "in expectation"  # 100 draws each
    if causal or not is_causal(name)
]


@pytest.mark.parametrize(("name", "shift", "causal"), SHIFTS)
def test_the_score_depends_on_t_minus_s_only_where_the_encoding_says_so(name, shift, causal):
    encoding, (q, k) = encoding_of(name, causal), example()
    promised = encoding.properties
    shift *= promised.shift_unit
    limit = math.inf if promised.relative_up_to is None else promised.relative_up_to
    positions = torch.arange(6)
    here, error = expected_scores(name, q, k, positions, positions, causal)
    there, other = expected_scores(name, q, k, positions + shift, positions + shift, causal)
    seen = torch.ones(6, 6, dtype=torch.bool).tril() if causal else torch.ones(6, 6).bool()
    difference = ((here - there).abs() - 5 * (error + other)).masked_fill(~seen, 0)
    if promised.relative == "no" or shift + 5 > limit:
        assert difference.max() > 1e-6
    else:
        assert difference.max() < 1e-9


@pytest.mark.parametrize("name", [n for n in NAMES if encoding_of(n).properties.shift_unit > 1])
def test_a_shift_that_is_not_a_whole_row_changes_the_score(name):
    encoding, (q, k), at = encoding_of(name), example(), torch.arange(6)
    moved = at + encoding.properties.shift_unit - 1
    here, there = score_matrix(encoding, q, k, at, at), score_matrix(encoding, q, k, moved, moved)
    assert (here - there).abs().max() > 1e-6


@pytest.mark.parametrize("name", [n for n in NAMES if is_causal(n)])
def test_a_causal_encoding_is_refused_by_bidirectional_attention(name):
    with pytest.raises(ValueError, match="defined for causal attention only; choose another"):
        encoding_of(name, causal=False)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "none"])
def test_the_weights_do_depend_on_the_distance(name):
    q, k = example()
    q, k = q[:, :, :1].expand_as(q), k[:, :, :1].expand_as(k)  # the same content everywhere
    encoding = encoding_of(name)
    with torch.no_grad():
        for parameter in encoding.parameters():  # tables that start at zero say nothing yet
            generator = torch.Generator().manual_seed(1)
            parameter.add_(torch.rand(parameter.shape, generator=generator) - 0.5)
    at = 97 * torch.arange(6)  # coprime to all cycles of a permutation
    weights = weight_matrix(encoding, q, k, at, at, inputs())
    assert (weights[..., 5, :] - weights[..., 5, 5:]).abs().max() > 1e-3


@pytest.mark.parametrize("name", NORMS_KEPT)
def test_at_lag_zero_the_score_is_that_of_the_content(name):
    q, k = example()
    for position in (0, 3, 100_000):
        at = torch.full((6,), position)
        scores = score_matrix(encoding_of(name), q, k, at, at)
        torch.testing.assert_close(scores, q @ k.transpose(-1, -2), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", NORMS_KEPT)
def test_norms_are_kept(name):
    encoding = encoding_of(name)
    q, k = example()
    positions = torch.tensor([0, 1, 2, 511, 100_000, 2**31 - 1])
    for before, after in zip((q, k), encoding(q, k, positions, positions), strict=True):
        assert after.shape[-1] == encoding.feature_dim
        torch.testing.assert_close(after.norm(dim=-1), before.norm(dim=-1), rtol=1e-12, atol=0)


NORMS_LOST = sorted({*DECOMPOSABLE} - {*NORMS_KEPT})
BY_KEYS = ["delta", "gated:delta"]
"""Those whose transport has no vectors but the keys."""


@pytest.mark.parametrize("name", BY_KEYS)
def test_keys_that_are_carried_by_each_other_have_norm_beta(name):
    encoding, (_, k), at = encoding_of(name), example(), torch.arange(6)
    given, _ = encoding.transport(inputs(), at, None, None, {})
    assert given.w is None
    transport, keys = given.by_keys(k)
    torch.testing.assert_close(keys.norm(dim=-1), given.beta, rtol=1e-12, atol=0)
    torch.testing.assert_close(transport.w * k.norm(dim=-1, keepdim=True), k, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", [n for n in NORMS_LOST if n not in BY_KEYS])
def test_an_encoding_that_does_not_keep_norms_is_not_exactly_relative(name):
    encoding, (q, k), at = encoding_of(name), example(), torch.arange(6)
    assert encoding.properties.relative != "exact"
    found = encoding(q, k, at, at)[0].norm(dim=-1)
    assert ((found / q.norm(dim=-1)).log().abs() > 0.1).any()


@pytest.mark.parametrize("name", NAMES)
def test_positions_that_do_not_fit_the_queries_are_refused(name):
    encoding, (q, k), at = encoding_of(name), example(), torch.arange(6)
    wrong = torch.zeros(6, 2), torch.zeros(5), torch.zeros(3, 6), torch.zeros(1, 2, 6)
    for positions in (*(w.long() for w in wrong), torch.zeros(6)):
        for pair in ((positions, at), (at, positions)):
            with pytest.raises(ValueError, match=r"int64 tensor of shape \(T,\) or \(B, T\)"):
                score_matrix(encoding, q, k, *pair)


@pytest.mark.parametrize("name", NAMES)
def test_positions_of_a_batch_are_positions_of_its_rows(name):
    encoding = encoding_of(name).double()  # sums over other shapes round differently in float32
    q, k = example()
    positions = torch.stack([torch.arange(6), torch.arange(6) + 11])
    together = score_matrix(encoding, q, k, positions, positions)
    for row, at in enumerate(positions):
        alone = score_matrix(encoding, q[row : row + 1], k[row : row + 1], at, at)
        torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_half_types_are_finite_and_right_within_their_own_rounding(name, dtype):
    exact, rounded = encoding_of(name), encoding_of(name).to(dtype)
    q, k = (x.to(dtype) for x in example())
    positions = torch.tensor([0, 1, 511, 4096, 16383, 16384])
    if isinstance(exact, ScoreEncoding):
        scores = q @ k.transpose(-1, -2)
        wanted = [exact(scores.double(), q.double(), k.double(), positions, positions)]
        got = [rounded(scores, q, k, positions, positions)]
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


@pytest.mark.parametrize("name", DECOMPOSABLE)
def test_features_and_gradients_in_float32_are_those_of_float64(name):
    """By the kernels and by the definitions; q has positions of each row, k those of all."""
    at, (x, y) = torch.tensor([[0, 1, 5, 30], [2, 30, 9, 511]]), example(4)
    results = []
    for dtype in (torch.float32, torch.float64):
        encoding = encoding_of(name).to(dtype)
        given = [z.to(dtype).requires_grad_() for z in (x, y)]
        out = encoding(*given, at, at[0])
        learned = [*given, *(p for p in encoding.parameters() if p.requires_grad)]
        loss = sum((z * torch.arange(z.numel()).cos().view_as(z).to(z)).sum() for z in out)
        results.append([*out, *torch.autograd.grad(loss, learned, materialize_grads=True)])
    assert_near(*results, 1e-5, least=1.0)


@pytest.mark.parametrize("name", NAMES)
def test_no_parameter_or_buffer_of_an_encoding_is_rounded_below_float32(name):
    encoding = encoding_of(name)
    before = {key: value.clone() for key, value in encoding.state_dict().items()}
    gradients = [torch.randn_like(p) for p in encoding.parameters()]
    for parameter, gradient in zip(encoding.parameters(), gradients, strict=True):
        parameter.grad = gradient.clone()
    encoding.half().bfloat16().float()
    assert all(torch.equal(before[key], value) for key, value in encoding.state_dict().items())
    assert all(map(torch.equal, gradients, (p.grad for p in encoding.parameters())))


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
    stored = sum(part[0].numel() for part in next(iter(state.values())).past[:2])
    assert module.state_size(9) == stored


DOCUMENTS = ((3, 1, 1, 5, 2), (12,), (1, 10, 1))
"""Lengths of the documents of each row."""


def packed():
    """Inputs (B, T, C), the starts of their documents, and each document as (row, slice)."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(3, 12, WIDTH, dtype=torch.float64, generator=generator).requires_grad_()
    starts, parts = torch.zeros(3, 12, dtype=torch.bool), []
    for row, lengths in enumerate(DOCUMENTS):
        for length, end in zip(lengths, itertools.accumulate(lengths), strict=True):
            starts[row, end - length] = row != 1  # the start of a row need not be marked
            parts.append((slice(row, row + 1), slice(end - length, end)))
    return x, starts, parts


def live(name, attention_type):
    """Attention whose encoding has no zeros left: tables that start at zero say nothing."""
    # sums of places differ in their last bit, which a clamped denominator multiplies by 1e7
    normalizer = "rotated" if encoding_of(name).increments is None else "layernorm"
    module = attention_of(name, attention_type, normalizer=normalizer)
    generator = torch.Generator().manual_seed(7)
    for parameter in module.encoding.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return module


@pytest.mark.parametrize(("name", "attention_type"), in_turn(PAIRS))
def test_packed_documents_are_each_document_alone(name, attention_type):
    module = live(name, attention_type)
    x, starts, parts = packed()
    with mock.patch.object(softmax.blocks, "BLOCK", 5 * 3 * HEADS * 12):  # five queries at a time
        together, _ = module.attend(x, starts=starts)
    alone = torch.zeros_like(together)
    for part in parts:
        alone[part] = module.attend(x[part])[0]
    torch.testing.assert_close(together, alone, rtol=1e-10, atol=1e-10)
    weight, learned = torch.randn_like(x), [x, *module.parameters()]
    grads = [
        torch.autograd.grad((out * weight).sum(), learned, materialize_grads=True)
        for out in (together, alone)
    ]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize(("name", "attention_type"), in_turn(PAIRS))
def test_decoding_across_documents_and_reordered_beams_equals_parallel(name, attention_type):
    module = live(name, attention_type)
    x, starts, _ = packed()
    order, padding = torch.tensor([1, 0, 0, 2]), torch.zeros(4, 12, dtype=torch.bool)
    padding[0, [0, 3]] = padding[1, [1, 7, 8]] = True
    whole, starts = x[order], starts[order] & ~padding
    out, _ = module.attend(whole, padding, starts=starts)
    state, parts = {}, []
    for first, last in itertools.pairwise([0, 4, 5, 6, 7, 9, 12]):
        part = slice(first, last)
        module.given.starts = starts[:, part]
        block, mask = whole[:, part].transpose(0, 1), padding[:, part]
        found, _ = module(block, key_padding_mask=mask, incremental_state=state)
        parts.append(found.transpose(0, 1))
        if last == 5:
            beams = torch.tensor([3, 1, 2, 0, 1])
            module.reorder_incremental_state(state, beams)
            whole, starts, padding, out = (t[beams] for t in (whole, starts, padding, out))
            parts = [p[beams] for p in parts]
    found = torch.cat(parts, 1)
    torch.testing.assert_close(found[~padding], out[~padding], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("name", "attention_type"), in_turn(PAIRS))
def test_blocks_with_padding_anywhere_then_tokens_equal_parallel(name, attention_type):
    module = live(name, attention_type)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(12, 2, WIDTH, dtype=torch.float64, generator=generator)
    padding = torch.zeros(2, 12, dtype=torch.bool)
    padding[0, [0, 3, 4, 6, 8]] = True  # left, inside and right of the prompt; then between tokens
    state, parts = {}, []
    for cut in (slice(0), slice(5), slice(5, 5), slice(5, 9), slice(9, 10), slice(10, 12)):
        mask = padding[:, cut] if padding[:, cut].any() else None
        parts.append(module(x[cut], key_padding_mask=mask, incremental_state=state)[0])
    out, at_once = torch.cat(parts), module(x, key_padding_mask=padding)[0]
    for row, real in enumerate(~padding):
        alone, _ = module(x[real, row : row + 1])
        torch.testing.assert_close(out[real, row : row + 1], alone, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(at_once[real, row : row + 1], alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize(("name", "attention_type"), in_turn(PAIRS))
def test_a_window_is_the_last_tokens_alone_all_at_once_and_from_a_state(
    name, attention_type, window
):
    sizes = window, None, 12
    module, whole, wide = (attention_of(name, attention_type, window=w) for w in sizes)
    if module.encoding.properties.reach:  # a filter reads tokens before the window
        for own in (module, whole, wide):
            (own.encoding.reflections or own.encoding.increments).filter.data[1:] = 0
    x = torch.randn(2, 12, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    padding = torch.zeros(2, 12, dtype=torch.bool)
    padding[0, [0, 3, 4, 6, 8]] = True
    wanted = torch.zeros_like(x)
    for row, real in enumerate((~padding).int()):
        every = real.nonzero().flatten()
        for last, place in enumerate(every):
            first = max(0, last - window + 1)
            at = torch.arange(first, last + 1)
            wanted[row, place] = whole.attend(x[row, every[at]][None], positions=at)[0][0, -1]
    state, parts, order = None, [], torch.tensor([1, 0, 1])
    for cut in (slice(0, 5), slice(5, 9), slice(9, 10), slice(10, 11), slice(11, 12)):
        if cut.start == 10:
            state = reorder_attention_state(state, order)
            x, padding, wanted, parts = *(y[order] for y in (x, padding, wanted)), [parts[0][order]]
        mask = padding[:, cut] if padding[:, cut].any() else None
        out, state = module.attend(x[:, cut], mask, state, True)
        parts = [torch.cat([*parts, out], 1)]
    stored = sum(part[0].numel() for part in state.past[:2])
    assert module.state_size(12) == stored
    for found in (module.attend(x, padding)[0], *parts):
        torch.testing.assert_close(found[~padding], wanted[~padding], rtol=1e-9, atol=1e-9)
    assert torch.equal(wide(x)[0], whole(x)[0])


def stores_pairs(name):
    """True if softmax attention computes something for every pair of tokens in PyTorch."""
    encoding = encoding_of(name)
    if isinstance(encoding, ScoreEncoding) or encoding.reflections is not None:
        return True
    return encoding.log_decay() is not None or encoding.log_gates(inputs()) is not None


@pytest.mark.parametrize(
    ("name", "causal"), [(n, c) for n, kind, c in MODES if kind == "softmax" and stores_pairs(n)]
)
def test_blocks_of_query_rows_agree(name, causal):
    module = attention_of(name, "softmax", causal=causal)
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(2, 7, WIDTH, dtype=torch.float64, generator=generator).requires_grad_()
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[0, [0, 4]] = True
    found = []
    for limit in (1, 3 * 2 * HEADS * 7, softmax.blocks.BLOCK):  # rows at a time: 1, 3, all
        chunks = mock.patch.object(transport, "CHUNK", 2)
        with mock.patch.object(softmax.blocks, "BLOCK", limit), chunks:
            parts = [module.attend(x)[0], module.attend(x, padding)[0]]
            if causal:
                _, state = module.attend(x[:, :2], padding[:, :2], None, True)
                parts.append(module.attend(x[:, 2:], padding[:, 2:], state, True)[0])
            out = torch.cat(parts, 1)
            parameters = [p for p in module.parameters() if p.requires_grad]
            grads = torch.autograd.grad(out.square().sum(), [x, *parameters], allow_unused=True)
        found.append([out, *(g for g in grads if g is not None)])
    for rows in found[:2]:
        torch.testing.assert_close(rows, found[2], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("name", "attention_type"), in_turn(PAIRS))
def test_explicit_positions_are_checked_and_used(name, attention_type):
    module = attention_of(name, attention_type)
    x = torch.randn(2, 6, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    plain, _ = module.attend(x)
    at = torch.arange(6)
    torch.testing.assert_close(module.attend(x, positions=at)[0], plain, rtol=1e-12, atol=1e-12)
    promised = module.encoding.properties
    if promised.relative == "exact":
        unit, limit = promised.shift_unit, promised.relative_up_to
        far = 1000 * unit if limit is None else limit - 6
        rows = torch.stack([at + far, at + 5 * unit])
        state, parts = None, []
        for cut in (slice(0, 4), slice(4, 6)):
            out, state = module.attend(x[:, cut], None, state, True, positions=rows[:, cut])
            parts.append(out)
        torch.testing.assert_close(torch.cat(parts, 1), plain, rtol=1e-9, atol=1e-9)
        assert state.next_position.tolist() == [far + 6, 5 * unit + 6]
    with pytest.raises(ValueError, match=r"shape \(T,\) or \(B, T\)"):
        module.attend(x, positions=torch.zeros(6, 2).long())


@pytest.mark.parametrize(("name", "attention_type"), in_turn(PAIRS))
def test_decoding_at_an_offset_of_100000_equals_parallel(name, attention_type):
    module, at = attention_of(name, attention_type), 100_000 + torch.arange(5)
    x = torch.randn(1, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    whole, _ = module.attend(x, positions=at)
    state, parts = None, []
    for s in range(5):
        part, state = module.attend(x[:, s : s + 1], None, state, True, positions=at[s : s + 1])
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("name", "attention_type", "causal"), in_turn(MODES))
def test_left_padded_equals_right_padded_equals_unpadded(name, attention_type, causal):
    module = attention_of(name, attention_type, causal=causal)
    x = torch.randn(5, 1, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    junk = torch.full((3, 1, WIDTH), 7.0, dtype=torch.float64)
    full = torch.randn(8, 1, WIDTH, dtype=torch.float64)
    none, dead = torch.zeros(1, 5).bool(), torch.ones(1, 3).bool()
    mask = torch.cat([torch.cat([dead, none], 1), torch.cat([none, dead], 1), torch.zeros(1, 8)])
    batch = torch.cat([torch.cat([junk, x]), torch.cat([x, junk]), full], dim=1)
    alone, _ = module(x)
    for module.given.one_sided in (False, True):
        out, _ = module(batch, key_padding_mask=mask.bool())
        torch.testing.assert_close(out[3:, :1], alone, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(out[:5, 1:2], alone, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(out[:, 2:], module(full)[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("name", "attention_type"), in_turn(PAIRS))
def test_the_gradient_to_the_future_is_exactly_zero(name, attention_type):
    module = attention_of(name, attention_type)
    x = torch.randn(150, 1, WIDTH, dtype=torch.float64).requires_grad_()
    out, _ = module(x)
    (grad,) = torch.autograd.grad(out[:70].sum(), x)
    assert torch.count_nonzero(grad[70:]) == 0
    assert torch.count_nonzero(grad[:70]) > 0


@pytest.mark.parametrize(("name", "attention_type", "dtype"), in_turn(HALVES))
def test_a_module_in_half_precision_is_finite(name, attention_type, dtype):
    vanishes = encoding_of(name).denominator_vanishes and dtype == torch.float16
    x = torch.randn(200, 2, WIDTH, generator=torch.Generator().manual_seed(4)).to(dtype)
    x.requires_grad_()
    projected._warn_once.cache_clear()
    warns = vanishes and attention_type == "linear"
    with pytest.warns(UserWarning, match="'layernorm'") if warns else nullcontext():
        assert attention_of(name, attention_type).to(dtype)(x)[0].isfinite().all()
    normalizer = "layernorm" if vanishes else "rotated"
    out, _ = attention_of(name, attention_type, normalizer=normalizer).to(dtype)(x)
    out.float().sum().backward()
    assert out.isfinite().all()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("name", [n for n in NAMES if not encoding_of(n).serves_linear])
def test_a_score_encoding_is_as_exact_under_autocast_as_in_a_half_module(name):
    module = live(name, "softmax").float()
    x = torch.randn(9, 2, WIDTH, generator=torch.Generator().manual_seed(4)).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = module(x.float())
    assert torch.equal(out, module.bfloat16()(x)[0])


@pytest.mark.parametrize("lost", [math.nan, math.inf])
@pytest.mark.parametrize(("name", "attention_type"), in_turn(PAIRS))
def test_a_model_that_diverged_computes_numbers_and_does_not_raise(name, attention_type, lost):
    module = attention_of(name, attention_type)
    for parameter in module.parameters():
        parameter.data.fill_(lost)
    out, _ = module(torch.randn(5, 2, WIDTH, dtype=torch.float64))
    out.sum().backward()
    assert out.isnan().any()


def normalizers_of(name, attention_type):
    """The normalizers under which an attention computes."""
    if attention_type == "softmax":
        return ("rotated",)
    # gates of single features need features without encoding of the same width
    widens = name in BY_CHANNEL and encoding_of(name).feature_dim != D
    return [n for n in NORMALIZERS if not (widens and n == "bounded")]


NORMALIZED = [
    (*mode, normalizer) for mode in MODES for normalizer in normalizers_of(mode[0], mode[1])
]


@pytest.mark.parametrize(("name", "attention_type", "causal", "normalizer"), in_turn(NORMALIZED))
def test_checkpointing_changes_no_gradient(name, attention_type, causal, normalizer):
    """In float32, which all kernels of a CPU support."""
    options = {"causal": causal, "normalizer": normalizer}
    module = attention_of(name, attention_type, **options).float()
    x = torch.randn(9, 2, WIDTH, generator=torch.Generator().manual_seed(6)).requires_grad_()
    learned = [x, *(p for p in module.parameters() if p.requires_grad)]

    def gradients(out):
        return torch.autograd.grad(out.square().sum(), learned, allow_unused=True)

    expected = gradients(module(x)[0])
    found = gradients(checkpoint(lambda given: module(given)[0], x, use_reentrant=False))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("attention_type", ["linear", "softmax"])
def test_all_encodings_start_from_the_same_weights_elsewhere(attention_type):
    names = [name for name, kind in PAIRS if kind == attention_type]
    first = attention_of(names[0], attention_type).state_dict()
    for name in names:
        state = attention_of(name, attention_type).state_dict()
        for key in first:
            assert torch.equal(state[key], first[key]), (name, key)


def test_no_encoding_has_a_layer_that_fairseq_initializes_again():
    """``init_bert_params`` draws every nn.Linear and nn.Embedding of a BERT model again, from the
    global generator: the encoding would not start as documented, and the layers after it would
    differ between encodings."""
    for name in NAMES:
        for module in encoding_of(name).modules():
            assert not isinstance(module, (nn.Linear, nn.Embedding)), name


@pytest.mark.parametrize(("name", "attention_type"), in_turn(PAIRS))
def test_the_random_parts_are_saved(name, attention_type):
    one = attention_of(name, attention_type, seed=0)
    two = attention_of(name, attention_type, seed=1)
    x = torch.randn(9, 2, WIDTH, dtype=torch.float64)
    one(x), two(x)  # whatever is cached must follow the loaded state
    two.load_state_dict(one.state_dict())
    assert torch.equal(one(x)[0], two(x)[0])


def draws_at_construction(name):
    """True if some part of the encoding starts at random: it asks for the spec's generator."""
    original = EncodingSpec.generator
    with mock.patch.object(EncodingSpec, "generator", autospec=True, side_effect=original) as asked:
        encoding_of(name)
    return asked.called


@pytest.mark.parametrize("name", NAMES)
def test_one_seed_gives_one_encoding_and_another_seed_another(name):
    one, same, other = (encoding_of(name, seed=s) for s in (5, 5, 6))
    states = [encoding.state_dict() for encoding in (one, same, other)]
    equal = [all(torch.equal(states[0][key], state[key]) for key in state) for state in states]
    drawn = draws_at_construction(name)
    assert equal == [True, True, not drawn]
    for encoding in (one, same, other):
        noise = torch.Generator().manual_seed(7)
        for parameter in encoding.parameters():  # a factor that starts at zero hides what is drawn
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=noise)
    (q, k), at = example(), torch.arange(6)
    x = torch.rand(2, 6, WIDTH, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    scores = [score_matrix(encoding, q, k, at, at, x) for encoding in (one, same, other)]
    assert torch.equal(scores[0], scores[1])
    assert torch.equal(scores[0], scores[2]) == (not drawn)


@pytest.mark.parametrize("name", [n for n in NAMES if encoding_of(n).no_softmax])
def test_an_encoding_that_softmax_attention_does_not_compute_is_refused_by_it(name):
    with pytest.raises(ValueError, match="use it with linear attention"):
        attention_of(name, "softmax")


@pytest.mark.parametrize("name", [n for n in NAMES if not encoding_of(n).serves_linear])
def test_an_encoding_that_needs_scores_is_refused_by_linear_attention(name):
    with pytest.raises(ValueError, match="softmax attention"):
        attention_of(name, "linear")
