"""Fixes for the pinned fairseq (fairseq-fixed 0.12.3.1) under current torch and numpy.

``apply()`` runs every fix in ``FIXES``. The docstring of each fix describes the break. A fix first
tests whether the break exists and changes nothing otherwise, so a repaired fairseq needs no change
here. The package imports this module first, and ``--user-dir`` imports the package before fairseq
parses an option or opens a checkpoint. A command without ``--user-dir`` (or without
``import lrpe_fairseq``) runs without the fixes.

Checkpoints load with torch's safe ``weights_only`` loading (the default since torch 2.6, the
oldest supported torch). It is never disabled: only the few names that a fairseq checkpoint needs
are allowed, and none of them can run code.
"""

import argparse
import atexit
import functools
import importlib.util
import inspect
import io
import logging
import os
import sys
import tarfile
import time
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path, PurePosixPath
from pickle import UnpicklingError
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from fairseq import checkpoint_utils, file_utils, trainer, utils
from fairseq.criterions.sentence_prediction import SentencePredictionCriterion
from fairseq.data import bucket_pad_length_dataset, data_utils
from fairseq.data.audio import raw_audio_dataset
from fairseq.data.iterators import EpochBatchIterator
from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass import utils as dataclass_utils
from fairseq.distributed import utils as distributed_utils
from fairseq.models.ema.ema import EMA
from fairseq.models.transformer import TransformerConfig, TransformerDecoderBase
from fairseq.optim.fp16_optimizer import _FP16OptimizerMixin, _MemoryEfficientFP16OptimizerMixin
from fairseq.tasks import FairseqTask
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.tasks.multilingual_language_modeling import MultilingualLanguageModelingTask
from omegaconf import ListConfig, OmegaConf

from lrpe_fairseq import batch_order, dictionaries, run_state, safe_loading
from lrpe_fairseq.errors import refuse
from lrpe_fairseq.literals import evaluate_literal

logger = logging.getLogger(__name__)

# The fairseq modules that call eval() on the text of an option.
_EVALUATING_MODULES = (
    "fairseq.criterions.ctc",
    "fairseq.data.audio.raw_audio_dataset",
    "fairseq.data.codedataset",
    "fairseq.models.fconv",
    "fairseq.models.fconv_lm",
    "fairseq.models.fconv_self_att",
    "fairseq.models.hubert.hubert",
    "fairseq.models.lightconv_lm",
    "fairseq.models.speech_to_text.s2t_wav_transformer",
    "fairseq.models.transformer_lm",
    "fairseq.models.wav2vec.wav2vec",
    "fairseq.models.wav2vec.wav2vec2",
    "fairseq.optim.adafactor",
    "fairseq.optim.adam",
    "fairseq.optim.adamax",
    "fairseq.optim.cpu_adam",
    "fairseq.optim.fused_lamb",
    "fairseq.utils",
)

_DEPRECATED_IN_HYDRA = (
    r"\s*(hydra\.experimental\..* is no longer experimental|The version_base parameter is not|"
    r"In '.*': Usage of deprecated keyword|'.*' is validated against ConfigStore|"
    r"The strict flag in the compose API)"
)


def restore_numpy_names() -> None:
    """Restore three names that fairseq uses and numpy removed.

    Break: ``np.compat.long`` (``token_block_dataset.py`` for ``--sample-break-mode eos``,
    ``language_pair_dataset.py`` for ``--num-batch-buckets``), ``np.int`` (``data_utils.py``, span
    masks) and ``np.float`` (``dynamic_crf_layer.py``) raise AttributeError. They were aliases of
    builtins, so the builtins replace them. Existing names are not changed. (Span masks without
    overlap stay broken: fairseq calls ``randint`` of numpy's new generator, which has none.)
    """
    if not hasattr(np, "compat"):
        np.compat = SimpleNamespace()
    for owner, name, builtin in ((np.compat, "long", int), (np, "int", int), (np, "float", float)):
        if not hasattr(owner, name):
            setattr(owner, name, builtin)


def allow_checkpoint_globals() -> None:
    """Allow the globals that fairseq's checkpoints hold under safe loading, and no others.

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
    torch.serialization.add_safe_globals(safe_loading.ALLOWED)


def share_checkpoint_between_processes() -> None:
    """Let several processes resume from one checkpoint.

    Break: rank 0 reads the checkpoint and ``distributed.utils.broadcast_object`` sends it with
    ``torch.save`` and ``torch.load``. Safe loading refuses fairseq's ``_TensorPlaceholder`` and
    the omegaconf ``DictConfig`` that ``load_checkpoint_to_cpu`` builds from the options, so every
    other rank fails. The placeholder (one int) is allowed. The options are sent as a plain dict,
    as the file stores them.
    """
    torch.serialization.add_safe_globals([distributed_utils._TensorPlaceholder])
    if not _loads(OmegaConf.create({})):
        replace_once(distributed_utils, "broadcast_object", _broadcast_plain_config)


def evaluate_options_as_literals() -> None:
    """Prevent fairseq from running the text of an option as code.

    Break: fairseq calls ``eval`` on option strings (``utils.eval_str_list`` for
    ``--adaptive-softmax-cutoff``, ``fconv`` for ``--encoder-layers``, ...), and a checkpoint
    contains options. A cutoff of ``__import__('os').system(...)`` runs when the model is built,
    even under safe loading. Each of those modules gets its own ``eval``, which accepts literals and
    arithmetic (``[(512, 3)] * 20``) and refuses everything else. The builtin is not changed, nor
    is the ``eval`` of ``--model-overrides`` in the command-line tools, which the user types.
    """
    for name in _EVALUATING_MODULES:
        module = sys.modules.get(name)
        if module is not None:
            vars(module).setdefault("eval", evaluate_literal)


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


def bucket_by_percentile_method() -> None:
    """Make ``--num-batch-buckets N`` work.

    Break: ``data_utils.get_buckets`` calls ``np.percentile(..., interpolation="lower")``. numpy 2.4
    has only the new name ``method``, so it raises TypeError. Trap: two other modules import the
    function by name, so it is replaced there too.
    """
    try:
        data_utils.get_buckets(np.arange(3), 1)
    except TypeError:
        for module in (data_utils, bucket_pad_length_dataset, raw_audio_dataset):
            module.get_buckets = _get_buckets


def keep_the_last_batch() -> None:
    """Keep every sample when batching, which matters most in evaluation.

    Break: ``data_utils.batch_by_size`` drops the last batch if its size is not a multiple of
    ``--required-batch-size-multiple`` (default 8), although it documents "less than N or a
    multiple of N". A perplexity silently omits up to one batch of text, and five short sentences
    give no batch at all.
    """
    if len(_batches_of(np.arange(2))) == 0:
        replace_once(data_utils, "batch_by_size", _batch_every_sample)


def flatten_nested_options() -> None:
    """Let a model registered with a subclass of ``TransformerConfig`` train from the command line.

    Break: the nested defaults of ``TransformerConfig`` are classes (``encoder: EncDecBaseConfig =
    field(default=EncDecBaseConfig)``), which ``dataclass.utils._override_attr`` writes into hydra's
    overrides as ``model.encoder=<class ...>``: OverrideParseException. With instances it would read
    ``args.embed_dim`` for both encoder and decoder. The fix reads ``model.encoder.embed_dim`` from
    ``args.encoder_embed_dim``, the name that ``--encoder-embed-dim``, the presets and
    ``TransformerConfig.from_namespace`` use.

    Trap: ``TransformerModelBase.add_args`` adds the options of ``TransformerConfig`` itself, with
    their defaults. A model with its own fields or presets overrides it with
    ``gen_parser_from_dataclass(parser, ItsConfig(), delete_default=True, with_prefix="")``. The
    file that defines a config must not postpone its annotations: fairseq needs types, not strings.
    """
    overrides = dataclass_utils._override_attr("model", TransformerConfig, argparse.Namespace())
    if any("<class" in override for override in overrides):
        replace_once(dataclass_utils, "_override_attr", _override_flat_attr)


def load_adaptive_softmax() -> None:
    """Load checkpoints of decoders with an adaptive softmax and shared embeddings.

    Break: ``TransformerDecoderBase.upgrade_state_dict_named`` adds ``output_projection.weight``, a
    copy of the shared embeddings, to every checkpoint without one. A decoder with an adaptive
    softmax has no ``output_projection``, so resuming and evaluating fail with
    ``Unexpected key(s) in state_dict``.
    """
    decoder = SimpleNamespace(share_input_output_embed=True, num_layers=0, output_projection=None)
    state = {"embed_tokens.weight": torch.zeros(1), "version": torch.tensor([3.0])}
    named = {f"decoder.{name}": value for name, value in state.items()}
    TransformerDecoderBase.upgrade_state_dict_named(decoder, named, "decoder")
    if len(named) > len(state):
        _replace_method(TransformerDecoderBase, "upgrade_state_dict_named", _upgrade_decoder)


def copy_buffers_to_the_average() -> None:
    """Train with ``--store-ema`` when a model has integer buffers, such as permutations.

    Break: ``EMA._step_internal`` multiplies every entry of the state dict by the decay, which
    raises RuntimeError for integers. It also adds a rounding error to constant buffers at every
    update. The fix copies buffers instead of averaging them, as ``torch.optim.swa_utils`` does by
    default. ``EMA`` also leaves the ``version`` of a decoder out of the state that it loads, so
    that the averaged model is loaded as a legacy one and loses its final LayerNorm; the fix keeps
    the version.
    """
    model = torch.nn.Module()
    model.register_buffer("permutation", torch.arange(2))
    config = SimpleNamespace(ema_decay=0.5, ema_seed_model=None, ema_fp32=False, ema_update_freq=1)
    try:
        EMA(model, config).step(model)
    except RuntimeError:
        _replace_method(EMA, "__init__", _start_average)
        _replace_method(EMA, "restore", _restore_average)


def refuse_unsafe_archives() -> None:
    """Refuse archives that could write outside the folder that they are extracted to.

    Break: ``from_pretrained`` of an archive calls ``file_utils.load_archive_file``, which extracts
    with ``extractall`` and no filter: a member ``../x`` or a link writes anywhere. It then moves
    the common prefix of all names into place, so an archive whose members begin with ``/home``
    moves that folder. Only regular files and folders with relative names are accepted.
    """
    if file_utils.tarfile is tarfile:
        file_utils.tarfile = SimpleNamespace(open=open_checked_archive)


def measure_training_time_monotonically() -> None:
    """Measure the seconds of a training by a clock that is never set back.

    Break: ``Trainer`` subtracts times of day. After the clock was set back, the training time in
    a checkpoint is negative or too short, and after it was set forward, too long.
    """
    if trainer.time is time:
        trainer.time = SimpleNamespace(time=time.monotonic)


def gather_predictions() -> None:
    """Validate GLUE tasks by F1, Matthews or Pearson correlation under several processes.

    Break: ``SentencePredictionCriterion`` logs the predictions of a batch as a list, but states
    that its logs can be summed over processes, so that the first validation raises TypeError. The
    fix gathers the logs; ``distributed.utils.all_gather_list`` needs a GPU for that, and torch's
    own function, which processes over gloo call instead, does not.
    """
    if SentencePredictionCriterion.logging_outputs_can_be_summed():
        SentencePredictionCriterion.logging_outputs_can_be_summed = staticmethod(lambda: False)
    replace_once(distributed_utils, "all_gather_list", _gather_objects)


def join_the_processes_of_torchrun() -> None:
    """Let ``torchrun fairseq-train`` start one training in several processes, on CPUs too.

    Break: fairseq reads the group that torchrun describes in the environment only where it sees
    several GPUs, and divides by the number of GPUs. Processes on CPUs, or with one GPU each, train
    unrelated models in one folder. The fix joins the group in every case, and chooses gloo and
    ``legacy_ddp`` without GPUs; the update has the tokens of all processes.
    """
    replace_once(distributed_utils, "infer_init_method", _infer_from_torchrun)


def resume_where_the_data_were_left() -> None:
    """Resume at the right place in the data with other processes or batch sizes, or refuse to;
    also refuse to resume with another encoding or attention.

    Break: a checkpoint counts the batches of the epoch that one process has read. With another
    number of processes or another size of batches the same number is another place in the data, so
    that a resumed training skips or repeats data, or stops with "dataloader mismatch". The fix
    converts the number where the samples that were read are the first of the new batches, and
    refuses in one sentence otherwise. Batches of another size are shuffled into another order, so
    they can be converted only in an epoch that is not shuffled (``--curriculum``, streams of text).
    Other samples (``_OF_TASK``) never can.

    A task whose batches depend on the size of an update sets ``ordered_by_updates``.

    Break: a training with another encoding in the same folder resumes silently from the weights of
    the first, where the shapes allow it, and so does one that starts from them with
    ``--restore-file`` and ``--reset-optimizer``. ``--finetune-from-model`` only warns.
    """
    replace_once(checkpoint_utils, "load_checkpoint_to_cpu", _load_with_batches)
    _replace_method(trainer.Trainer, "load_checkpoint", _load_for_these_batches)


def resume_in_the_same_order() -> None:
    """Read the rest of an epoch, and all later ones, in the order of an uninterrupted training.

    Break: a training that resumes in epoch 2 or later without ``--update-epoch-batch-itr True``
    makes other batches than the training that was interrupted, skips as many as that had read of
    its own, and so reads samples twice and leaves others out (``batch_order``).
    """
    _replace_method(EpochBatchIterator, "__init__", batch_order.record_epoch)
    _replace_method(EpochBatchIterator, "state_dict", batch_order.state_of_iterator)
    _replace_method(trainer.Trainer, "get_train_iterator", batch_order.train_iterator)
    _replace_method(FairseqTask, "get_batch_iterator", batch_order.batch_iterator)


def save_the_state_of_every_process() -> None:
    """Let a task collect what its processes know before the first of them saves a checkpoint.

    Break: of several processes fairseq asks the task of the first one only for its part of the
    checkpoint. A task with the method ``before_checkpoint(trainer)`` has it called in all.
    """
    replace_once(checkpoint_utils, "save_checkpoint", _save_of_all_processes)


def save_what_half_precision_rounds() -> None:
    """Let a training with ``--fp16`` or ``--bf16`` that is resumed equal an uninterrupted one.

    Break: a checkpoint has the rounded weights, but neither the float32 weights that the optimizer
    updates nor the counters of the loss scaler. The fix adds both to the state of the optimizer,
    where stock fairseq ignores them. Float32 weights that do not round to those of the model, such
    as after averaging checkpoints, are not used; checkpoints without them load as before.
    """
    for mixin in (_FP16OptimizerMixin, _MemoryEfficientFP16OptimizerMixin):
        _replace_method(mixin, "state_dict", _state_with_masters)
        _replace_method(mixin, "load_state_dict", _load_with_masters)


def leave_the_process_group() -> None:
    """Leave the process group before Python ends, when processes communicate through gloo.

    Break: ``fairseq-train`` never calls ``destroy_process_group``. The threads of gloo then release
    tensors while the interpreter is torn down, and a training that has finished often aborts with
    "terminate called without an active exception" and a non-zero status.
    """
    atexit.register(_destroy_gloo_group)


def silence_deprecations_of_hydra() -> None:
    """Hide hydra's warnings about how fairseq calls it.

    Break: every command of fairseq prints six of them, 18 lines that no user can act on, before
    the sentence that matters. Only warnings with these texts are hidden.
    """
    warnings.filterwarnings("ignore", _DEPRECATED_IN_HYDRA, UserWarning)


def refuse_partial_scores() -> None:
    """Refuse to score only some of the samples; the error counts the tokens left out.

    Break: samples that are longer than the model's maximum are skipped. ``fairseq-eval-lm`` prints
    the perplexity of the rest (1.00 if nothing is left) and ends with status 0. Other commands end
    with a traceback, or print the score of the rest with
    ``--skip-invalid-size-inputs-valid-test``. That stays possible, and the log counts the tokens.
    """
    for task in (LanguageModelingTask, MultilingualLanguageModelingTask):
        _replace_method(task, "eval_lm_dataloader", _load_whole_text)
    _replace_method(FairseqTask, "filter_indices_by_size", _filter_or_refuse)


def refuse_a_missing_path() -> None:
    """Report in one sentence that --path is missing, or that the weights of a checkpoint do not
    fit the model of --model-overrides.

    Break: fairseq-eval-lm, fairseq-validate and fairseq-interactive end with an error about None,
    or with torch's list of weights.
    """
    replace_once(utils, "split_paths", _refuse_none)
    replace_once(checkpoint_utils, "load_model_ensemble_and_task", _load_or_refuse)


def give_every_run_a_state_of_its_own() -> None:
    """Let a training in a sweep leave what it leaves alone, and return its best value.

    Break: ``fairseq-hydra-train -m`` trains one model after another in a process, and fairseq keeps
    the state of a training in module globals. The second model writes no best checkpoint before it
    is better than the first, may stop early because of it, and its curves in TensorBoard and its
    ``common.log_file`` go to the first one's. The value of a training for a sweeper such as Optuna
    is the mean of all its validations, the first ones included. See ``run_state``.

    fairseq's function that hydra calls drops the value, too; ``hydra_plugins`` repairs that.
    """
    replace_once(distributed_utils, "call_main", run_state.run)


def record_dictionaries() -> None:
    """Record in a checkpoint which words its embeddings stand for.

    Break: a checkpoint has the path of its data only. A dictionary that was prepared again in that
    folder, or another of equal size, is read without a word. The record is a key of its own, which
    fairseq ignores; ``scripts/eval_lm.sh`` and the like compare it.
    """
    _replace_method(trainer.Trainer, "__init__", _start_with_dictionaries)
    _replace_method(trainer.Trainer, "state_dict", _state_with_dictionaries)


FIXES: tuple[Callable[[], None], ...] = (
    restore_numpy_names,
    allow_checkpoint_globals,
    share_checkpoint_between_processes,
    evaluate_options_as_literals,
    keep_bf16_off_the_tpu,
    bucket_by_percentile_method,
    keep_the_last_batch,
    flatten_nested_options,
    load_adaptive_softmax,
    copy_buffers_to_the_average,
    refuse_unsafe_archives,
    measure_training_time_monotonically,
    gather_predictions,
    join_the_processes_of_torchrun,
    resume_where_the_data_were_left,
    resume_in_the_same_order,
    save_the_state_of_every_process,
    save_what_half_precision_rounds,
    leave_the_process_group,
    silence_deprecations_of_hydra,
    refuse_partial_scores,
    refuse_a_missing_path,
    give_every_run_a_state_of_its_own,
    record_dictionaries,
)


@functools.cache
def apply() -> None:
    """Apply every fix that is needed. A second call does nothing."""
    for fix in FIXES:
        fix()


def open_checked_archive(name: str, mode: str = "r") -> tarfile.TarFile:
    """Open a tar archive whose members are regular files and folders with relative names.

    Raises: tarfile.ReadError, one sentence, for any other member.
    """
    with tarfile.open(name, mode) as archive:
        for member in archive:
            _check_member(name, member)
    return tarfile.open(name, mode)


def _check_member(archive: str, member: tarfile.TarInfo) -> None:
    path = PurePosixPath(member.name.replace("\\", "/"))
    inside = not path.is_absolute() and ".." not in path.parts
    if not inside or not (member.isfile() or member.isdir()):
        raise tarfile.ReadError(
            f"{archive} is refused: its member {member.name!r} is not a regular file or folder "
            "below the archive's own folder, so extracting it could write elsewhere"
        )


# ---- replacements of fairseq's functions: the first argument is the original ----


def _broadcast_plain_config(original: Callable, obj: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(obj, dict) and OmegaConf.is_config(obj.get("cfg")):
        obj = {**obj, "cfg": OmegaConf.to_container(obj["cfg"], enum_to_str=True)}
    obj = original(obj, *args, **kwargs)
    if isinstance(obj, dict) and isinstance(obj.get("cfg"), dict):
        obj["cfg"] = OmegaConf.create(obj["cfg"], flags={"allow_objects": True})
    return obj


_BATCHES = "batches"
"""Key of ``train_iterator``, in memory only: what the batches of a checkpoint depend on."""
_LIMITS = ("batch_size", "max_tokens", "required_batch_size_multiple")
_OF_TASK = ("tokens_per_sample", "sample_break_mode", "max_positions", "random_batches")
"""Options of tasks that decide what a sample is, or the order of samples."""


class _Training(NamedTuple):
    """A training that loads a checkpoint. resumes: whether it goes on with its optimizer."""

    cfg: Any
    resumes: bool


_LOADED_BY = ContextVar[_Training | None]("training", default=None)
"""Set while a training loads a checkpoint."""


def _load_with_batches(original: Callable, path: str, *args: Any, **kwargs: Any) -> dict:
    from lrpe_fairseq.models.checks import warn_about_yarn

    state = original(path, *args, **kwargs)
    if state.get("cfg"):
        warn_about_yarn(path, state["cfg"], args[0] if args else kwargs.get("arg_overrides"))
        _check_options(path, state)
    place = (state.get("extra_state") or {}).get("train_iterator")
    if place and state.get("cfg"):
        place[_BATCHES] = _batches_in(state["cfg"])
    return state


def _check_options(path: str, state: dict) -> None:
    """Check the options of a checkpoint against those of the training that loads it, if any."""
    from lrpe_fairseq.models.checks import check_resumed, check_started, check_unfinished
    from lrpe_fairseq.models.pruning import complete_pruned

    training = _LOADED_BY.get()
    if training is None:
        complete_pruned(path, state)
    elif training.resumes:
        check_resumed(path, state["cfg"], training.cfg)
        check_unfinished(path, state, training.cfg)
    else:
        check_started(path, state["cfg"], training.cfg)


def _batches_in(cfg: Any) -> dict[str, Any]:
    task = cfg["task"]
    task = vars(task) if isinstance(task, argparse.Namespace) else task or {}
    names = _OF_TASK if "sample_break_mode" in task else _OF_TASK[2:]
    found = {name: task[name] for name in names if task.get(name) is not None}
    several = tuple, list, ListConfig
    return {
        **batch_order.origin(cfg),
        **{n: str(list(x) if isinstance(x, several) else x) for n, x in found.items()},
        "processes": cfg["distributed_training"]["distributed_world_size"],
        "update_freq": list(cfg["optimization"]["update_freq"]),
        **{name: cfg["dataset"][name] for name in _LIMITS},
    }


def _load_for_these_batches(
    original: Callable,
    self: Any,
    filename: str,
    reset_optimizer: bool = False,
    *args: Any,
    **kwargs: Any,
) -> Any:
    loading = _LOADED_BY.set(_Training(self.cfg, resumes=not reset_optimizer))
    try:
        extra_state = original(self, filename, reset_optimizer, *args, **kwargs)
    except Exception as error:
        if "architectures match" in str(error):
            refuse(f"the weights of {filename} do not fit this model: train with its options")
        raise
    finally:
        _LOADED_BY.reset(loading)
    place = (extra_state or {}).get("train_iterator")
    before = place.pop(_BATCHES, None) if place else None
    cfg = self.cfg.checkpoint
    first_epoch = cfg.reset_dataloader or filename == cfg.finetune_from_model
    if before and place.get("iterations_in_epoch") and not first_epoch:
        by_updates = getattr(self.task, "ordered_by_updates", False)
        _convert_place(place, before, _batches_in(self.cfg), by_updates)
    if place and not first_epoch:
        batch_order.remember(self, place, before or batch_order.origin(self.cfg))
    return extra_state


def _convert_place(place: dict, before: dict, now: dict, by_updates: bool) -> None:
    """Convert the number of batches read per process from ``before`` to ``now``, in ``place``.

    Raises: Refusal if no number of batches of ``now`` has the same samples.
    """
    sizes = 1, 1
    if _differing(before, now, _OF_TASK):
        sizes = 0, 0
    elif _differing(before, now, _LIMITS):
        sizes = (0, 0) if place.get("shuffle", True) else (_full_batch(before), _full_batch(now))
    old, new = (n * each["processes"] for n, each in zip(sizes, (before, now), strict=True))
    updates = [[n * f for f in each["update_freq"]] for n, each in ((old, before), (new, now))]
    read = place["iterations_in_epoch"] * old
    if not read or not new or read % new or (by_updates and updates[0] != updates[1]):
        _refuse_batches(before, now, by_updates)
    place["iterations_in_epoch"] = read // new


def _differing(before: dict, now: dict, names: tuple[str, ...]) -> list[str]:
    """Return the names whose values differ, of those that both have."""
    return [n for n in names if n in before and n in now and before[n] != now[n]]


def _full_batch(batches: dict) -> int:
    """Return the samples of a full batch; 0 if full batches differ."""
    size, multiple = batches["batch_size"] or 0, batches["required_batch_size_multiple"]
    return 0 if batches["max_tokens"] or (size > multiple and size % multiple) else size


def _refuse_batches(before: dict, now: dict, by_updates: bool) -> NoReturn:
    options = {name: before[name] for name in _differing(before, now, _LIMITS + _OF_TASK)}
    if by_updates and before["update_freq"] != now["update_freq"]:
        options["update_freq"] = ",".join(map(str, before["update_freq"]))
    given = {f"--{name.replace('_', '-')}": value for name, value in options.items()}
    without = {None: "no {}", "False": "no {}", "True": "{}"}
    said = [without.get(value, "{} {}").format(name, value) for name, value in given.items()]
    if before["processes"] != now["processes"]:
        said.append(f"{before['processes']} process{'es' * (before['processes'] > 1)}")
    refuse(
        "the checkpoint was saved within an epoch that other batches cannot continue: resume with "
        f"{' and '.join(said)}, or add --reset-dataloader to start a new pass over the data"
    )


def _refuse_none(original: Callable, *args: Any, **kwargs: Any) -> Any:
    if args[:1] in ((None,), ([None],)):
        refuse("pass --path with the checkpoint to read")
    return original(*args, **kwargs)


def _load_or_refuse(original: Callable, *args: Any, **kwargs: Any) -> Any:
    try:
        return _refuse_none(original, *args, **kwargs)
    except RuntimeError as error:
        overrides = args[1] if len(args) > 1 else kwargs.get("arg_overrides")
        if overrides and "loading state_dict" in str(error):
            paths = ", ".join(map(str, args[0] if args else kwargs["filenames"]))
            refuse(f"the weights of {paths} do not fit this model: override fewer options")
        raise


def _save_of_all_processes(original: Callable, cfg: Any, trainer: Any, *args: Any) -> Any:
    collect = getattr(trainer.task, "before_checkpoint", None)
    if collect is not None and not cfg.no_save:
        collect(trainer)
    return original(cfg, trainer, *args)


def _state_with_masters(original: Callable, self: Any) -> dict:
    state = original(self)
    state["fp32_params"] = [master.detach() for master in _masters(self)]
    if self.scaler is not None:
        counters = {name: n for name, n in vars(self.scaler).items() if name.startswith("_")}
        state["loss_scaler"] = counters
    return state


def _load_with_masters(
    original: Callable, self: Any, state_dict: dict, optimizer_overrides: dict | None = None
) -> None:
    original(self, state_dict, optimizer_overrides)
    if self.scaler is not None:
        vars(self.scaler).update(state_dict.get("loss_scaler", {}))
    built, stored = _masters(self), state_dict.get("fp32_params", [])
    if built and [x.shape for x in built] == [x.shape for x in stored]:
        rounded = [weight.detach().clone() for weight in self.fp16_params]
        built = [master.detach().clone() for master in built]
        _set_masters(self, stored)
        if not all(map(torch.equal, self.fp16_params, rounded)):
            _set_masters(self, built)


def _masters(optimizer: Any) -> list[torch.Tensor]:
    """Return the float32 weights of an optimizer: one for each parameter, or joined."""
    found = getattr(optimizer, "fp32_params", [])
    return list(found.values() if isinstance(found, dict) else found)


def _set_masters(optimizer: Any, values: list[torch.Tensor]) -> None:
    for master, value in zip(_masters(optimizer), values, strict=True):
        master.data.copy_(value)
    optimizer._sync_fp32_params_to_fp16()


OF_TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK")


def _infer_from_torchrun(original: Callable, cfg: Any, *args: Any, **kwargs: Any) -> None:
    joined = all(name in os.environ for name in OF_TORCHRUN)
    alone = not joined or int(os.environ["WORLD_SIZE"]) == 1
    if alone or cfg.tpu or cfg.distributed_init_method is not None:
        original(cfg, *args, **kwargs)
        return
    cfg.distributed_init_method = "env://"
    cfg.distributed_world_size = int(os.environ["WORLD_SIZE"])
    cfg.distributed_rank = int(os.environ["RANK"])
    cfg.distributed_no_spawn = True
    cfg.device_id = int(os.environ["LOCAL_RANK"]) if torch.cuda.is_available() else 0
    if not torch.cuda.is_available():
        cfg.distributed_backend, cfg.ddp_backend = "gloo", "legacy_ddp"


def _gather_objects(
    original: Callable, data: Any, group: Any = None, max_size: int = 16384
) -> list:
    if torch.distributed.get_backend() != "gloo":
        return original(data, group, max_size)
    group = distributed_utils.get_global_group() if group is None else group
    found = [None] * distributed_utils.get_world_size(group=group)
    torch.distributed.all_gather_object(found, data, group=group)
    return found


def _override_without_implied_tpu(original: Callable, args: argparse.Namespace) -> Any:
    if getattr(args, "bf16", False) and getattr(args, "tpu", False) and "--tpu" not in sys.argv:
        args.tpu = False
    return original(args)


def _batches_of(indices: np.ndarray) -> list:
    return data_utils.batch_by_size(
        indices, None, num_tokens_vec=indices, max_sentences=8, required_batch_size_multiple=8
    )


def _batch_every_sample(original: Callable, indices: Any, *rest: Any, **keywords: Any) -> list:
    """``original``'s batches, and one more batch of the samples at the end that it dropped."""
    if not isinstance(indices, np.ndarray):
        indices = np.fromiter(indices, dtype=np.int64, count=-1)
    batches = list(original(indices, *rest, **keywords))
    dropped = indices[sum(map(len, batches)) :]
    return [*batches, dropped] if len(dropped) else batches


def _load_whole_text(
    original: Callable, self: Any, dataset: Any, *rest: Any, **keywords: Any
) -> Any:
    limit = keywords.get("max_positions")
    indices = np.arange(len(dataset))
    ignored = dataset.filter_indices_by_size(indices, limit)[1] if limit is not None else ()
    if len(ignored):
        refuse(
            f"{_too_long(dataset, indices, ignored, limit)} would be left out: set "
            f"--tokens-per-sample to at most {limit}, or score longer texts with scripts/eval_lm.sh"
        )
    return original(self, dataset, *rest, **keywords)


def _filter_or_refuse(
    original: Callable,
    self: Any,
    indices: Any,
    dataset: Any,
    max_positions: Any = None,
    ignore_invalid_inputs: bool = False,
) -> Any:
    _, ignored = dataset.filter_indices_by_size(indices, max_positions)
    if len(ignored):
        said = _too_long(dataset, indices, ignored, max_positions)
        if not ignore_invalid_inputs:
            hint = ""
            if isinstance(self, LanguageModelingTask):
                hint = (
                    " (--tokens-per-sample N --max-target-positions N reads N tokens, "
                    "--sample-break-mode eos lines)"
                )
            elif hasattr(getattr(self, "cfg", None), "truncate_source"):
                hint = " (--truncate-source cuts sources)"
            refuse(
                f"{said} would be left out: shorten the samples{hint}"
                ", or pass --skip-invalid-size-inputs-valid-test to read the rest only"
            )
        logger.warning("%s are left out", said)
    return original(self, indices, dataset, max_positions, ignore_invalid_inputs)


def _too_long(dataset: Any, indices: Any, ignored: Any, limit: Any) -> str:
    tokens = sum(int(dataset.num_tokens(index)) for index in ignored)
    samples = f"{len(ignored):,} of {len(indices):,} samples"
    return f"{tokens:,} tokens in {samples}, which are longer than the maximum of {limit},"


def _get_buckets(sizes: np.ndarray, num_buckets: int) -> np.ndarray:
    quantiles = np.linspace(0, 100, num_buckets + 1)
    return np.unique(np.percentile(sizes, quantiles, method="lower")[1:])


def _override_flat_attr(
    original: Callable, sub_node: str, data_class: type, args: argparse.Namespace
) -> list[str]:
    nested = _nested_configs(data_class)
    if not nested:
        return original(sub_node, data_class, args)
    plain = {k: f for k, f in data_class.__dataclass_fields__.items() if k not in nested}
    # the original reads only the field table of the class
    fields_only = type(data_class.__name__, (FairseqDataclass,), {"__dataclass_fields__": plain})
    overrides = original(sub_node, fields_only, args)
    for name, config in nested.items():
        overrides += original(f"{sub_node}.{name}", config, _without_prefix(args, f"{name}_"))
    return overrides


def _nested_configs(data_class: Any) -> dict[str, type]:
    if not (inspect.isclass(data_class) and issubclass(data_class, TransformerConfig)):
        return {}
    types = {name: f.type for name, f in data_class.__dataclass_fields__.items()}
    return {
        k: t for k, t in types.items() if inspect.isclass(t) and issubclass(t, FairseqDataclass)
    }


def _without_prefix(args: argparse.Namespace, prefix: str) -> argparse.Namespace:
    found = {k: v for k, v in vars(args).items() if k.startswith(prefix)}
    return argparse.Namespace(**{k.removeprefix(prefix): v for k, v in found.items()})


def _upgrade_decoder(original: Callable, self: Any, state_dict: dict, name: str) -> dict:
    key = f"{name}.output_projection.weight"
    known = key in state_dict
    state_dict = original(self, state_dict, name)
    if not known and self.output_projection is None:
        state_dict.pop(key, None)
    return state_dict


def _start_average(
    original: Callable,
    self: Any,
    model: torch.nn.Module,
    config: Any,
    device: Any = None,
    skip_keys: Any = None,
) -> None:
    buffers = {name for name, _ in model.named_buffers()}
    original(self, model, config, device, buffers | set(skip_keys or ()))


def _restore_average(
    original: Callable, self: Any, state_dict: dict, *rest: Any, **named: Any
) -> None:
    """Load ``state_dict`` with the versions of the averaged model, which EMA leaves out."""
    own = self.model.state_dict()
    versions = {name: own[name] for name in own if "version" in name}
    original(self, versions | dict(state_dict), *rest, **named)


def _start_with_dictionaries(original: Callable, self: Any, *rest: Any, **named: Any) -> None:
    original(self, *rest, **named)
    data = getattr(self.cfg.task, "data", None)
    self.dictionaries = dictionaries.checksums(Path(data.split(":")[0])) if data else {}


def _state_with_dictionaries(original: Callable, self: Any) -> dict:
    return {**original(self), dictionaries.KEY: self.dictionaries}


# ---- how the fixes test and patch ----


def _destroy_gloo_group() -> None:
    """Destroy the process group of this process, if it has one that uses gloo."""
    distributed = torch.distributed
    grouped = distributed.is_available() and distributed.is_initialized()
    if grouped and distributed.get_backend() == "gloo":
        distributed.destroy_process_group()


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


def _loading_is_safe() -> bool:
    return not _loads(timedelta())  # a type that is not allowed and occurs in no state dict


def replace_once(module: ModuleType, name: str, replacement: Callable) -> None:
    """Set ``module.name`` to ``replacement`` with the original as its first argument, once."""
    original = getattr(module, name)
    if getattr(original, "func", None) is not replacement:
        setattr(module, name, functools.partial(replacement, original))


def _replace_method(cls: type, name: str, replacement: Callable) -> None:
    """As :func:`replace_once`, for a method: ``replacement`` gets the original and ``self``."""
    original = getattr(cls, name)
    if getattr(original, "replacement", None) is replacement:
        return

    @functools.wraps(original)
    def method(*arguments: Any, **keywords: Any) -> Any:
        return replacement(original, *arguments, **keywords)

    method.replacement = replacement
    setattr(cls, name, method)
