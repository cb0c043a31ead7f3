"""Checkpoints load with torch's safe loading, in one process and in several.

Safe loading (``weights_only``) is the default since torch 2.6, the oldest supported torch. It is
never disabled: only the few names that a fairseq checkpoint needs are allowed, only while fairseq
loads one, and none of them can run code.
"""

import io
import logging
from collections.abc import Callable
from datetime import timedelta
from pickle import UnpicklingError
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.distributed import utils as distributed_utils
from omegaconf import OmegaConf

from lrpe_fairseq import safe_loading
from lrpe_fairseq.compat.patching import replace_once

logger = logging.getLogger(__name__)


def allow_checkpoint_globals() -> None:
    """Load a checkpoint of fairseq with what it holds allowed under safe loading, and no more.

    Break: ``checkpoint_utils.load_checkpoint_to_cpu`` does not pass ``weights_only`` to
    ``torch.load``. Since torch 2.6 the default refuses ``argparse.Namespace`` (the options of a
    model, task or optimizer without a dataclass) and numpy's arrays and scalars (the state of the
    bleu, pearson and mcc meters and of the best metric), so resuming and generating fail. The
    checkpoint of a model with a dataclass and a plain loss as its metric contains neither.

    The runner, which imports no fairseq, allows the same (``safe_loading``).
    """
    if not _loading_is_safe():
        logger.warning(
            "torch.load is not in its safe mode, so a checkpoint can run code: use torch >= 2.6 "
            "and unset TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
        )
    replace_once(checkpoint_utils, "load_checkpoint_to_cpu", _load_allowed)


def _load_allowed(original: Callable, *args: Any, **kwargs: Any) -> dict[str, Any]:
    with safe_loading.allowed():
        return original(*args, **kwargs)


def share_checkpoint_between_processes() -> None:
    """Let several processes resume from one checkpoint.

    Break: rank 0 reads the checkpoint and ``distributed.utils.broadcast_object`` sends it with
    ``torch.save`` and ``torch.load``. Safe loading refuses fairseq's ``_TensorPlaceholder`` and
    the omegaconf ``DictConfig`` that ``load_checkpoint_to_cpu`` builds from the options, so every
    other rank fails. The placeholder (one int) is allowed. The options are sent as a plain dict,
    as the file stores them.
    """
    replace_once(distributed_utils, "_broadcast_object_slow", _broadcast_allowed)
    if not _loads(OmegaConf.create({})):
        replace_once(distributed_utils, "broadcast_object", _broadcast_plain_config)


def _broadcast_allowed(original: Callable, *args: Any, **kwargs: Any) -> Any:
    with safe_loading.allowed(distributed_utils._TensorPlaceholder):
        return original(*args, **kwargs)


def _broadcast_plain_config(original: Callable, obj: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(obj, dict) and OmegaConf.is_config(obj.get("cfg")):
        # a copy: the sender goes on with its own object
        obj = {**obj, "cfg": OmegaConf.to_container(obj["cfg"], enum_to_str=True)}
    received = original(obj, *args, **kwargs)
    if isinstance(received, dict) and isinstance(received.get("cfg"), dict):
        # a model without a dataclass has a Namespace, which is an object to omegaconf
        received["cfg"] = OmegaConf.create(received["cfg"], flags={"allow_objects": True})
    return received


def _loading_is_safe() -> bool:
    """True if ``torch.load`` refuses a type that is not allowed and occurs in no state dict."""
    return not _loads(timedelta())


def _loads(sample: object) -> bool:
    """True if ``torch.load``, called as in fairseq, accepts the output of ``torch.save``."""
    buffer = io.BytesIO()
    torch.save(sample, buffer)
    buffer.seek(0)
    try:
        torch.load(buffer)
    except UnpicklingError:
        return False
    return True
