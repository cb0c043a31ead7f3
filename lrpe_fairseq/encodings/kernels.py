"""Whether this package's kernels are used: those in Triton on a GPU, that in C++ on a CPU.

The environment variable LRPE_FAIRSEQ_KERNELS decides: 0 none, 1 all; unset, those that have been
run on the hardware they are for, which is the one in C++. Triton's are proved in its interpreter
and compile for A100 and H100, but have not been run on a GPU yet.
"""

import importlib
import importlib.util
import os
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor


def wished(unasked: bool) -> bool:
    """What LRPE_FAIRSEQ_KERNELS says; ``unasked`` where it says nothing."""
    return {"0": False, "1": True}.get(os.environ.get("LRPE_FAIRSEQ_KERNELS", ""), unasked)


@lru_cache(maxsize=8)
def load(module: str) -> ModuleType | None:
    """The module of Triton kernels of that name where there are a GPU, Triton and the wish."""
    able = torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
    return importlib.import_module(module) if able and wished(unasked=False) else None


def on_device(x: Tensor) -> bool:
    """Whether kernels can take ``x``: on a GPU since Ampere, not float64."""
    return (
        x.is_cuda
        and x.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and torch.cuda.get_device_capability(x.device) >= (8, 0)
    )
