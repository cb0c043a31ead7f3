"""A small Triton kernel, to find out whether Triton works on a machine.

It may fail where its package is installed: it needs a C compiler and a writable cache, and old
releases of its interpreter fail with a newer numpy.
"""

import torch
import triton
import triton.language as tl

from lrpe_fairseq.kernels.loader import launch


@triton.jit
def _sum(values, total, count, block: tl.constexpr):
    """Sum ``count`` blocks: a program id, a loop over a loaded number, masks."""
    first = tl.program_id(0)
    at = tl.arange(0, block)
    found = tl.zeros((block,), tl.float32)
    for index in range(tl.load(count)):
        found += tl.load(values + index * block + at, mask=at < block, other=0.0)
    tl.store(total + first, tl.sum(found, 0))


def run(device: str) -> None:
    """Compile and run the kernel on ``device``: "cuda", or "cpu" in Triton's interpreter.

    Raises: what Triton raises; RuntimeError for a wrong result.
    """
    ones, total, count = _arguments(device)
    launch(_sum, (1,), ones, total, count, block=16)
    if total.item() != 32:
        raise RuntimeError(f"a Triton kernel sums 32 ones to {total.item()}")


def runs_compiled(device: str) -> bool:
    """True if what a launch on ``device`` returns can be launched with all arguments."""
    ones, total, count = _arguments(device)
    compiled = _sum[(1,)](ones, torch.zeros_like(total), count, block=16)
    try:
        compiled[(1, 1, 1)](ones, total, count, 16)
    except Exception:  # of another interface: TypeError, AttributeError
        return False
    return total.item() == 32


def _arguments(device: str) -> tuple[torch.Tensor, ...]:
    """Return 32 ones, memory for their sum, and the number of their blocks."""
    count = torch.tensor([2], device=device)
    return torch.ones(32, device=device), torch.zeros(1, device=device), count
