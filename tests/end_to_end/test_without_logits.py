"""Cross-entropies without the logits: the losses themselves, and fairseq's criterions."""

from types import SimpleNamespace

import pytest
import torch

from lrpe_fairseq.criterions.blocks import losses, losses_naive
from lrpe_fairseq.criterions.without_logits import output_weight
from tests.end_to_end.commands import SMALL, TRAINING, built, last_loss, run_here, small_transformer

pytestmark = pytest.mark.end_to_end

N, D, V = 7, 5, 23


def inputs(dtype=torch.float64, bias=True):
    generator = torch.Generator().manual_seed(0)
    x, weight, b = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((N, D), (V, D), (V,))
    )
    target = torch.randint(V, (N,), generator=generator)
    return x, weight, target, b if bias else None


def with_gradients(function, given, **options):
    """Losses, and the gradients of a sum with a different factor for each of them."""
    x, weight, target, bias = given
    learned = [tensor for tensor in (x, weight, bias) if tensor is not None]
    nll, smooth = function(x, weight, target, bias, **options)
    factors = torch.linspace(0.5, 2, N)
    total = (nll * factors).sum() + (smooth * factors.flip(0)).sum() / V
    return [nll, smooth, *torch.autograd.grad(total, learned)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("block", [1, 3 * N, 8 * N, 10**6])
def test_blocks_of_any_size_equal_the_definition_in_losses_and_gradients(block, bias):
    found = with_gradients(losses, inputs(bias=bias), block=block)
    expected = with_gradients(losses_naive, inputs(bias=bias))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-6, atol=1e-6)


def test_the_gradients_are_those_of_finite_differences():
    x, weight, target, bias = inputs()
    assert torch.autograd.gradcheck(
        lambda x, weight, bias: losses(x, weight, target, bias, block=5 * N), (x, weight, bias)
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_sums_in_float32_as_the_definition_does(dtype):
    found = with_gradients(losses, inputs(dtype), block=4 * N)
    expected = with_gradients(losses_naive, inputs(dtype))
    assert [x.dtype for x in found] == [torch.float32] * 2 + [dtype] * 3
    limit = 4 * torch.finfo(dtype).eps
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=limit, atol=limit)


def test_autocast_casts_as_for_a_linear_layer():
    x, weight, target, bias = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        nll, _ = losses(x, weight, target, bias)
    rounded = (tensor.to(torch.bfloat16) for tensor in (x, weight))
    expected, _ = losses_naive(*rounded, target, bias.to(torch.bfloat16))
    torch.testing.assert_close(nll, expected, rtol=1e-6, atol=1e-6)


def test_large_logits_overflow_neither_the_loss_nor_its_gradients():
    x, weight, target, _ = inputs()
    found = with_gradients(losses, (1e3 * x.detach().requires_grad_(), weight, target, None))
    assert all(tensor.isfinite().all() for tensor in found)


def test_no_token_gives_no_loss_and_zero_gradients():
    x, weight, target, bias = inputs()
    nll, _ = losses(x[:0], weight, target[:0], bias)
    grads = torch.autograd.grad(nll.sum(), [weight, bias])
    assert nll.shape == (0,)
    assert not any(grad.any() for grad in grads)


def test_the_logits_are_never_stored_at_once():
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            sizes.append(out.numel() if isinstance(out, torch.Tensor) else 0)
            return out

    x, weight, target, bias = inputs()
    with Watch():
        nll, smooth = losses(x, weight, target, bias, block=4 * N)
        torch.autograd.backward([nll.sum() + smooth.sum()])
    assert max(sizes) < N * V


# --- fairseq's criterions -----------------------------------------------------------------------


def sample_of(task, translation=False):
    """Two rows of random words, the second one padded on the right."""
    dictionary = task.target_dictionary
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(4, len(dictionary), (2, 9), generator=generator)
    words[1, 6:] = dictionary.pad()
    net_input = {"src_tokens": words, "src_lengths": torch.tensor([9, 6])}
    if translation:
        net_input["prev_output_tokens"] = words.roll(1, 1)
    target = words.roll(-1, 1)
    target[1, 5:] = dictionary.pad()
    tokens = int(target.ne(dictionary.pad()).sum())
    return {"net_input": net_input, "target": target, "ntokens": tokens, "nsentences": 2}


def criterion_of(task, name, **options):
    from fairseq.criterions import CRITERION_DATACLASS_REGISTRY, CRITERION_REGISTRY

    cls, config = CRITERION_REGISTRY[name], CRITERION_DATACLASS_REGISTRY[name]
    values = {"sentence_avg": False, "tpu": False, **options}
    known = {k: v for k, v in values.items() if k in config.__dataclass_fields__}
    return cls.build_criterion(SimpleNamespace(**{**vars(config()), **known}), task)


def step(model, criterion, sample, **options):
    """The loss, the size, the logged values and all gradients of one step."""
    model.zero_grad()
    loss, size, log = criterion(model, sample, **options)
    loss.sum().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    logged = {name: float(torch.as_tensor(value).sum()) for name, value in log.items()}
    return loss.detach(), int(size), logged, grads


def assert_equal_steps(model, task, sample, name, **options):
    ours = step(model, criterion_of(task, f"lrpe_{name}", **options), sample)
    theirs = step(model, criterion_of(task, name, **options), sample)
    assert ours[1] == theirs[1]
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-5)
    assert ours[2] == pytest.approx(theirs[2], rel=1e-5)
    torch.testing.assert_close(ours[3], theirs[3], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        "",
        "--decoder-output-dim 16 --no-share-decoder-input-output-embed",
        "--sentence-avg",
        "--memory-length 0 --document-boundary </s>",
    ],
)
def test_a_language_model_has_the_loss_gradients_and_log_of_fairseq(corpus, options):
    model, task, config = built(corpus.data, TRAINING, SMALL, options)
    average = {"sentence_avg": config.optimization.sentence_avg}
    assert_equal_steps(model.eval(), task, sample_of(task), "cross_entropy", **average)


def test_one_loss_per_token_is_returned_where_fairseq_returns_it(corpus):
    model, task, _ = built(corpus.data, TRAINING, SMALL)
    sample = sample_of(task)
    for name in ("cross_entropy", "label_smoothed_cross_entropy"):
        ours = criterion_of(task, f"lrpe_{name}")(model.eval(), sample, reduce=False)[0]
        theirs = criterion_of(task, name)(model, sample, reduce=False)[0]
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


TRANSLATION = "--task translation -s en -t de --cpu"
MASKED = "--task masked_lm --tokens-per-sample 32 --arch lrpe_roberta_tiny --encoder-layers 1 --cpu"


@pytest.mark.parametrize("tied", ["--share-decoder-input-output-embed", ""])
@pytest.mark.parametrize(("smoothing", "skipped"), [(0.0, 0), (0.1, 0), (0.1, 2)])
def test_translation_has_the_smoothed_loss_of_fairseq(pairs, smoothing, skipped, tied):
    model, task, _ = built(pairs, TRANSLATION, small_transformer(), tied)
    sample = sample_of(task, translation=True)
    options = {"label_smoothing": smoothing, "ignore_prefix_size": skipped}
    assert_equal_steps(model.eval(), task, sample, "label_smoothed_cross_entropy", **options)


@pytest.mark.parametrize("untied", ["", "--untie-weights-roberta"])
@pytest.mark.parametrize("masked", [True, False])
def test_a_masked_language_model_has_the_loss_of_fairseq(corpus, masked, untied):
    model, task, _ = built(corpus.data, MASKED, untied)
    sample = sample_of(task)
    pad = task.source_dictionary.pad()
    chosen = torch.arange(9) % 3 == 0 if masked else torch.zeros(9, dtype=torch.bool)
    sample["target"] = sample["target"].masked_fill(~chosen, pad)
    assert_equal_steps(model.eval(), task, sample, "masked_lm")


def test_other_output_layers_are_left_to_fairseq(corpus):
    model, task, _ = built(corpus.data, TRAINING, SMALL, "--adaptive-softmax-cutoff 8,16")
    assert output_weight(model) is None
    model, task, _ = built(corpus.data, TRAINING, SMALL)
    model.decoder.output_projection.register_forward_hook(lambda module, given, out: 2 * out)
    assert output_weight(model) is None
    assert_equal_steps(model.eval(), task, sample_of(task), "cross_entropy")


def test_a_training_learns_the_same_with_either_criterion(corpus, tmp_path):
    found = []
    for name in ("cross_entropy", "lrpe_cross_entropy"):
        options = f"--criterion {name} --max-update 20 --seed 1 --disable-validation --save-dir"
        run_here("fairseq_cli.train", corpus.data, TRAINING, SMALL, options, tmp_path / name)
        found.append(last_loss(tmp_path / name / "checkpoint_last.pt"))
    assert found[1] == pytest.approx(found[0], rel=1e-4)
