"""What encodings remember is never stale, never half-written, and safe between threads."""

import copy
import os
import pickle
import sys
import threading
import time
import weakref

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lrpe_fairseq.attention import tokens
from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.encodings import build_encoding
from lrpe_fairseq.encodings.core import positions
from lrpe_fairseq.encodings.core.positions import PositionCache
from lrpe_fairseq.kernels import conditions
from lrpe_fairseq.kernels.encode import encode

SECONDS = float(os.environ.get("LRPE_THREAD_TEST_SECONDS", "2"))
"""How long two threads are compared; ten seconds find what two may miss."""


def test_an_exception_while_computing_leaves_nothing_behind():
    cache, positions = PositionCache(), torch.arange(4)

    def fails():
        raise MemoryError

    with pytest.raises(MemoryError):
        cache.get(positions, None, fails)
    assert cache.get(positions, None, lambda: "value") == "value"
    with pytest.raises(MemoryError):
        cache.get(torch.arange(4), None, fails)
    assert cache.get(positions, None, fails) == "value"


def test_an_entry_belongs_to_the_same_tensors_in_the_same_version_and_key():
    cache, one, other = PositionCache(), torch.arange(4), torch.arange(4)
    count = iter(range(100))

    def next_value():
        return next(count)

    assert [cache.get(one, "a", next_value) for _ in range(3)] == [0, 0, 0]
    assert cache.get(one, "b", next_value) == 1
    assert cache.get((one, other), "b", next_value) == 2
    assert cache.get((other, one), "b", next_value) == 3
    one += 1
    assert cache.get((other, one), "b", next_value) == 4
    with torch.inference_mode():
        assert cache.get((other, one), "b", next_value) == 5


class Recorder(TorchDispatchMode):
    """Operations of one call, repeated into the same memory, as a CUDA graph repeats them."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, given=(), named=None):
        out = function(*given, **(named or {}))
        self.calls.append((function, given, named or {}, out))
        return out

    def replay(self):
        for function, given, named, out in self.calls:
            again = function(*given, **named)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@pytest.mark.parametrize("name", ["rope", "lrpe-type1", "t5"])
def test_a_recorded_graph_reads_the_documents_of_every_call(name):
    """Also after a call that filled the caches, as it runs before a capture."""
    torch.manual_seed(0)
    kind = "linear" if name == "lrpe-type1" else "softmax"
    module = MultiheadAttention(32, 2, attention_type=kind, position_encoding=name, causal=True)
    x, starts = torch.randn(2, 12, 32), torch.zeros(2, 12, dtype=torch.bool)
    others = starts.clone()
    others[0, 5] = others[1, 7] = True
    with torch.no_grad():
        module.attend(x, starts=starts)
        with Recorder() as graph:
            found, _ = module.attend(x, starts=starts)
        starts.copy_(others)
        graph.replay()
        torch.testing.assert_close(found, module.attend(x, starts=others)[0])


def test_a_captured_graph_counts_itself_and_keeps_the_constants_that_it_reads(monkeypatch):
    device = torch.device("cpu")
    before = positions.counted(7, device)
    assert positions.counted(7, device) is before
    monkeypatch.setattr(positions, "is_captured", lambda device: True)
    assert positions.counted(7, device) is not before
    assert positions.known_range(positions.counted(7, device, 2)) == (2, 6)
    read = weakref.ref(positions.constant((0.25, 7.0), torch.float32, device))
    monkeypatch.undo()
    for number in range(300):  # more than the cache keeps
        positions.constant((float(number),), torch.float32, device)
    assert read() is positions._of_graphs[(0.25, 7.0), torch.float32, device]
    positions._of_graphs.clear()


def test_a_traced_encoding_reads_the_positions_of_every_call():
    encoding = build_encoding("rope", head_dim=8, num_heads=2)
    x, positions = torch.randn(1, 2, 6, 8), torch.arange(6)

    def encoded(x, positions):
        return encoding(x, x, positions, positions)[0]

    encoded(x, positions)
    traced = make_fx(encoded)(x, positions)
    torch.testing.assert_close(traced(x, positions + 7), encoded(x, positions + 7))


def test_a_value_replaced_while_it_is_computed_is_still_the_callers_own():
    cache, mine, theirs = PositionCache(), torch.arange(2), torch.arange(3)

    def compute():
        cache.get(theirs, None, lambda: "theirs")  # as another thread would
        return "mine"

    assert cache.get(mine, None, compute) == "mine"
    assert cache.get(theirs, None, lambda: "theirs") == "theirs"


@pytest.fixture
def often_switching(monkeypatch):
    """Threads take turns while positions are computed, so that a race shows within a second."""
    monkeypatch.setattr(tokens, "_count_real_first", slow(tokens._count_real_first))
    monkeypatch.setattr(encode, "along_cycles", slow(encode.along_cycles))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def slow(function):
    def waits(*arguments):
        value = function(*arguments)
        time.sleep(1e-4)
        return value

    return waits


@pytest.mark.parametrize(
    ("name", "attention_type"),
    [("lrpe-type2", "linear"), ("lrpe-type4", "linear"), ("permuteformer", "linear"),
     ("spe", "linear"), ("t5", "softmax"), ("transformer-xl", "softmax")],
)  # fmt: skip
def test_two_threads_with_different_masks_get_the_results_of_one(
    name, attention_type, often_switching
):
    torch.manual_seed(0)
    options = {"attention_type": attention_type, "position_encoding": name, "causal": True}
    module = MultiheadAttention(16, 2, **options).eval()
    x = torch.randn(2, 9, 16)
    masks = [torch.zeros(2, 9).bool() for _ in range(2)]
    masks[0][0, :4], masks[1][1, 2:5] = True, True
    with torch.no_grad():
        wanted = [module.attend(x, mask)[0] for mask in masks]
    wrong, end = [], time.monotonic() + SECONDS / 6

    def work(mask, expected):
        try:
            while time.monotonic() < end:
                with torch.no_grad():
                    found = module.attend(x, mask)[0]
                if not torch.equal(found, expected):
                    wrong.append((found - expected).abs().max())
        except Exception as error:
            wrong.append(error)

    pairs = zip(masks, wanted, strict=True)
    threads = [threading.Thread(target=work, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def edit_data_in_place(tensor, new):
    tensor.data.copy_(new)


def replace_data(tensor, new):
    tensor.data = new


def copy_in_place(tensor, new):
    with torch.no_grad():
        tensor.copy_(new)


LEARNED, PERMUTED = ["lrpe-type2", "lrpe-type3", "lrpe-tmlr-type1", "liere"], ["permuteformer"]


@pytest.mark.parametrize(
    ("name", "edit"),
    [(name, edit) for edit in (replace_data, copy_in_place) for name in LEARNED + PERMUTED]
    # optimizers write through .data, which no buffer is
    + [(name, edit_data_in_place) for name in LEARNED],
)
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_an_edited_permutation_or_parameter_is_used_at_once(name, frozen, inference, edit):
    encoding, other = (build_encoding(name, 8, 2, seed=s).eval() for s in (0, 1))
    for parameter in encoding.parameters():
        parameter.requires_grad_(not frozen)
    for parameter in other.parameters():
        parameter.data.mul_(1.5)
    q, at = torch.rand(1, 2, 6, 8), torch.arange(6)
    with torch.inference_mode(inference):
        before = encoding(q, q, at, at)[0]
        for (_, own), (_, new) in zip(encoding.named_tensors(), other.named_tensors(), strict=True):
            edit(own, new.detach().clone())
        after, wanted = encoding(q, q, at, at)[0], other(q, q, at, at)[0]
    assert torch.equal(after, wanted)
    assert not torch.equal(after, before)


# --- the eigenbasis of learned generators in inference on a GPU, where nothing is read ----------

WITH_EIGENBASIS = ["liere", "comrope-ap", "comrope-ld", "ape", "ape-tree", "ape:cycle5"]


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Reading a tensor is not free."""
    monkeypatch.setattr(conditions, "_is_on_cpu", lambda x: False)


def pair_of(name):
    """An encoding, and one with other parameters; a function of an encoding's output."""
    one, other = (build_encoding(name, 8, 2, seed=seed).eval() for seed in (0, 1))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5).add_(0.1 * torch.randn_like(parameter))
    q, at = torch.rand(1, 2, 6, 8), torch.arange(6)
    return one, other, lambda encoding: encoding(q, q, at, at)[0]


@pytest.mark.parametrize("change", [copy_in_place, "load_state_dict", "replace"])
@pytest.mark.parametrize("name", WITH_EIGENBASIS)
def test_other_generators_are_used_at_once_without_a_read(name, change, as_on_a_gpu):
    one, other, out = pair_of(name)
    with torch.no_grad():
        before = out(one)
        assert torch.equal(out(one), before)
        if change == "load_state_dict":
            one.load_state_dict(other.state_dict())
        for (place, own), new in zip(one.named_parameters(), other.parameters(), strict=True):
            if change == "replace":
                holder, _, field = place.rpartition(".")
                setattr(one.get_submodule(holder), field, torch.nn.Parameter(new.clone()))
            elif change is copy_in_place:
                change(own, new)
        assert torch.equal(out(one), out(other))
        assert not torch.equal(out(one), before)


@pytest.mark.parametrize("name", WITH_EIGENBASIS)
def test_an_edit_that_cannot_be_seen_gives_nan_and_never_old_values(name, as_on_a_gpu):
    one, other, out = pair_of(name)
    with torch.no_grad():
        out(one)
        for own, new in zip(one.parameters(), other.parameters(), strict=True):
            edit_data_in_place(own, new)
        assert out(one)[:, :, 1:].isnan().all()  # the root of a tree has no matrix
        assert torch.equal(out(one.eval()), out(other))


@pytest.mark.parametrize("name", WITH_EIGENBASIS)
def test_an_optimizer_that_writes_through_data_never_leaves_old_values_or_nan(name, as_on_a_gpu):
    one, other, out = pair_of(name)
    for _ in range(3):
        with torch.no_grad():
            assert torch.equal(out(one), out(build_like(one, name)))
        out(one.train()).sum().backward()
        for own, new in zip(one.parameters(), other.parameters(), strict=True):
            own.data.add_(0.1 * new)  # as fairseq's Adam
        assert torch.equal(out(one), out(build_like(one, name)))


def build_like(encoding, name):
    """A new encoding with the same parameters, which remembers nothing."""
    new = build_encoding(name, 8, 2)
    new.load_state_dict(encoding.state_dict())
    return new


def test_a_copy_of_an_encoding_finds_its_own_eigenbasis(as_on_a_gpu):
    one, _, out = pair_of("liere")
    with torch.no_grad():
        before = out(one)
        copied = copy.deepcopy(one)
        copied.lower.mul_(2.0)
        assert not torch.equal(out(copied), before)
        assert torch.equal(out(one), before)
        assert torch.equal(out(pickle.loads(pickle.dumps(one))), before)
