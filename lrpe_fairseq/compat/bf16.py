"""``--bf16`` on a CPU or a CUDA device."""

import argparse
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from fairseq.dataclass import utils as dataclass_utils

from lrpe_fairseq.compat.patching import replace_once


def keep_bf16_off_the_tpu() -> None:
    """Let ``--bf16`` and ``--memory-efficient-bf16`` train on a CPU or a CUDA device.

    Break: ``options.parse_args_and_arch`` sets ``tpu`` whenever ``bf16`` is set. Without torch_xla
    the trainer then fails with "NoneType has no attribute xla_device". (fairseq-hydra-train has no
    such rule, so ``common.bf16=true`` works.) The fix resets ``tpu`` in ``override_module_args``,
    where the options become a config: ``parse_args_and_arch`` may already be running when
    ``--user-dir`` imports this module, so patching it would be too late. With torch_xla installed
    nothing changes, and ``--tpu`` on the command line is kept.
    """
    implied = argparse.Namespace(bf16=True, tpu=True)
    overrides, _ = dataclass_utils.override_module_args(implied)
    if "common.tpu=True" in overrides and importlib.util.find_spec("torch_xla") is None:
        replace_once(dataclass_utils, "override_module_args", _override_without_implied_tpu)


def _override_without_implied_tpu(original: Callable, args: argparse.Namespace) -> Any:
    implied = getattr(args, "bf16", False) and getattr(args, "tpu", False)
    if implied and "--tpu" not in sys.argv:
        args.tpu = False
    return original(args)
