"""Probe if Triton's interpreter runs here: old releases fail with a newer numpy."""

import functools

import torch
import triton

from lrpe_fairseq.kernels import probe_triton


@functools.cache
def why_not() -> str:
    """Why no kernel can be interpreted here; empty if one can, or if a GPU runs it."""
    if torch.cuda.is_available():
        return ""
    try:
        probe_triton.run("cpu")
    except Exception as error:  # numpy's TypeError, wrapped by Triton in its own
        import numpy

        what = f"{type(error).__name__}: {error}".splitlines()[0]
        versions = f"triton {triton.__version__} with numpy {numpy.__version__}"
        return f"Triton's interpreter does not run under {versions} ({what})"
    return ""


def launched(name):
    """True if a function of a module is launched by itself, not called by a kernel."""
    return name.endswith("_kernel") or name.startswith("_encode")
