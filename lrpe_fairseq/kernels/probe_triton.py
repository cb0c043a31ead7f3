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
    total = torch.zeros(1, device=device)
    count = torch.tensor([2], device=device)
    launch(_sum, (1,), torch.ones(32, device=device), total, count, block=16)
    if total.item() != 32:
        raise RuntimeError(f"a Triton kernel sums 32 ones to {total.item()}")
