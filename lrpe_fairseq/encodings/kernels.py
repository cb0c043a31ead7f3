"""Whether this package's Triton kernels are used."""

import importlib
import importlib.util
import os
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor


@lru_cache(maxsize=8)
def load(module: str) -> ModuleType | None:
    """The module of kernels of that name where there are a GPU, Triton and the wish, else None.

    The wish is the environment variable LRPE_FAIRSEQ_KERNELS=1: the kernels are proved in Triton's
    interpreter and compile for A100 and H100, but have not been run on a GPU yet.
    """
    wished = os.environ.get("LRPE_FAIRSEQ_KERNELS") == "1"
    if not wished or not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module(module)


def on_device(x: Tensor) -> bool:
    """Whether kernels can take ``x``: on a GPU since Ampere, not float64."""
    return (
        x.is_cuda
        and x.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and torch.cuda.get_device_capability(x.device) >= (8, 0)
    )
