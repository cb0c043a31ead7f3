"""Probe if Triton's interpreter runs here: old releases fail with a newer numpy."""

import functools

import torch
import triton
import triton.language as tl


@triton.jit
def _sum(values, total, count, block: tl.constexpr):
    """Sum ``count`` blocks: a program id, a loop over a loaded number, masks."""
    first = tl.program_id(0)
    at = tl.arange(0, block)
    found = tl.zeros((block,), tl.float32)
    for index in range(tl.load(count)):
        found += tl.load(values + index * block + at, mask=at < block, other=0.0)
    tl.store(total + first, tl.sum(found, 0))


@functools.cache
def why_not() -> str:
    """Why no kernel can be interpreted here; empty if one can, or if a GPU runs it."""
    if torch.cuda.is_available():
        return ""
    total = torch.zeros(1)
    try:
        _sum[(1,)](torch.ones(32), total, torch.tensor([2]), 16)
    except Exception as error:  # numpy's TypeError, wrapped by Triton in its own
        import numpy

        what = f"{type(error).__name__}: {error}".splitlines()[0]
        versions = f"triton {triton.__version__} with numpy {numpy.__version__}"
        return f"Triton's interpreter does not run under {versions} ({what})"
    assert total.item() == 32
    return ""
