"""Triton kernels are proved before they serve, and replaced by the definition where they fail.

The kernels run in Triton's interpreter, and failures are injected at their launches.
"""

import dataclasses
import importlib
import logging
import re
import threading
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton", reason="the kernels need triton, which is a test dependency")

from lrpe_fairseq.attention.linear import linear_attention
from lrpe_fairseq.encodings import build_encoding
from lrpe_fairseq.kernels import dispatch, loader, probe_triton, proof, triton_calls
from lrpe_fairseq.kernels.encode import encode_cpu
from tests import triton_probe
from tests.kernels.injected import Fails, Misled, Wrong, kernels_of, replaced

pytestmark = [
    pytest.mark.skipif(bool(triton_probe.why_not()), reason=triton_probe.why_not()),
    pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter"),
]


PROVE = proof._prove  # tests/conftest.py replaces it


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Triton's kernels serve CPU tensors, and nothing is proved yet."""
    monkeypatch.setattr(proof, "_prove", PROVE)
    for name in ("_known", "_reasons", "_failed_in"):
        monkeypatch.setattr(proof, name, {})
    monkeypatch.setattr(proof, "_warned", set())
    monkeypatch.setattr(loader, "SERVED", {})
    loader.interpret()
    yield
    loader.interpret(on=False)


# --- calls: by name, tensors that learn, and a function of them ----------------------------------


def rows(dtype=torch.float32, time=9, width=16, count=3):
    generator = torch.Generator().manual_seed(3)
    found = torch.rand(count, 1, 2, time, width, generator=generator).to(dtype)
    return [x.clone().requires_grad_() for x in found]


def linear(dtype, *, gates=False, causal=True, time=9):
    def call():
        leaves = rows(dtype, time)
        decay = -torch.rand(1, 2, time, generator=torch.Generator().manual_seed(4)) / 8
        leaves += [decay.requires_grad_()] if gates else []
        out = linear_attention(*leaves[:3], causal=causal, log_decay=leaves[3] if gates else None)
        return out, leaves

    return call


def encode(name):
    def call():
        q, k = rows(count=2)
        encoding = build_encoding(name, 16, 2)
        out = encoding.encode_both(q, k, torch.arange(9), torch.arange(9), phi=True)
        return torch.cat(out), [q, k, *encoding.parameters()]

    return call


def softmax(form, **masks):
    def call():
        leaves = rows()
        arguments = {"scale": 0.25, **masks}
        if form == "table":
            leaves.append(torch.linspace(-1, 1, 34).view(2, 17).requires_grad_())
            arguments |= {"causal": True, "table": leaves[3], "first_lag": -8}
        if form == "decay":
            arguments |= {"causal": True, "decay": torch.tensor([-0.5, -0.1])}
        run = dispatch.stick_attention if form == "stick" else dispatch.flash_attention
        out = run(*leaves[:3], **arguments)
        if out is None:  # as attention computes what no kernel serves
            out = definition_of(form)(*leaves[:3], **arguments)
        return out, leaves

    return call


def definition_of(form):
    from lrpe_fairseq.kernels.flash import flash
    from tests.kernels import stick_cases

    return stick_cases.definition if form == "stick" else flash.definition


PADDING = torch.arange(9).ge(7).unsqueeze(0)
CALLS = {
    "encode.encode_triton": encode("lrpe-type3"),
    "linear.causal_triton": linear(torch.float32, gates=True),
    "linear.sweep_triton": linear(torch.float16, gates=True),
    "linear.full_triton": linear(torch.float16, causal=False),
    "flash.flash_kernels": softmax("table", padding=PADDING),
    "flash.stick_kernels": softmax("stick"),
}
IN_PARTS = linear(torch.float16, time=130)
"""Causal sums of a text that is divided into parts."""
OF_PARTS = ("_sums_kernel", "_scan_kernel", "_later_kernel")
LAUNCHES = [(module, kernel) for module in CALLS for kernel in kernels_of(module)]


def call_of(module, kernel):
    return IN_PARTS if module == "linear.sweep_triton" and kernel in OF_PARTS else CALLS[module]


def computed(call):
    """Return a loss and the gradients of what learns."""
    out, leaves = call()
    loss = (out.double() * torch.arange(out.numel()).cos().view_as(out)).sum()
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def without_triton(call, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(loader, "triton_kernels", lambda module: None)
        return computed(call)


def warnings_of(caplog):
    return [x.getMessage() for x in caplog.records if x.levelno >= logging.WARNING]


# --- launches that fail --------------------------------------------------------------------------


def test_every_kernel_that_is_launched_has_a_case():
    assert len(LAUNCHES) == 28


@pytest.mark.parametrize(("module", "kernel"), LAUNCHES)
def test_where_a_launch_fails_the_results_are_those_without_kernels_with_one_warning(
    module, kernel, monkeypatch, caplog
):
    call = call_of(module, kernel)
    monkeypatch.setattr(encode_cpu, "serves", lambda *_: False)
    wanted = without_triton(call, monkeypatch)
    with replaced(monkeypatch, module, kernel, Fails()) as failing:
        first = computed(call)
        launches = failing.launches
        second = computed(call)
    assert failing.launches == launches > 0  # of proofs, and none later
    for found in (first, second):
        assert all(map(torch.equal, found, wanted))
    (said,) = warnings_of(caplog)
    for part in ("OutOfResources", "Triton's interpreter", torch.__version__, kernel):
        assert part in said
    assert "LRPE_FAIRSEQ_KERNELS=0 switches all kernels off" in said
    (served,) = [x for what, x in loader.SERVED.items() if what.startswith("kernel of ")]
    assert served[0].startswith("definition, because")
    assert kernel in served[0]


WRONG = [
    ("encode.encode_triton", "_encode", "q_out", "result 1"),
    ("encode.encode_triton", "_encode_gradient", "of_k", "the gradient of k"),
    ("linear.sweep_triton", "_key_kernel", "dv_ptr", "the gradient of v"),
    ("linear.full_triton", "_query_kernel", "dq_ptr", "the gradient of q"),
    ("linear.causal_triton", "_value_gradient_kernel", "grad_v_ptr", "the gradient of v"),
    ("flash.flash_kernels", "key_gradient_kernel", "dk_ptr", "the gradient of k"),
    ("flash.stick_kernels", "query_gradient_kernel", "dq_ptr", "the gradient of q"),
]


@pytest.mark.parametrize(("module", "kernel", "result", "said"), WRONG)
def test_a_kernel_one_number_of_which_is_wrong_does_not_serve(
    module, kernel, result, said, monkeypatch, caplog
):
    call = CALLS[module]
    monkeypatch.setattr(encode_cpu, "serves", lambda *_: False)
    wanted = without_triton(call, monkeypatch)
    with replaced(monkeypatch, module, kernel, Wrong(result)):
        found = computed(call)
    assert all(map(torch.equal, found, wanted))
    (warning,) = warnings_of(caplog)
    assert f"{said} differs from the definition by" in warning


def of_another_head(by_head):
    """Values by head in the order of the other heads."""
    return by_head.flip(0).contiguous()


MISLED = [
    ("output_kernel", "table_ptr", softmax("table"), "result 1"),
    ("key_gradient_kernel", "table_ptr", softmax("table"), "the gradient of k"),
    ("output_kernel", "decay_ptr", softmax("decay"), "result 1"),
    ("query_gradient_kernel", "decay_ptr", softmax("decay"), "the gradient of q"),
]


@pytest.mark.parametrize(("kernel", "argument", "call", "said"), MISLED)
def test_a_kernel_that_takes_the_row_of_another_head_does_not_serve(
    kernel, argument, call, said, monkeypatch, caplog
):
    wanted = without_triton(call, monkeypatch)
    with replaced(monkeypatch, "flash.flash_kernels", kernel, Misled(argument, of_another_head)):
        found = computed(call)
    assert all(map(torch.equal, found, wanted))
    (warning,) = warnings_of(caplog)
    assert f"{said} differs from the definition by" in warning


def test_a_kernel_that_takes_the_keys_of_another_text_does_not_serve(monkeypatch, caplog):
    call = softmax("table")
    misled = Misled("k_ptr", lambda k: k.flip(0))
    with replaced(monkeypatch, "flash.flash_kernels", "output_kernel", misled):
        computed(call)
    (warning,) = warnings_of(caplog)
    assert "result 1 differs from the definition by" in warning


def after_a_proof(call, monkeypatch):
    """Return the results without kernels, after a call of proved kernels."""
    monkeypatch.setattr(encode_cpu, "serves", lambda *_: False)
    wanted = without_triton(call, monkeypatch)
    computed(call)
    assert all(proof._known.values())
    return wanted


LATER = [
    ("encode.encode_triton", "_encode"),
    ("linear.causal_triton", "_output_kernel"),
    ("linear.full_triton", "_output_kernel"),
    ("flash.stick_kernels", "output_kernel"),
]


@pytest.mark.parametrize(("module", "kernel"), LATER)
def test_a_later_launch_that_fails_loses_nothing(module, kernel, monkeypatch, caplog):
    call = CALLS[module]
    wanted = after_a_proof(call, monkeypatch)
    assert not warnings_of(caplog)
    with replaced(monkeypatch, module, kernel, Fails()):
        for _ in range(2):
            assert all(map(torch.equal, computed(call), wanted))
    assert len(warnings_of(caplog)) == 1


BACKWARD = [
    ("encode.encode_triton", "_encode_gradient"),
    ("linear.sweep_triton", "_query_kernel"),
    ("linear.causal_triton", "_key_gradient_kernel"),
    ("linear.full_triton", "_key_kernel"),
    ("flash.flash_kernels", "lag_sums_kernel"),
    ("flash.stick_kernels", "rest_kernel"),
]


@pytest.mark.parametrize(("module", "kernel"), BACKWARD)
def test_a_backward_pass_that_fails_after_its_forward_pass_gives_the_gradients_of_the_definition(
    module, kernel, monkeypatch, caplog
):
    call = CALLS[module]
    wanted = after_a_proof(call, monkeypatch)
    with replaced(monkeypatch, module, kernel, Fails()) as failing:
        first = computed(call)
        assert failing.launches == 1
        second = computed(call)
    for found, expected in zip(first, wanted, strict=True):
        bound = 2e-3 if found.dtype == torch.float16 or wanted[1].dtype == torch.float16 else 1e-5
        torch.testing.assert_close(found, expected, rtol=bound, atol=bound)
    assert all(map(torch.equal, second, wanted))
    (said,) = warnings_of(caplog)
    assert f"in the backward pass {kernel}" in said


def test_checkpointing_recomputes_what_the_kernels_computed_where_their_backward_pass_fails(
    monkeypatch, caplog
):
    def step():
        torch.manual_seed(0)
        q, k, v = (x.detach().requires_grad_() for x in rows(torch.float16))
        attend = partial(linear_attention, causal=False)
        h = v
        for _ in range(2):
            h = checkpoint(attend, q, k, h, use_reentrant=False)
        h.float().sum().backward()
        return q.grad

    wanted = step()
    with replaced(monkeypatch, "linear.full_triton", "_key_kernel", Fails()):
        found = [step() for _ in range(2)]
    for grad in found:
        torch.testing.assert_close(grad, wanted, rtol=2e-3, atol=2e-3)
    assert len(warnings_of(caplog)) == 1


def test_a_failure_on_another_rank_waits_for_the_end_of_the_backward_pass(monkeypatch):
    call = CALLS["linear.full_triton"]
    after_a_proof(call, monkeypatch)
    monkeypatch.setattr(proof, "_failed_elsewhere", lambda key: True)
    monkeypatch.setattr(proof, "_backward_pass", lambda: 3)
    computed(call)
    assert all(proof._known.values())
    monkeypatch.setattr(proof, "_backward_pass", lambda: proof.OUTSIDE)
    computed(call)
    assert not all(proof._known.values())


def test_kernels_are_not_used_for_the_first_time_while_a_graph_is_captured(monkeypatch):
    name = "lrpe_fairseq.kernels.linear.full_triton"
    monkeypatch.setattr(loader, "_captures", lambda: True)
    assert loader.triton_kernels(name) is None
    monkeypatch.setattr(loader, "_captures", lambda: False)
    assert loader.triton_kernels(name) is not None
    monkeypatch.setattr(loader, "_captures", lambda: True)
    assert loader.triton_kernels(name) is not None


def test_where_the_definition_fails_too_one_sentence_names_the_switch(monkeypatch):
    def no_memory(*_):
        raise torch.OutOfMemoryError("out of memory")

    call = CALLS["linear.full_triton"]
    computed(call)
    from lrpe_fairseq.kernels.linear import full_triton

    monkeypatch.setattr(full_triton, "_defined_gradients", no_memory)
    with (
        replaced(monkeypatch, "linear.full_triton", "_key_kernel", Fails()),
        pytest.raises(RuntimeError, match=r"out of memory\): set LRPE_FAIRSEQ_KERNELS=0, which"),
    ):
        computed(call)


# --- proofs --------------------------------------------------------------------------------------


STRIDE = re.compile("[a-z]{1,2}[bht]")


def compiled_for(kernel, args, constants):
    """What the code of a launch depends on; as ``loader._key``, which knows compiled kernels."""
    found = [kernel.fn.__name__, *sorted(constants.items())]
    for name, x in zip(kernel.arg_names, args, strict=False):
        if isinstance(x, torch.Tensor):
            found.append((name, x.dtype, x.data_ptr() % 16 == 0))
        elif "UNIT" not in constants and STRIDE.fullmatch(name):
            found.append((name, x % 16 == 0))
    return tuple(found)


@pytest.fixture
def seen(monkeypatch):
    """What proofs (True) and calls (False) launch."""
    found = {True: set(), False: set()}

    def launch(kernel, grid, args, constants):
        in_proof = threading.current_thread().name == "lrpe_fairseq-proof"
        if kernel.fn.__module__ != probe_triton.__name__:
            found[in_proof].add(compiled_for(kernel, args, constants))
        kernel[grid](*args, **constants)

    monkeypatch.setattr(encode_cpu, "serves", lambda *_: False)
    monkeypatch.setattr(loader, "_launch", launch)
    return found


@pytest.mark.parametrize("module", CALLS)
def test_a_proof_launches_what_the_call_does_and_draws_no_random_numbers(module, seen):
    state = torch.get_rng_state()
    computed(CALLS[module])
    assert torch.equal(torch.get_rng_state(), state)
    assert seen[False] == seen[True]
    assert seen[True]


def one_element_later(x):
    """x in memory that starts an element after a multiple of 16 bytes."""
    memory = torch.empty(x.numel() + 1, dtype=x.dtype)
    return memory[1:].view(x.shape).copy_(x.detach()).requires_grad_(x.requires_grad)


@pytest.mark.parametrize("module", CALLS)
def test_inputs_that_start_elsewhere_have_a_proof_of_their_own(module, seen, monkeypatch):
    computed(CALLS[module])
    proved = len(proof._known)
    given = rows

    def moved(*args, **options):
        return [one_element_later(x) for x in given(*args, **options)]

    monkeypatch.setitem(globals(), "rows", moved)
    for found in seen.values():
        found.clear()
    computed(CALLS[module])
    assert len(proof._known) > proved
    assert all(proof._known.values())
    assert seen[False] == seen[True]


def in_wide_rows(x):
    """x in rows that are no multiple of 16 numbers apart."""
    return torch.empty(*x.shape[:-1], x.shape[-1] + 1, dtype=x.dtype)[..., :-1].copy_(x)


def repeated(x):
    """The first number of every row of x, for all of the row, as the gradient of a sum."""
    return x[..., :1].expand_as(x)


@pytest.mark.parametrize("laid_out", [one_element_later, in_wide_rows, repeated])
@pytest.mark.parametrize("module", CALLS)
def test_gradients_that_lie_otherwise_run_the_kernels_of_the_proof(module, laid_out, seen):
    out, leaves = CALLS[module]()
    grad = laid_out(torch.arange(out.numel()).cos().view_as(out).to(out.dtype))
    found = torch.autograd.grad(out, leaves, grad)
    assert seen[False] == seen[True]
    out, leaves = CALLS[module]()
    wanted = torch.autograd.grad(out, leaves, grad.clone(memory_format=torch.contiguous_format))
    assert all(map(torch.equal, found, wanted))


def test_an_example_lies_in_memory_as_its_call_does():
    x = torch.rand(2, 3, 4, 5).requires_grad_()
    example = proof.Example(None, {"x": x, "none": None, "y": x[..., :3], "z": x}, (), None)
    assert proof.placed(example, (True, True)) is example
    inputs = proof.placed(example, (False, True, False)).inputs
    for name, moved in (("x", True), ("y", True), ("z", False)):
        assert torch.equal(inputs[name], example.inputs[name])
        assert inputs[name].stride() == example.inputs[name].stride()
        assert (inputs[name].data_ptr() % 16 != 0) == moved
    repeated = proof.Example(None, {"x": torch.rand(3, 1).expand(3, 4)}, (), None)
    moved = proof.placed(repeated, (False,)).inputs["x"]
    assert torch.equal(moved, repeated.inputs["x"])
    assert moved.data_ptr() % 16 == 4


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_proof_sees_nothing_of_its_caller(reentrant):
    """Checkpointing counts saved tensors, and computes the call again in the backward pass."""
    q, k, v = rows(torch.float16)

    def attention(q, k, v):
        return linear_attention(q, k, v, causal=False)

    wanted = torch.autograd.grad(attention(q, k, v).sum(), (q, k, v))
    proof._known.clear()
    with torch.autocast("cpu", torch.bfloat16):
        out = torch.utils.checkpoint.checkpoint(attention, q, k, v, use_reentrant=reentrant)
    out.sum().backward()
    assert all(map(torch.equal, (q.grad, k.grad, v.grad), wanted))
    assert list(proof._known.values()) == [True]


def test_texts_of_other_lengths_need_no_other_proof():
    for time in (70, 101, 128, 90):
        x = torch.rand(40, 4, time, 16).half()
        proofs = importlib.import_module(triton_calls.PROOFS[triton_calls.FULL])
        keys = {proofs.full_key_of(x, x, x, "sums", 1e-6)}
        keys |= {proofs.full_key_of(x[:, :, :66], x[:, :, :66], x[:, :, :66], "sums", 1e-6)}
        assert len(keys) == 1


def test_gates_of_another_precision_need_a_proof_of_their_own():
    """A kernel is compiled for the types of its pointers."""
    proofs = importlib.import_module(triton_calls.PROOFS[triton_calls.CAUSAL])
    x, gates = torch.rand(1, 2, 70, 16).half(), -torch.rand(1, 2, 70)
    types = (torch.float16, torch.float32)
    keys = {proofs.causal_key_of(x, x, x, "sums", gates.to(t), 1e-6) for t in types}
    assert len(keys) == 2


def test_a_table_that_is_constant_at_far_lags_has_a_proof_of_its_own():
    """Its example has tiles of far lags: another number in their place is found."""
    proofs = importlib.import_module(triton_calls.PROOFS[triton_calls.FLASH])
    x, table = torch.rand(1, 2, 300, 16).half().requires_grad_(), torch.zeros(2, 599)
    given = {"table": table.requires_grad_(), "first_lag": -299}
    keys = [proofs.key_of(proofs.FLASH, x, x, x, far=far, **given) for far in (None, 113, 50)]
    assert keys[0] != keys[1] == keys[2]
    example = proofs.example_of(proofs.FLASH, x, x, x, far=113, **given)
    assert not proof._why_wrong(example)
    (options,) = example.rest
    found = proof.errors(dataclasses.replace(example, rest=(options._replace(far=1),)))
    assert min(found.values()) > example.bound  # the output, and every gradient


@pytest.mark.parametrize("name", ["by_query", "by_key"])
def test_biases_of_tokens_of_another_precision_need_a_proof_of_their_own(name):
    proofs = importlib.import_module(triton_calls.PROOFS[triton_calls.FLASH])
    x = torch.rand(1, 2, 9, 16).half()
    given = [x.to(t) for t in (torch.float16, torch.float32)]
    keys = {proofs.key_of(proofs.FLASH, x, x, x, **{name: own}) for own in given}
    assert len(keys) == 2
    for own in given:
        example = proofs.example_of(proofs.FLASH, x, x, x, **{name: own})
        assert example.inputs[name].dtype == own.dtype


# --- keys, threads, capture ----------------------------------------------------------------------


def key(device="cpu", constants=()):
    return proof.Key("sums", torch.device(device), constants)


def test_every_device_and_every_set_of_constants_is_proved(monkeypatch):
    proved = []
    monkeypatch.setattr(proof, "_why_wrong", lambda example: proved.append(example) or "")
    for device, constants in (("cpu:0", 1), ("cpu:1", 1), ("cpu:0", 2), ("cpu:1", 1)):
        made = (device, constants)
        found = proof.run(key(device, (constants,)), lambda made=made: made, lambda: "kernels")
        assert found == "kernels"
    assert proved == [("cpu:0", 1), ("cpu:1", 1), ("cpu:0", 2)]


def test_while_a_graph_is_captured_only_proved_kernels_run(monkeypatch):
    def example():
        raise AssertionError("a proof while a graph is captured")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert proof.run(key("cuda:0"), example, lambda: "kernels") is None
    assert proof._known == {}
    assert loader.SERVED == {}
    monkeypatch.setitem(proof._known, key("cuda:0"), True)
    assert proof.run(key("cuda:0"), example, lambda: "kernels") == "kernels"


def test_a_thread_does_not_wait_for_the_proof_of_another(monkeypatch):
    """It could be the thread in which autograd computes what the proof waits for."""
    inside, leave = threading.Event(), threading.Event()

    def why_wrong(example):
        inside.set()
        assert leave.wait(60)
        return ""

    monkeypatch.setattr(proof, "_why_wrong", why_wrong)
    found = []
    first = threading.Thread(
        target=lambda: found.append(proof.run(key(), lambda: None, lambda: "kernels"))
    )
    first.start()
    assert inside.wait(60)
    assert proof.run(key(), lambda: None, lambda: "kernels") is None
    leave.set()
    first.join()
    assert found == ["kernels"]
    assert proof.run(key(), lambda: None, lambda: "kernels") == "kernels"


class Streams:
    """Stands for torch.cuda: the device and the stream of every thread, as torch has them."""

    def __init__(self, monkeypatch):
        self.present = threading.local()
        for name in ("device", "stream", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    @contextmanager
    def _set(self, name, value):
        before = getattr(self.present, name, None)
        setattr(self.present, name, value)
        yield
        setattr(self.present, name, before)

    def device(self, device):
        return self._set("device_now", device)

    def stream(self, stream):
        return self._set("stream_now", stream)

    def current_stream(self, device):
        return self.present.stream_now

    def now(self):
        found = (getattr(self.present, name, None) for name in ("device_now", "stream_now"))
        return threading.current_thread().name, *found


def test_a_proof_runs_on_the_device_and_the_stream_of_its_caller(monkeypatch):
    streams, proved = Streams(monkeypatch), []
    monkeypatch.setattr(proof, "_why_wrong", lambda example: proved.append(streams.now()) or "")
    for stream, constants in (("first", 1), ("second", 2)):
        with streams.stream(stream):
            made = key("cuda:1", (constants,))
            assert proof.run(made, lambda: None, streams.now)[2] == stream
    name, device = "lrpe_fairseq-proof", torch.device("cuda:1")
    assert proved == [(name, device, "first"), (name, device, "second")]
    assert streams.now()[1:] == (None, None)


def test_what_is_proved_on_one_stream_serves_on_another(monkeypatch):
    streams, proved = Streams(monkeypatch), []
    monkeypatch.setattr(proof, "_why_wrong", lambda example: proved.append(streams.now()) or "")
    for stream in ("first", "second"):
        with streams.stream(stream):
            assert proof.run(key("cuda:0"), lambda: None, streams.now)[2] == stream
    assert [stream for *_, stream in proved] == ["first"]


def test_what_is_no_failure_of_a_launch_is_raised(monkeypatch):
    monkeypatch.setitem(proof._known, key(), True)

    def kernels():
        raise ValueError("a window needs causal attention")

    with pytest.raises(ValueError, match="needs causal attention"):
        proof.run(key(), None, kernels)
    assert proof._known[key()]
    assert proof.current() is None
