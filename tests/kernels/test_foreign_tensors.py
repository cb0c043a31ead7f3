"""Empty tensors, fake tensors, the meta device, torch.func: every encoding in both attentions."""

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from lrpe_fairseq.attention.linear import linear_attention, linear_attention_naive
from lrpe_fairseq.attention.multihead import MultiheadAttention
from tests.end_to_end.cases import each_encoding_once

WIDTH, HEADS = 16, 2
PAIRS = [(name, attention_type) for attention_type, name in each_encoding_once()]


def module_of(name, attention_type, seed=0):
    torch.manual_seed(seed)
    options = {"attention_type": attention_type, "position_encoding": name, "causal": True}
    return MultiheadAttention(WIDTH, HEADS, seed=seed, **options).eval()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", [(2, 2, 0, 4), (0, 2, 5, 4), (0, 2, 0, 4)])
def test_linear_attention_of_nothing_is_nothing(shape, causal):
    q, k, v = (torch.rand(shape, requires_grad=True) for _ in range(3))
    for form in (linear_attention, linear_attention_naive):
        out = form(q, k, v, causal=causal)
        assert out.shape == shape
        grads = torch.autograd.grad(out.sum(), (q, k, v), allow_unused=True)
        assert all(g is None or g.shape == shape for g in grads)


@pytest.mark.parametrize("shape", [(2, 0, WIDTH), (0, 5, WIDTH)])
@pytest.mark.parametrize(("name", "attention_type"), PAIRS)
def test_a_module_takes_an_empty_batch(name, attention_type, shape):
    x = torch.rand(shape, requires_grad=True)
    out, _ = module_of(name, attention_type).attend(x)
    out.sum().backward()
    assert out.shape == shape


@pytest.mark.parametrize(("name", "attention_type"), PAIRS)
def test_fake_tensors_find_the_shape_and_leave_nothing_behind(name, attention_type):
    module, x = module_of(name, attention_type), torch.rand(2, 7, WIDTH)
    wanted, _ = module.attend(x)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        fake = {key: mode.from_tensor(value) for key, value in state.items()}
        options = {"key_padding_mask": None}
        out, _ = functional_call(module, fake, (mode.from_tensor(x).transpose(0, 1),), options)
    assert out.shape == (7, 2, WIDTH)
    torch.testing.assert_close(module.attend(x)[0], wanted)


@pytest.mark.parametrize(("name", "attention_type"), PAIRS)
def test_a_module_built_on_the_meta_device_is_restored_by_its_checkpoint(name, attention_type):
    original, x = module_of(name, attention_type, seed=3), torch.rand(2, 7, WIDTH)
    with torch.device("meta"):
        module = module_of(name, attention_type)
    module = module.to_empty(device="cpu")
    module.load_state_dict(copy.deepcopy(original.state_dict()))
    torch.testing.assert_close(module.attend(x)[0], original.attend(x)[0])
    moved = module_of(name, attention_type, seed=3).to("meta").to_empty(device="cpu")
    moved.load_state_dict(original.state_dict())
    torch.testing.assert_close(moved.attend(x)[0], original.attend(x)[0])


@pytest.mark.parametrize(("name", "attention_type"), PAIRS)
def test_gradients_of_torch_func_are_those_of_autograd(name, attention_type):
    module, x = module_of(name, attention_type), torch.rand(2, 7, WIDTH)

    def loss(x):
        return module.attend(x)[0].square().sum()

    given = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(loss(given), given)
    torch.testing.assert_close(torch.func.grad(loss)(x), wanted, rtol=1e-4, atol=1e-5)
