"""A step after the first one does nothing that a CUDA graph cannot capture.

The Triton kernels run in the interpreter, which stands for their launches. Everything else of the
second step is seen as torch dispatches it: no value is read on the host, no tensor is made there,
nothing is copied between devices.
"""

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

pytest.importorskip("triton", reason="the kernels need triton, which is a test dependency")

from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.encodings.core import positions
from lrpe_fairseq.kernels import conditions, loader, proof
from tests import triton_probe
from tests.attention.test_reads import READS

pytestmark = [
    pytest.mark.skipif(bool(triton_probe.why_not()), reason=triton_probe.why_not()),
    pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter"),
]
BATCH, HEADS, TIME, WIDTH = 2, 2, 19, 32
FROM_THE_HOST = {"aten::lift_fresh", "aten::_pin_memory", "aten::pin_memory", "aten::set_"}
"""torch.tensor of numbers, and copies from pinned memory."""
HOST = "meta"
"""The device of tensors that are made without one; that of the layer is a CPU."""
READ_METHODS = ("tolist", "numpy", "cpu", "cuda", "pin_memory")
"""Methods of a tensor that a dispatch mode does not see on a CPU."""


class Captured(TorchDispatchMode):
    """Raises an error for what a CUDA graph cannot capture. launches: those of kernels."""

    def __init__(self):
        super().__init__()
        self.launches = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function.name().partition(".")[0]
        if name in READS | FROM_THE_HOST:
            raise RuntimeError(f"{name} cannot be captured")
        if "device" in kwargs and torch.device(kwargs["device"] or HOST).type == HOST:
            raise RuntimeError(f"{name} makes a tensor on the host")
        return function(*args, **kwargs)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(loader, "SERVED", {})
    monkeypatch.setattr(proof, "_known", {})
    monkeypatch.setattr(conditions, "_is_on_cpu", lambda x: False)
    # a CUDA graph is recorded below torch: kernels run
    monkeypatch.setattr(conditions, "_is_traced", torch.compiler.is_compiling)
    loader.interpret()
    yield
    loader.interpret(on=False)


@pytest.fixture
def captured(monkeypatch):
    """A function that runs a step as it is captured, and returns the number of launches."""

    def run(step, *modules):
        mode, launch, allowed = Captured(), loader._launch, []
        # fixed angles are neither parameters nor buffers: they stay on the host
        every = [x for module in modules for part in module.modules() for x in vars(part).values()]
        of_host = {id(x) for x in every if isinstance(x, torch.Tensor)}

        def launched(*given):
            mode.launches += 1
            allowed.append(True)
            with _disable_current_modes(), torch.device("cpu"):
                launch(*given)
            allowed.pop()

        def refused(method, x, *given, **named):
            if not allowed and id(x) not in of_host:
                raise RuntimeError(f"Tensor.{method.__name__} cannot be captured")
            return method(x, *given, **named)

        with monkeypatch.context() as patch:
            for name in READ_METHODS:
                method = getattr(torch.Tensor, name)
                patch.setattr(torch.Tensor, name, partialmethod(refused, method))
            for module in (positions, proof):
                patch.setattr(module, "is_captured", lambda device: True)
            patch.setattr(loader, "_captures", lambda: True)
            patch.setattr(loader, "_launch", launched)
            with torch.device(HOST), mode:
                step()
        return mode.launches

    return run


def partialmethod(refused, method):
    return lambda x, *given, **named: refused(method, x, *given, **named)


def padded():
    padding = torch.zeros(BATCH, TIME, dtype=torch.bool)
    padding[1, -5:] = True
    return {"key_padding_mask": padding}


def documents():
    starts = torch.zeros(BATCH, TIME, dtype=torch.bool)
    starts[0, 7] = True
    return {"starts": starts}


CASES = [
    *((name, "linear", True, {}) for name in ("rope", "lrpe-type2", "fox", "alibi")),
    *((name, "softmax", True, {}) for name in ("rope", "lrpe-type2", "fox", "alibi", "t5")),
    ("lrpe-type2", "linear", False, {}),
    ("t5", "softmax", False, {}),
    ("rope", "softmax", True, padded()),
    ("fox", "linear", True, documents()),
    ("fox", "softmax", True, documents()),
]


@pytest.mark.parametrize(("name", "attention_type", "causal", "given"), CASES)
def test_a_step_after_the_first_one_can_be_captured(name, attention_type, causal, given, captured):
    torch.manual_seed(0)
    options = {"attention_type": attention_type, "position_encoding": name, "causal": causal}
    module = MultiheadAttention(WIDTH, HEADS, **options).half()
    x = torch.randn(BATCH, TIME, WIDTH).half().requires_grad_()
    weights = torch.randn(BATCH, TIME, WIDTH).half()

    def step():
        out = module.attend(x, **given)[0]
        grads = torch.autograd.grad(out, [x, *module.parameters()], weights)
        found.append([out.detach(), *grads])

    found = []
    step()
    assert captured(step, module) > 0
    for first, second in zip(*found, strict=True):
        torch.testing.assert_close(second, first, rtol=0, atol=0)


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x.tolist(),
        lambda x: x.nonzero(),
        lambda x: x.cpu(),
        lambda x: torch.tensor([1.0, 2.0], device=x.device),
        lambda x: torch.arange(3),
        lambda x: torch.zeros(3).to(x),
    ],
)
def test_what_cannot_be_captured_is_refused(step, captured):
    x = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"captured|on the host"):
        captured(partial(step, x))
    captured(lambda: torch.arange(3, device=x.device) + x.new_zeros(3) + torch.zeros_like(x))
