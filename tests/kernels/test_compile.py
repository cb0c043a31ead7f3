"""torch.compile agrees with eager execution, forwards and backwards, at two lengths."""

import warnings

import pytest
import torch

from lrpe_fairseq.attention import projected
from lrpe_fairseq.attention.multihead import MultiheadAttention
from tests.end_to_end.cases import each_encoding_once


def assert_compiled_is_eager(attention_type, name, backend):
    torch.manual_seed(0)
    torch._dynamo.reset()
    options = {"attention_type": attention_type, "position_encoding": name, "causal": True}
    module = MultiheadAttention(32, 2, **options).double().eval()
    compiled = torch.compile(module.attend, backend=backend)
    for length in (70, 33):
        x = torch.randn(2, length, 32, dtype=torch.float64).requires_grad_()
        inputs = [x, *(p for p in module.parameters() if p.requires_grad)]
        results = []
        for attend in (module.attend, compiled):
            out, _ = attend(x)
            weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
            results.append([out, *torch.autograd.grad(out, inputs, weights, allow_unused=True)])
        for found, wanted in zip(*results[::-1], strict=True):
            if wanted is not None:
                torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["none", "lrpe-type1"])
def test_compiled_by_aot_eager(name):
    assert_compiled_is_eager("linear", name, "aot_eager")


def test_a_compiled_model_is_right_and_warns_once_that_attention_is_not_in_its_graph():
    torch._dynamo.reset()
    projected._warn_once.cache_clear()
    options = {"attention_type": "linear", "position_encoding": "lrpe-type2", "causal": True}
    layers = (MultiheadAttention(16, 2, seed=seed, **options) for seed in (0, 1))
    first, second = (layer.double().eval() for layer in layers)

    def model(x):
        return second(first(torch.sin(x), key_padding_mask=None)[0], key_padding_mask=None)[0]

    compiled = torch.compile(model, backend="aot_eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for length in (7, 5, 7):
            x = torch.randn(length, 2, 16, dtype=torch.float64).requires_grad_()
            wanted, found = model(x), compiled(x)
            torch.testing.assert_close(found, wanted)
            grads = (torch.autograd.grad(out.square().sum(), x) for out in (found, wanted))
            torch.testing.assert_close(*grads)
    ours = [str(w.message) for w in caught if "lrpe_fairseq" in str(w.message)]
    assert ours == [
        "torch.compile: attention of lrpe_fairseq stays outside the compiled graph and runs as in "
        "eager execution"
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("attention_type", "name"), each_encoding_once())
def test_compiled_by_inductor(attention_type, name):
    assert_compiled_is_eager(attention_type, name, "inductor")
