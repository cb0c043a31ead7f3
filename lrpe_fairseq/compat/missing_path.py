"""Commands that read a checkpoint: no path, or weights that do not fit."""

from collections.abc import Callable
from typing import Any

from fairseq import checkpoint_utils, utils

from lrpe_fairseq.compat.patching import replace_once
from lrpe_fairseq.errors import refuse


def refuse_a_missing_path() -> None:
    """Report in one sentence that --path is missing, or that the weights of a checkpoint do not
    fit the model of --model-overrides.

    Break: fairseq-eval-lm, fairseq-validate and fairseq-interactive end with an error about None,
    or with torch's list of weights.
    """
    replace_once(utils, "split_paths", _refuse_none)
    replace_once(checkpoint_utils, "load_model_ensemble_and_task", _load_or_refuse)


def _refuse_none(original: Callable, *args: Any, **kwargs: Any) -> Any:
    # commands pass the path itself or a list of paths
    if args[:1] in ((None,), ([None],)):
        refuse("pass --path with the checkpoint to read")
    return original(*args, **kwargs)


def _load_or_refuse(original: Callable, *args: Any, **kwargs: Any) -> Any:
    try:
        return _refuse_none(original, *args, **kwargs)
    except RuntimeError as error:
        overrides = args[1] if len(args) > 1 else kwargs.get("arg_overrides")
        # without overrides the model is that of the checkpoint, and the error is a defect
        if overrides and "loading state_dict" in str(error):
            paths = ", ".join(map(str, args[0] if args else kwargs["filenames"]))
            refuse(f"the weights of {paths} do not fit this model: override fewer options")
        raise
