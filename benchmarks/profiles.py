"""Time of a training step of ``lrpe_lm`` by kind of work, for our forms and the plain ones."""

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks import training
from lrpe_fairseq.attention import linear, multihead

ROUNDS = 5
KINDS = {  # kind of work -> prefixes of torch operator names
    "matrix products": ("mm", "addmm", "bmm", "baddbmm", "addbmm", "dot", "mv"),
    "causal sums": ("_Native", "_CausalSums", "_Sums", "_Fused"),
    "softmax attention": ("_scaled_dot_product", "_flash_attention", "_softmax"),
    "loss": ("_log_softmax", "nll_loss", "log_softmax"),
    "normalization": ("native_layer_norm", "native_dropout"),
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


def measure(device: str, tokens: int, dtype: torch.dtype = torch.float32) -> list[dict]:
    """Return rows of {attention, encoding, form, seconds, and the share of each kind of work}.

    ``form``: "ours", or "plain": the T x T matrix in linear attention, P applied to every token.
    ``seconds``: profiled time of a step, median over rounds that run every contestant in turn;
    shares are over all rounds.
    """
    named = [(*pair, form) for pair in CONTESTANTS for form in FORMS]
    steps = {key: training.step("lm", key[1], key[0], device, tokens, dtype) for key in named}
    seen = {key: [] for key in named}
    for _ in range(1 + ROUNDS):
        for key, step in steps.items():
            with FORMS[key[2]]():
                seen[key].append(_profiled(step, device))
    return [_row(*key, seen[key][1:]) for key in named]


def _profiled(step: Callable[[], None], device: str) -> dict[str, float]:
    """Return the seconds of each kind of work in one step."""
    on_gpu = [] if device == "cpu" else [ProfilerActivity.CUDA]
    with profile(activities=[ProfilerActivity.CPU, *on_gpu]) as watched:
        step()
    spent = dict.fromkeys([*KINDS, REST], 0.0)
    for event in operators(watched):
        own = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        spent[kind_of(event.key)] += own / 1e6
    return spent


def operators(watched: profile) -> list:
    """Return the profiled operators; on a GPU each has the time of the kernels it launched."""
    return [e for e in watched.key_averages() if e.device_type == DeviceType.CPU]


def _row(attention: str, encoding: str, form: str, steps: list[dict[str, float]]) -> dict:
    seconds = statistics.median(sum(step.values()) for step in steps)
    total = sum(sum(step.values()) for step in steps)
    shares = {kind: sum(step[kind] for step in steps) / total for kind in steps[0]}
    return {"attention": attention, "encoding": encoding, "form": form, "seconds": seconds} | shares


def kind_of(operator: str) -> str:
    """Return the kind of work of a torch operator such as ``aten::bmm``."""
    name = operator.rpartition("::")[2]
    return next((kind for kind, begins in KINDS.items() if name.startswith(begins)), REST)


@contextmanager
def plain() -> Iterator[None]:
    """Context in which attention uses its definitions."""
    with (
        mock.patch.object(multihead, "linear_attention", linear.linear_attention_naive),
        mock.patch.object(multihead.MultiheadAttention, "_folds", return_value=False),
    ):
        yield


FORMS = {"plain": plain, "ours": nullcontext}
