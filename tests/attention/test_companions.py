"""Every tensor that belongs to another one is refused in one sentence if it does not fit."""

import itertools
import re

import pytest
import torch
from torch import nn

from lrpe_fairseq.attention.cross import CrossAttention
from lrpe_fairseq.attention.linear import (
    NORMALIZERS,
    LinearState,
    attend_to_memory,
    linear_attention,
    linear_attention_block,
    linear_attention_naive,
    summed_memory,
)
from lrpe_fairseq.attention.multihead import (
    AttentionState,
    Memory,
    MultiheadAttention,
    reorder_attention_state,
)
from lrpe_fairseq.attention.tokens import check_tokens
from lrpe_fairseq.encodings import (
    ENCODINGS,
    QueryKeyEncoding,
    build_encoding,
    encoding_class,
    is_causal_only,
)
from lrpe_fairseq.encodings.core.forms import Transport
from tests.end_to_end.cases import computes

BATCH, TIME, SOURCE, WIDTH, HEADS = 2, 7, 5, 16, 2
HEAD = WIDTH // HEADS
NAMES = (*ENCODINGS, "gated:rope", "selective:lrpe-type2", "path:rope", "ape:tree3+sequence")
PAIRS = [(name, kind) for name in NAMES for kind in ("linear", "softmax") if computes(kind, name)]


def refused(call, name, *given, **options):
    """Assert that a call names the tensor in one sentence, and not an internal error."""
    with pytest.raises(ValueError, match=f"^{re.escape(name)} must be an? ") as error:
        call(*given, **options)
    assert "\n" not in str(error.value)


def shaped(right, *shapes):
    """Tensors like ``right`` of other shapes."""
    return [right.new_zeros(shape) for shape in shapes]


def of_other_dtypes(right):
    every = (torch.bool, torch.int64, torch.int32, torch.float32)
    kinds = [d for d in every if d != right.dtype and not right.is_floating_point()]
    return [right.to(dtype) for dtype in (kinds or [torch.int64, torch.bool])]


def elsewhere(right):
    return right.to("meta")


def wrongs(right):
    """What is never right for a companion of some (B, T) or (B, T, .)."""
    batch, length, *rest = right.shape
    sizes = ((batch, length + 2), (batch, 1), (1, length), (batch + 1, length), (length, batch))
    shapes = [(*size, *rest) for size in sizes] + [(length, *rest), (batch, length, *rest, 1), ()]
    return [*shaped(right, *shapes), *of_other_dtypes(right), elsewhere(right), right.tolist()]


MASK = torch.zeros(BATCH, TIME, dtype=torch.bool)
POSITIONS = torch.arange(TIME).expand(BATCH, -1).contiguous()
OF_TOKENS = {"positions": POSITIONS, "key_padding_mask": MASK, "starts": MASK}


def wrong_positions(right):
    """A wrong (T,), too; one of (T,) alone is right."""
    line = right[0]
    own = [x for x in wrongs(right) if getattr(x, "shape", ()) != line.shape]
    return [*own, line.float(), line.int(), line[:-1], line.to("meta")]


def self_attention(name, kind, **options):
    given = {"attention_type": kind, "position_encoding": name, "causal": True, **options}
    return MultiheadAttention(WIDTH, options.pop("heads", HEADS), **given)


@pytest.mark.parametrize("companion", OF_TOKENS)
@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_self_attention_refuses_what_does_not_belong_to_its_tokens(name, kind, companion):
    module, x, right = self_attention(name, kind), torch.randn(BATCH, TIME, WIDTH), OF_TOKENS
    module.attend(x, **{companion: right[companion]})
    other = wrong_positions if companion == "positions" else wrongs
    for wrong in other(right[companion]):
        refused(module.attend, companion, x, **{companion: wrong})


@pytest.mark.parametrize("kind", ["linear", "softmax"])
def test_the_interface_of_fairseq_refuses_them_too(kind):
    module, x = self_attention("rope", kind), torch.randn(TIME, BATCH, WIDTH)
    for mask in (MASK.T, MASK.float(), elsewhere(MASK)):
        refused(module, "key_padding_mask", x, key_padding_mask=mask)
    module.given.starts = MASK[:, :1]
    refused(module, "starts", x)
    refused(module.denominators, "starts", x.transpose(0, 1))


@pytest.mark.parametrize("kind", ["linear", "softmax"])
def test_x_itself_has_three_axes_and_the_width_of_the_layer(kind):
    module = self_attention("rope", kind)
    for x in (torch.randn(BATCH, TIME), torch.randn(BATCH, TIME, WIDTH + 2), torch.ones(2, 3, 16)):
        refused(module.attend, "x", x if x.dim() == 2 or x.shape[-1] != WIDTH else x.long())


@pytest.mark.parametrize("x", [[1], None, 3.0])
def test_x_itself_is_a_tensor(x):
    refused(layer().attend, "x", x)
    cross = CrossAttention(WIDTH, HEADS, attention_type="linear", position_encoding="rope")
    refused(cross.attend, "x", x, torch.randn(BATCH, TIME, WIDTH))


def test_older_masks_of_fairseq_are_read_as_bool():
    module, x = self_attention("lrpe-type2", "linear"), torch.randn(BATCH, TIME, WIDTH)
    mask = MASK.clone()
    mask[1, 4:] = True
    assert torch.equal(module.attend(x, mask.byte())[0], module.attend(x, mask)[0])


SERVED_CROSS = [
    (name, kind)
    for name, kind in PAIRS
    if not (is_causal_only(name) or encoding_class(name).has_states or "selective" in name)
    and not (kind == "linear" and build_encoding(name, HEAD, HEADS).log_decay() is not None)
]
OF_BOTH = {
    "positions": POSITIONS,
    "query_padding_mask": MASK,
    "memory_positions": POSITIONS[:, :SOURCE].contiguous(),
    "key_padding_mask": MASK[:, :SOURCE].contiguous(),
}


@pytest.mark.parametrize("companion", OF_BOTH)
@pytest.mark.parametrize(("name", "kind"), SERVED_CROSS)
def test_cross_attention_refuses_what_does_not_belong_to_query_or_memory(name, kind, companion):
    module = CrossAttention(WIDTH, HEADS, attention_type=kind, position_encoding=name)
    x, memory = torch.randn(BATCH, TIME, WIDTH), torch.randn(BATCH, SOURCE, WIDTH)
    module.attend(x, memory, **{companion: OF_BOTH[companion]})
    other = wrong_positions if "positions" in companion else wrongs
    for wrong in other(OF_BOTH[companion]):
        refused(module.attend, companion, x, memory, **{companion: wrong})


@pytest.mark.parametrize("kind", ["linear", "softmax"])
def test_a_memory_has_the_batch_width_and_device_of_its_layer(kind):
    module = CrossAttention(WIDTH, HEADS, attention_type=kind, position_encoding="rope")
    x, memory = torch.randn(BATCH, TIME, WIDTH), torch.randn(BATCH, SOURCE, WIDTH)
    own = memory.new_zeros
    for wrong in (
        own(BATCH + 1, SOURCE, WIDTH),
        own(1, SOURCE, WIDTH),
        own(BATCH, SOURCE, WIDTH + 2),
        own(BATCH, WIDTH),
        memory.long(),
        elsewhere(memory),
    ):
        refused(module.attend, "memory", x, wrong)


# --- the encodings themselves -------------------------------------------------------------------


def call_of(name):
    """A function of both positions, and q and k."""
    encoding = build_encoding(name, HEAD, HEADS, causal=True)
    q, k = torch.rand(BATCH, HEADS, TIME, HEAD), torch.rand(BATCH, HEADS, TIME, HEAD)
    if isinstance(encoding, QueryKeyEncoding):
        return lambda *at: encoding(q, k, *at)
    return lambda *at: encoding(q @ k.mT, q, k, *at)


@pytest.mark.parametrize("name", NAMES)
def test_an_encoding_refuses_positions_that_do_not_belong_to_q_or_k(name):
    call = call_of(name)
    call(POSITIONS, POSITIONS)
    for wrong in wrong_positions(POSITIONS):
        refused(call, "positions", wrong, POSITIONS)
        refused(call, "positions", POSITIONS, wrong)


def test_places_have_a_number_for_every_head_and_token():
    encoding = build_encoding("selective:rope", HEAD, HEADS)
    q = torch.rand(BATCH, HEADS, TIME, HEAD)
    right = torch.rand(BATCH, HEADS, TIME, HEAD // 2, dtype=torch.float64)
    encoding(q, q, right, right)
    encoding(q, q, right[..., :1], right[..., :1])
    wrong = [right[:1], right[:, :1], right[:, :, :1], right[..., :3], elsewhere(right)]
    for places in wrong:
        refused(encoding, "phases", q, q, places, right)
        refused(encoding, "phases", q, q, right, places)


# --- linear attention of features ---------------------------------------------------------------


def features():
    return [torch.rand(BATCH, HEADS, TIME, HEAD) for _ in range(3)]


def small(*shape):
    return torch.rand(shape)


WRONG_FEATURES = {
    "k": [small(BATCH, 1, TIME, HEAD), small(BATCH, HEADS, TIME, 3), small(1, HEADS, TIME, HEAD)],
    "v": [small(BATCH, HEADS, 1, HEAD), small(BATCH, 1, TIME, HEAD), small(BATCH, TIME, HEAD)],
}
FORMS = {"fast": linear_attention, "naive": linear_attention_naive}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_linear_attention_refuses_what_does_not_belong_to_q(form, causal):
    q, k, v = features()

    def call(k=k, v=v, **options):
        return FORMS[form](q, k, v, causal=causal, **options)

    for name, found in WRONG_FEATURES.items():
        for wrong in [*found, elsewhere(k), k.long()]:
            refused(call, name, **{name: wrong})
    for wrong in wrongs(MASK):
        refused(call, "key_padding_mask", key_padding_mask=wrong)
    for wrong in (small(HEADS + 1), small(BATCH, HEADS, 1), torch.ones(HEADS).long()):
        refused(call, "log_decay", log_decay=wrong)
    refused(call, "log_decay", log_decay=elsewhere(small(HEADS)))
    for wrong in (small(1, HEADS, TIME, HEAD), small(BATCH, HEADS, 1, HEAD), elsewhere(q)):
        given = {"normalizer": "content"}
        refused(call, "content[0]", content=(wrong, k), **given)
        refused(call, "content[1]", content=(q, wrong), **given)


def block(*given, causal, **options):
    return linear_attention_block(*given, state=None, **options)


@pytest.mark.parametrize("form", [*FORMS.values(), block])
def test_causal_linear_attention_refuses_other_documents_and_transports(form):
    q, k, v = features()

    def call(**options):
        return form(q, k, v, causal=True, **options)

    for wrong in wrongs(MASK):
        refused(call, "starts", starts=wrong)
    w, beta = nn.functional.normalize(q, dim=-1), small(BATCH, HEADS, TIME)
    call(transport=Transport(w, beta))
    for wrong in (w[:1], w[:, :, :1], w[..., :3], elsewhere(w)):
        refused(call, "transport.w", transport=Transport(wrong, beta))
    for wrong in (beta[:1], beta[..., :1], beta.long(), elsewhere(beta)):
        refused(call, "transport.beta", transport=Transport(w, wrong))


def test_sums_of_other_features_are_refused():
    q, k, v = features()
    right = summed_memory(k, v)
    for kv in (right.kv[:1], right.kv[:, :1], right.kv[:, :, :3], elsewhere(right.kv)):
        wrong = LinearState(kv, right.keys)
        refused(attend_to_memory, "state.kv", q, wrong, dtype=q.dtype)
        refused(linear_attention_block, "state.kv", q, k, v, state=wrong)
    for keys in (right.keys[:1], elsewhere(right.keys)):
        wrong = LinearState(right.kv, keys)
        refused(attend_to_memory, "state.keys", q, wrong, dtype=q.dtype)
        refused(linear_attention_block, "state.keys", q, k, v, state=wrong)


# --- states -------------------------------------------------------------------------------------

OTHERS = {
    "another encoding": {"position_encoding": "lrpe-type3"},
    "gates": {"position_encoding": "gated:rope"},
    "a window": {"window": 4},
    "a wider window": {"window": 6},
    "other heads": {"num_heads": 4},
    "another base": {"rotation_base": 500.0},
    "another part": {"parts": "qk-norm"},
    "another attention": {},
    "another normalizer": {"normalizer": "content"},
}


def layer(num_heads=HEADS, **options):
    given = {"attention_type": "linear", "position_encoding": "rope", "causal": True, **options}
    return MultiheadAttention(WIDTH, num_heads, **given)


FOREIGN = [
    (one, other, kind)
    for one, other in itertools.permutations([*OTHERS, "rope"], 2)
    for kind in ("linear", "softmax")
    if kind == "linear" or "another normalizer" not in (one, other)
    if {one, other} != {"another attention", "another normalizer"}
]


@pytest.mark.parametrize(("one", "other", "kind"), FOREIGN)
def test_the_state_of_another_layer_is_refused(one, other, kind):
    turned = {"linear": "softmax", "softmax": "linear"}
    kinds = [turned[kind] if name == "another attention" else kind for name in (one, other)]
    x = torch.randn(BATCH, TIME, WIDTH)
    makes, reads = (
        layer(attention_type=own, **OTHERS.get(name, {}))
        for name, own in zip((one, other), kinds, strict=True)
    )
    _, state = makes.attend(x, keep_state=True)
    makes.attend(x, state=state)
    with pytest.raises(ValueError, match="the state belongs to another layer or batch") as error:
        reads.attend(x, state=state)
    assert "\n" not in str(error.value)


def test_the_refusal_names_both_layers():
    x = torch.randn(BATCH, TIME, WIDTH)
    _, state = layer(window=3).attend(x, keep_state=True)
    said = (
        "than this linear self-attention with rope and rotated, 2 heads of width 8: it is of "
        "linear self-attention with rope and rotated, 2 heads of width 8 and a window of 3; pass"
    )
    with pytest.raises(ValueError, match=said):
        layer().attend(x, state=state)


def moved(state):
    """A state of which one tensor is on another device."""
    return state._replace(next_position=elsewhere(state.next_position))


@pytest.mark.parametrize("kind", ["linear", "softmax"])
def test_a_state_of_another_batch_device_or_type_is_refused(kind):
    module, x = layer(attention_type=kind), torch.randn(BATCH, TIME, WIDTH)
    cross = CrossAttention(WIDTH, HEADS, attention_type=kind, position_encoding="rope")
    _, own = module.attend(x, keep_state=True)
    *_, of_cross = cross.attend(x, x, keep_state=True)
    alone = torch.tensor([0])
    for state in (reorder_attention_state(own, alone), moved(own), of_cross, own.past, 3):
        with pytest.raises(ValueError, match="the state belongs to another layer or batch"):
            module.attend(x, state=state)
    for state in (cross._reordered(of_cross, alone), moved(of_cross), own, of_cross.memory):
        with pytest.raises(ValueError, match="the state belongs to another layer or batch"):
            cross.attend(x, x, state=state)


@pytest.mark.parametrize("kind", ["linear", "softmax"])
def test_a_cross_attention_refuses_the_state_of_another(kind):
    x, of = torch.randn(BATCH, TIME, WIDTH), {"attention_type": kind}
    one, other = (CrossAttention(WIDTH, HEADS, position_encoding=n, **of) for n in ("rope", "none"))
    *_, state = one.attend(x, x, keep_state=True)
    with pytest.raises(ValueError, match=r"it is of .* cross-attention with rope"):
        other.attend(x, x, state=state)


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_a_state_continues_its_own_text_also_after_beams_are_reordered(name, kind):
    module, x = self_attention(name, kind).eval(), torch.randn(BATCH, TIME, WIDTH)
    with torch.no_grad():
        _, state = module.attend(x[:, :4], keep_state=True)
        state = reorder_attention_state(state, torch.tensor([1, 0]))
        assert state.owner == module.owner
        out, state = module.attend(x[:, 4:].flip(0), state=state, keep_state=True)
        without = state._replace(owner=None)  # of no layer in particular
        module.attend(x, state=without)
    assert out.shape == (BATCH, 3, WIDTH)
    assert isinstance(state, AttentionState)


def test_a_memory_of_segments_has_the_batch_width_and_documents_of_x():
    module, x = layer(attention_type="softmax"), torch.randn(BATCH, TIME, WIDTH)
    inputs, documents = torch.randn(3, BATCH, WIDTH), torch.zeros(BATCH, 3 + TIME).long()
    module.attend(x, state=Memory(inputs, documents))
    for wrong in (inputs[:, :1], inputs[..., :3], inputs[0], elsewhere(inputs), inputs.long()):
        refused(module.attend, "the inputs of a memory", x, state=Memory(wrong, documents))
    for wrong in (documents[:, 1:], documents[:1], documents.float(), elsewhere(documents)):
        refused(module.attend, "the segments of a memory", x, state=Memory(inputs, wrong))
    for mask in (MASK[:, :1], MASK.float()):
        refused(module.attend, "key_padding_mask", x, mask, Memory(inputs))


def test_a_memory_of_segments_refuses_what_it_would_ignore():
    module, x = layer(attention_type="softmax"), torch.randn(BATCH, TIME, WIDTH)
    memory = Memory(torch.randn(3, BATCH, WIDTH))
    with pytest.raises(ValueError, match="a memory of segments is read and never continued"):
        module.attend(x, state=memory, keep_state=True)
    with pytest.raises(ValueError, match="a memory of segments has documents of its own"):
        module.attend(x, state=memory, starts=MASK)
    module.given.starts = MASK  # a stack says it to every layer
    assert module(x.transpose(0, 1), incremental_state=module.remembering(memory))[0] is not None


def test_the_states_of_a_stack_are_those_of_its_batch():
    module, x = self_attention("tape", "softmax"), torch.randn(BATCH, TIME, WIDTH)
    right = torch.randn(BATCH, HEADS, TIME, HEAD)
    module.given.states = right
    module.attend(x)
    for wrong in (right[:, :1], right[:, :, :1], right[..., :3], elsewhere(right)):
        module.given.states = wrong
        refused(module.attend, "given.states", x)


# --- no text, and no values ---------------------------------------------------------------------


@pytest.mark.parametrize("parts", ["none", "kv-shift"])
@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_a_text_of_no_token_may_have_starts_a_mask_and_positions(name, kind, parts):
    module, x = self_attention(name, kind, parts=parts), torch.randn(BATCH, 0, WIDTH)
    none = torch.zeros(BATCH, 0, dtype=torch.bool)
    for given in ({"starts": none}, {"starts": none, "key_padding_mask": none}):
        out, _ = module.attend(x, **given)
        assert out.shape == x.shape
        out.sum().backward()
    assert module.attend(x, positions=torch.zeros(0).long())[0].shape == x.shape


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("name", ["gated:path:rope", "path:alibi", "path:permuteformer"])
def test_a_text_of_no_token_may_have_decays_and_reflections(name, normalizer):
    module, x = self_attention(name, "linear", normalizer=normalizer), torch.randn(BATCH, 0, WIDTH)
    out, _ = module.attend(x)
    assert out.shape == x.shape
    out.sum().backward()


@pytest.mark.parametrize("name", ["none", "spe", "deberta", "transformer-xl"])
@pytest.mark.parametrize(("batch", "time"), [(0, 3), (0, 0), (2, 0)])
def test_a_batch_of_no_text_may_be_padded_and_continued(name, batch, time):
    options = {"attention_type": "softmax", "position_encoding": name}
    module = MultiheadAttention(WIDTH, HEADS, causal=True, **options)
    x, padding = torch.randn(batch, time, WIDTH), torch.zeros(batch, time, dtype=torch.bool)
    assert module.attend(x, padding, starts=padding)[0].shape == x.shape
    out, state = module.attend(x, padding, keep_state=True)
    assert out.shape == x.shape
    following = torch.randn(batch, 2, WIDTH)
    assert module.attend(following, None, state, keep_state=True)[0].shape == following.shape


@pytest.mark.parametrize("name", ["none", "transformer-xl"])
def test_a_memory_without_tokens_adds_nothing(name):
    module = CrossAttention(WIDTH, HEADS, attention_type="softmax", position_encoding=name)
    x = torch.randn(BATCH, TIME, WIDTH)
    out = module.attend(x, x[:, :0])[0]
    torch.testing.assert_close(out, module.out_proj.bias.expand_as(out))


def test_no_value_is_read():
    """Nothing can be read on the device meta."""
    x, mask = torch.empty(BATCH, TIME, WIDTH, device="meta"), elsewhere(MASK)
    check_tokens(x, mask, elsewhere(POSITIONS), mask, WIDTH)
