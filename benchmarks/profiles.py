"""Where the time of a training step of ``lrpe_lm`` goes, with our forms and with the plain ones."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

from torch.profiler import ProfilerActivity, profile

from benchmarks import training
from lrpe_fairseq.attention import linear, multihead

STEPS = 3
KINDS = {  # kind of work -> beginnings of the names of torch's operators
    "matrix products": ("mm", "addmm", "bmm", "baddbmm", "addbmm", "dot", "mv"),
    "causal sums": ("_Native", "_CausalSums", "_Fused"),
    "softmax attention": ("_scaled_dot_product", "_flash_attention", "_softmax"),
    "loss": ("_log_softmax", "nll_loss", "log_softmax"),
    "normalisation": ("native_layer_norm", "native_dropout"),
    "optimizer": ("_foreach", "_fused_adam"),
    "copies and fills": ("copy_", "cat", "clone", "fill_", "zero_", "constant_pad", "gather"),
}
REST = "element-wise and other"
CONTESTANTS = (
    ("linear", "none"),
    ("linear", "lrpe-type2"),
    ("softmax", "none"),
    ("softmax", "lrpe-type2"),
)


def measure(device: str, tokens: int) -> list[dict]:
    """Rows of {attention, encoding, form, seconds, and the share of each kind of work}.

    ``form``: "ours", or "plain": the T x T matrix in linear attention, P applied to every token.
    ``seconds`` are those that torch's profiler saw in one step.
    """
    return [
        _row(attention, encoding, form, device, tokens)
        for attention, encoding in CONTESTANTS
        for form in ("plain", "ours")
    ]


def _row(attention: str, encoding: str, form: str, device: str, tokens: int) -> dict:
    with plain() if form == "plain" else nullcontext():
        step = training.step("lm", encoding, attention, device, tokens)
        step()
        activities = [ProfilerActivity.CPU]
        if device != "cpu":
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as watched:
            for _ in range(STEPS):
                step()
    spent = dict.fromkeys([*KINDS, REST], 0.0)
    for event in watched.key_averages():
        own = event.self_cpu_time_total if device == "cpu" else event.self_device_time_total
        spent[kind_of(event.key)] += own
    total = sum(spent.values())
    shares = {kind: value / total for kind, value in spent.items()}
    seconds = total / STEPS / 1e6
    return {"attention": attention, "encoding": encoding, "form": form, "seconds": seconds} | shares


def kind_of(operator: str) -> str:
    """The kind of work of a torch operator such as ``aten::bmm``."""
    name = operator.rpartition("::")[2]
    return next((kind for kind, begins in KINDS.items() if name.startswith(begins)), REST)


@contextmanager
def plain() -> Iterator[None]:
    """Attention as the definitions have it."""
    with (
        mock.patch.object(multihead, "linear_attention", linear.linear_attention_naive),
        mock.patch.object(multihead.MultiheadAttention, "_folds", return_value=False),
    ):
        yield
