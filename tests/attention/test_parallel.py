"""A text over two and four processes: attention of the parts is that of the whole."""

import json
import subprocess
import sys

import pytest
import torch
from torch import distributed as dist

from lrpe_fairseq.attention.cross import CrossAttention
from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.attention.parallel import (
    _OneProcess,
    bytes_sent,
    own_dropout,
    sequence_parallel,
)
from tests.attention import split
from tests.attention.split import BATCH, CASES, EVERY_NAME, LENGTH, WIDTH
from tests.end_to_end.cases import sampled

SIZES = (2, 4)
PATIENCE = 480
OF_NAMES = [case.id for turn, case in enumerate(EVERY_NAME) if turn % 4 == turn // 4 % 4]
GROUPED = [case.id for case in split.GROUPED]
SHARING = [case.id for case in split.GROUPED if not set(case.name) & set("@~^+")]
OTHERS = [name for name in list(CASES)[len(EVERY_NAME) :] if name not in GROUPED]
CHOSEN = [(name,) for name in OF_NAMES + OTHERS[::3] + SHARING]


@pytest.fixture(scope="module")
def errors(request, tmp_path_factory):
    """The errors of all ranks, {size: [{case: {result: error}}]}, of the cases that are tested."""
    folder = tmp_path_factory.mktemp("parts")
    items = [i for i in request.session.items if i.module is request.module]
    params = (getattr(item, "callspec", None) for item in items)
    wanted = {given.params["case"] for given in params if given and "case" in given.params}
    (folder / "cases.json").write_text(json.dumps([name for name in CASES if name in wanted]))
    ranks = [(rank, size) for size in SIZES for rank in range(size)]
    command = [sys.executable, "-m", "tests.attention.split"]
    running = [subprocess.Popen([*command, str(r), str(n), str(folder)]) for r, n in ranks]
    try:
        assert not any(process.wait(PATIENCE) for process in running)
    finally:
        for process in running:
            process.kill()
    return {
        size: [json.loads((folder / f"{size}-{rank}.json").read_text()) for rank in range(size)]
        for size in SIZES
    }


@pytest.mark.parametrize("case", sampled([(name,) for name in CASES], CHOSEN))
def test_outputs_and_gradients_of_the_parts_are_those_of_the_whole(case, errors):
    for size in SIZES:
        for rank, found in enumerate(errors[size]):
            wrong = {name: e for name, e in found[case].items() if not e < 1e-12 and name != "sent"}
            assert not wrong, (size, rank, wrong)


def test_most_quotients_have_denominators_that_are_large_enough_to_compare():
    linear = [case for case in EVERY_NAME if case.attention_type == "linear" and not case.masks]
    kept = [case for case in linear if split.layers_of(case)[0].normalizer == "rotated"]
    assert len(kept) > 0.6 * len(linear)


SENT = [case.id for case in EVERY_NAME if not case.masks and (case.id,) in CHOSEN]
SENT += [case.id for case in split.PARTS if not case.masks and (case.id,) in CHOSEN]


@pytest.mark.parametrize("case", SENT)
def test_the_bytes_that_are_counted_in_one_process_are_sent_by_several(case, errors):
    layer = split.layers_of(CASES[case])[0]
    for size in SIZES:
        assert errors[size][-1][case]["sent"] == bytes_sent(layer, LENGTH, size, BATCH)


def sent_per_token(name, attention_type, length, ranks=2):
    layer = MultiheadAttention(
        64, 4, attention_type=attention_type, position_encoding=name, causal=True
    )
    return bytes_sent(layer, length, ranks) / length


def test_linear_attention_sends_a_state_and_softmax_attention_all_keys():
    # forward and backward, float32: H (D' (E + 1) + 1) numbers, or H (D' + E) for every token
    width, heads = 16, 4
    state = 2 * 4 * heads * (width * (width + 1) + 1)
    assert sent_per_token("none", "linear", 256) == state / 256
    assert sent_per_token("none", "linear", 512) == state / 512
    assert sent_per_token("none", "softmax", 256) == 2 * 4 * heads * 2 * width / 2
    assert sent_per_token("none", "softmax", 512) == 2 * 4 * heads * 2 * width / 2


@pytest.mark.parametrize("what", ["rows", "text"])
def test_fully_sharded_plain_modules_have_the_gradients_of_whole_ones(what, errors):
    for size in SIZES:
        for found in errors[size]:
            assert found[split.SHARDED][what] < 1e-12


def test_ranks_drop_weights_independently_and_their_generators_stay_alike():
    dropped, later = [], []
    for rank in range(2):
        torch.manual_seed(3)
        sequence = _OneProcess(2, LENGTH)
        sequence.rank = rank
        with own_dropout(sequence, 0.1, torch.zeros(1)):
            dropped.append(torch.rand(4))
        later.append(torch.rand(4))
    assert not torch.equal(*dropped)
    assert torch.equal(*later)


# --- what cannot be split ----------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def _alone(tmp_path_factory):
    """A group of this process only."""
    where = f"file://{tmp_path_factory.mktemp('alone') / 'group'}"
    dist.init_process_group("gloo", init_method=where, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def attention(**options):
    options = {"attention_type": "linear", "position_encoding": "rope", "causal": True, **options}
    return MultiheadAttention(WIDTH, 2, **options)


def test_a_group_of_one_process_computes_the_whole():
    layer, x = attention(), torch.randn(BATCH, LENGTH, WIDTH)
    with sequence_parallel() as sequence:
        torch.testing.assert_close(layer.attend(x)[0], layer.attend(x)[0])
        assert sequence.sent == 0
        found = layer.attend(x)[0]
    torch.testing.assert_close(found, layer.attend(x)[0])


def test_attention_to_later_tokens_is_refused():
    layer = attention(causal=False)
    with sequence_parallel(), pytest.raises(ValueError, match="later tokens cannot be split"):
        layer.attend(torch.randn(BATCH, LENGTH, WIDTH))


def test_cross_attention_is_refused():
    layer = CrossAttention(WIDTH, 2, attention_type="linear", position_encoding="rope")
    x = torch.randn(BATCH, LENGTH, WIDTH)
    with sequence_parallel(), pytest.raises(ValueError, match="cross-attention cannot be split"):
        layer.attend(x, x)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"position_encoding": "gated-channel:rope"}, "gates of single features cannot be split"),
        (
            {"position_encoding": "rope", "context_scaling": "dynamic", "context_length": 8}
            | {"context_factor": 2.0},
            "dynamic",
        ),
    ],
)
def test_encodings_that_need_the_whole_text_are_refused(options, sentence):
    layer = MultiheadAttention(WIDTH, 2, attention_type="linear", causal=True, **options)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    assert layer.attend(x)[0].shape == x.shape
    with sequence_parallel(), pytest.raises(ValueError, match=sentence):
        layer.attend(x)


def test_a_state_is_refused():
    layer, x = attention(), torch.randn(BATCH, LENGTH, WIDTH)
    state = layer.attend(x, keep_state=True)[1]
    with sequence_parallel():
        for given in ({"keep_state": True}, {"state": state}):
            with pytest.raises(ValueError, match="a state or a memory of earlier segments cannot"):
                layer.attend(x, **given)


def test_another_number_of_tokens_than_that_of_the_part_is_refused():
    with sequence_parallel(length=LENGTH + 1), pytest.raises(ValueError, match="holds 14 of 14"):
        attention().attend(torch.randn(BATCH, LENGTH, WIDTH))


def test_a_text_with_fewer_tokens_than_processes_is_refused():
    with pytest.raises(ValueError, match="a text of 3 tokens cannot be split over 4 processes"):
        bytes_sent(attention(), length=3, ranks=4)
