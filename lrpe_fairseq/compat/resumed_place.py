"""The place in the data, and the model, of a training that is resumed."""

import argparse
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple, NoReturn

from fairseq import checkpoint_utils, trainer
from omegaconf import ListConfig

from lrpe_fairseq.compat import batch_order
from lrpe_fairseq.compat.patching import replace_method, replace_once
from lrpe_fairseq.errors import refuse

BATCHES = "batches"
"""Key of ``train_iterator``, in memory only: what the batches of a checkpoint depend on."""
LIMITS = ("batch_size", "max_tokens", "required_batch_size_multiple")
"""Options that decide how many samples a batch has."""
OF_BLOCKS = ("tokens_per_sample", "sample_break_mode")
"""Options of tasks with text that decide what a sample is."""
OF_TASK = (*OF_BLOCKS, "max_positions", "random_batches")
"""Options of tasks that decide what a sample is, or the order of samples."""


class Training(NamedTuple):
    """A training that loads a checkpoint. resumes: whether it goes on with its optimizer."""

    cfg: Any
    resumes: bool


_LOADED_BY = ContextVar[Training | None]("training", default=None)
"""Set while a training loads a checkpoint."""


def resume_where_the_data_were_left() -> None:
    """Resume at the right place in the data with other processes or batch sizes, or refuse to;
    also refuse to resume with another encoding or attention.

    Break: a checkpoint counts the batches of the epoch that one process has read. With another
    number of processes or another size of batches the same number is another place in the data, so
    that a resumed training skips or repeats data, or stops with "dataloader mismatch". The fix
    converts the number where the samples that were read are the first of the new batches, and
    refuses in one sentence otherwise. Batches of another size are shuffled into another order, so
    they can be converted only in an epoch that is not shuffled (``--curriculum``, streams of text).
    Other samples (``OF_TASK``) never can.

    A task whose batches depend on the size of an update sets ``ordered_by_updates``.

    Break: a training with another encoding in the same folder resumes silently from the weights of
    the first, where the shapes allow it, and so does one that starts from them with
    ``--restore-file`` and ``--reset-optimizer``. ``--finetune-from-model`` only warns.
    """
    replace_once(checkpoint_utils, "load_checkpoint_to_cpu", _load_with_batches)
    replace_method(trainer.Trainer, "load_checkpoint", load_for_these_batches)


def _load_with_batches(original: Callable, path: str, *args: Any, **kwargs: Any) -> dict:
    # imported here, because models import this package
    from lrpe_fairseq.models.resumption import warn_about_yarn

    state = original(path, *args, **kwargs)
    if not state.get("cfg"):
        return state
    warn_about_yarn(path, state["cfg"], args[0] if args else kwargs.get("arg_overrides"))
    _check_options(path, state)
    place = (state.get("extra_state") or {}).get("train_iterator")
    if place:
        place[BATCHES] = batches_in(state["cfg"])
    return state


def _check_options(path: str, state: dict) -> None:
    """Check the options of a checkpoint against those of the training that loads it, if any."""
    from lrpe_fairseq.models.normformer import reset_unbuilt
    from lrpe_fairseq.models.pruning import complete_pruned
    from lrpe_fairseq.models.resumption import check_resumed, check_started, check_unfinished

    reset_unbuilt(path, state)
    training = _LOADED_BY.get()
    if training is None:
        complete_pruned(path, state)
    elif training.resumes:
        check_resumed(path, state["cfg"], training.cfg)
        check_unfinished(path, state, training.cfg)
    else:
        check_started(path, state["cfg"], training.cfg)


def batches_in(cfg: Any) -> dict[str, Any]:
    """Return what the batches of a training depend on. cfg: fairseq's configuration."""
    task = cfg["task"]
    if isinstance(task, argparse.Namespace):  # of a task without a dataclass
        task = vars(task)
    task = task or {}
    # only tasks with a break mode cut their text into samples
    names = OF_TASK if "sample_break_mode" in task else OF_TASK[len(OF_BLOCKS) :]
    set_in_task = {name: task[name] for name in names if task.get(name) is not None}
    return {
        **batch_order.origin(cfg),
        **{name: _as_text(value) for name, value in set_in_task.items()},
        "processes": cfg["distributed_training"]["distributed_world_size"],
        "update_freq": list(cfg["optimization"]["update_freq"]),
        **{name: cfg["dataset"][name] for name in LIMITS},
    }


def _as_text(value: Any) -> str:
    """Return a value as text, the same for a tuple, a list and a list of omegaconf."""
    return str(list(value) if isinstance(value, tuple | list | ListConfig) else value)


def load_for_these_batches(
    original: Callable,
    self: Any,
    filename: str,
    reset_optimizer: bool = False,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Load a checkpoint as ``Trainer.load_checkpoint`` does, at the place of these batches.

    Raises: Refusal if the weights do not fit the model, or no number of batches has the samples
        that were read.
    """
    # load_checkpoint_to_cpu, below, has the checkpoint but not the options of this training
    loading = _LOADED_BY.set(Training(self.cfg, resumes=not reset_optimizer))
    try:
        extra_state = original(self, filename, reset_optimizer, *args, **kwargs)
    except Exception as error:
        # fairseq's own error for weights that do not fit, of a plain type
        if "architectures match" in str(error):
            refuse(f"the weights of {filename} do not fit this model: train with its options")
        raise
    finally:
        _LOADED_BY.reset(loading)
    place = (extra_state or {}).get("train_iterator")
    before = place.pop(BATCHES, None) if place else None
    # a training that begins a new pass over the data has no place in it
    first_epoch = (
        self.cfg.checkpoint.reset_dataloader or filename == self.cfg.checkpoint.finetune_from_model
    )
    if not place or first_epoch:
        return extra_state
    if before and place.get("iterations_in_epoch"):
        by_updates = getattr(self.task, "ordered_by_updates", False)
        convert_place(place, before, batches_in(self.cfg), by_updates)
    batch_order.remember(self, place, before or batch_order.origin(self.cfg))
    return extra_state


def convert_place(place: dict, before: dict, now: dict, by_updates: bool) -> None:
    """Convert the number of batches read per process from ``before`` to ``now``, in ``place``.

    before, now: as :func:`batches_in` returns them. by_updates: whether the order of the samples
    depends on the size of an update.
    Raises: Refusal if no number of batches of ``now`` has the same samples.
    """
    size_before, size_now = _comparable_sizes(before, now, shuffled=place.get("shuffle", True))
    step_before = size_before * before["processes"]
    step_now = size_now * now["processes"]
    read = place["iterations_in_epoch"] * step_before  # samples, of all processes
    updates_before = [step_before * batches for batches in before["update_freq"]]
    updates_now = [step_now * batches for batches in now["update_freq"]]
    other_order = by_updates and updates_before != updates_now
    if not read or not step_now or read % step_now or other_order:
        _refuse_batches(before, now, by_updates)
    place["iterations_in_epoch"] = read // step_now


def _comparable_sizes(before: dict, now: dict, *, shuffled: bool) -> tuple[int, int]:
    """Return the samples per batch of both, up to a common factor; (0, 0) if nothing is equal."""
    if _differing(before, now, OF_TASK):
        return 0, 0
    if not _differing(before, now, LIMITS):
        return 1, 1  # equal batches, whatever their size
    if shuffled:  # the order of batches is drawn, so that others have other samples
        return 0, 0
    return _full_batch(before), _full_batch(now)


def _differing(before: dict, now: dict, names: tuple[str, ...]) -> list[str]:
    """Return the names whose values differ, of those that both have."""
    return [name for name in names if name in before and name in now and before[name] != now[name]]


def _full_batch(batches: dict) -> int:
    """Return the samples of a full batch; 0 if full batches differ."""
    size = batches["batch_size"] or 0
    multiple = batches["required_batch_size_multiple"]
    # fairseq cuts a batch to a multiple where it can, so that batches differ in size
    cut = size > multiple and size % multiple
    return 0 if batches["max_tokens"] or cut else size


def _refuse_batches(before: dict, now: dict, by_updates: bool) -> NoReturn:
    options = {name: before[name] for name in _differing(before, now, LIMITS + OF_TASK)}
    if by_updates and before["update_freq"] != now["update_freq"]:
        options["update_freq"] = ",".join(map(str, before["update_freq"]))
    needed = [_as_option(name, value) for name, value in options.items()]
    processes = before["processes"]
    if processes != now["processes"]:
        needed.append(f"{processes} process{'es' if processes > 1 else ''}")
    refuse(
        "the checkpoint was saved within an epoch that other batches cannot continue: resume with "
        f"{' and '.join(needed)}, or add --reset-dataloader to start a new pass over the data"
    )


def _as_option(name: str, value: Any) -> str:
    """Return an option as it is written on the command line, with "no" before one that is unset."""
    flag = f"--{name.replace('_', '-')}"
    if value is None or value == "False":
        return f"no {flag}"
    return flag if value == "True" else f"{flag} {value}"
