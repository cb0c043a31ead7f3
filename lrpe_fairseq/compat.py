"""What the pinned fairseq (fairseq-fixed 0.12.3.1) needs under today's torch and numpy.

``apply()`` runs every fix in ``FIXES``. Each fix names the break it mends, looks whether the break
is there, and leaves fairseq, numpy and torch alone where it is not, so that a repaired fairseq
needs no change here. The package imports this module first, and ``--user-dir`` imports the package
before fairseq has parsed an option or opened a checkpoint; a command without ``--user-dir`` (or
without ``import lrpe_fairseq``) runs unmended.

Checkpoints load under torch's safe ``weights_only`` loading (the default since torch 2.6, the
oldest torch supported). It is never switched off: the few names that a fairseq checkpoint needs are
allowed, and none of them can run code.
"""

import argparse
import ast
import functools
import importlib.util
import inspect
import io
import logging
import sys
from collections.abc import Callable
from datetime import timedelta
from pickle import UnpicklingError
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from fairseq.data import bucket_pad_length_dataset, data_utils
from fairseq.data.audio import raw_audio_dataset
from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass import utils as dataclass_utils
from fairseq.distributed import utils as distributed_utils
from fairseq.models.transformer import TransformerConfig
from omegaconf import OmegaConf

logger = logging.getLogger(__name__)

# Kinds of dtype a checkpoint may name: bool, signed, unsigned, float, complex.
_NUMERIC_KINDS = "biufc"

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

# What the text of an option may consist of: literals, containers, arithmetic. No name, no call, no
# attribute, no subscript, hence nothing that could reach a function. (No power either: 9**9**9.)
_LITERAL_NODES = (
    ast.Expression,
    ast.Constant,
    ast.Tuple,
    ast.List,
    ast.Set,
    ast.Dict,
    ast.Load,
    ast.UnaryOp,
    ast.UAdd,
    ast.USub,
    ast.BinOp,
    ast.Add,
    ast.Sub,
    ast.Mult,
    ast.Div,
)


def restore_numpy_names() -> None:
    """Give numpy back the three removed names that fairseq uses.

    Break: ``np.compat.long`` (``token_block_dataset.py`` for ``--sample-break-mode eos``,
    ``language_pair_dataset.py`` for ``--num-batch-buckets``), ``np.int`` (``data_utils.py``, span
    masks) and ``np.float`` (``dynamic_crf_layer.py``) raise AttributeError. They were other names
    of the builtins, so the builtins restore them. A name that numpy has is left alone. (Span masks
    without overlap stay broken: fairseq asks numpy's new generator for ``randint`` there.)
    """
    if not hasattr(np, "compat"):
        np.compat = SimpleNamespace()
    for owner, name, builtin in ((np.compat, "long", int), (np, "int", int), (np, "float", float)):
        if not hasattr(owner, name):
            setattr(owner, name, builtin)


def allow_checkpoint_globals() -> None:
    """Allow under safe loading the globals that fairseq's checkpoints hold, and no more.

    Break: ``checkpoint_utils.load_checkpoint_to_cpu`` says nothing of ``weights_only`` to
    ``torch.load``; since torch 2.6 that refuses ``argparse.Namespace`` (the options of a model,
    task or optimizer without a dataclass) and numpy's arrays and scalars (the state of the bleu,
    pearson and mcc meters, best metric included), so that resuming and generating fail. A model
    with a dataclass and a plain loss as its metric holds neither.

    Trap: numpy's own globals are not safe to allow. The state of a dtype comes from the file, and
    one that hides its object flag makes numpy read the file's bytes as addresses of Python objects
    (a crash at least, code at worst). Stand-ins that only build numbers are registered under
    numpy's names instead, the new ones and those that numpy 1 wrote. torch before 2.6 has neither
    safe loading by default nor stand-ins.
    """
    if not _loading_is_safe():
        logger.warning(
            "torch.load is not in its safe mode, so a checkpoint can run code: use torch >= 2.6 "
            "and unset TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
        )
    torch.serialization.add_safe_globals([argparse.Namespace, *_numpy_stand_ins()])


def share_checkpoint_between_processes() -> None:
    """Let several processes resume from one checkpoint.

    Break: rank 0 reads the checkpoint and ``distributed.utils.broadcast_object`` sends it on by
    ``torch.save`` and ``torch.load``; safe loading refuses fairseq's own ``_TensorPlaceholder`` and
    the omegaconf ``DictConfig`` that ``load_checkpoint_to_cpu`` has made of the options, so every
    other rank dies. The placeholder (one int) is allowed; the options travel as the plain dict that
    they are in the file.
    """
    torch.serialization.add_safe_globals([distributed_utils._TensorPlaceholder])
    if not _loads(OmegaConf.create({})):
        _replace(distributed_utils, "broadcast_object", _broadcast_plain_config)


def evaluate_options_as_literals() -> None:
    """Keep fairseq from running the text of an option as a program.

    Break: fairseq calls ``eval`` on option strings (``utils.eval_str_list`` for
    ``--adaptive-softmax-cutoff``, ``fconv`` for ``--encoder-layers``, ...), and a loaded checkpoint
    brings its own options: one whose cutoff is ``__import__('os').system(...)`` runs it when the
    model is built, safe loading or not. Each of those modules gets an ``eval`` of its own, which
    takes literals and arithmetic (``[(512, 3)] * 20``) and refuses the rest. The builtin, and the
    command-line tools' own ``eval`` of ``--model-overrides``, stay as they are.
    """
    for name in _EVALUATING_MODULES:
        module = sys.modules.get(name)
        if module is not None:
            vars(module).setdefault("eval", evaluate_literal)


def keep_bf16_off_the_tpu() -> None:
    """Let ``--bf16`` and ``--memory-efficient-bf16`` train on a CPU or a CUDA device.

    Break: ``options.parse_args_and_arch`` sets ``tpu`` whenever ``bf16`` is set, and without
    torch_xla the trainer dies on "NoneType has no attribute xla_device". (Through hydra there is no
    such rule, and ``common.bf16=true`` trains.) The rule is undone where the options become a
    config, ``override_module_args``: ``parse_args_and_arch`` may be running already when
    ``--user-dir`` imports this module, and a patch of it would come too late. With torch_xla the
    rule stands, and a ``--tpu`` given on the command line is obeyed.
    """
    implied = argparse.Namespace(bf16=True, tpu=True)
    overrides, _ = dataclass_utils.override_module_args(implied)
    if "common.tpu=True" in overrides and importlib.util.find_spec("torch_xla") is None:
        _replace(dataclass_utils, "override_module_args", _override_without_implied_tpu)


def bucket_by_percentile_method() -> None:
    """Make ``--num-batch-buckets N`` work.

    Break: ``data_utils.get_buckets`` calls ``np.percentile(..., interpolation="lower")``; numpy 2.4
    has only the newer name ``method``, so it raises TypeError. Trap: two modules hold the function
    under a name of their own, so it is replaced there too.
    """
    try:
        data_utils.get_buckets(np.arange(3), 1)
    except TypeError:
        for module in (data_utils, bucket_pad_length_dataset, raw_audio_dataset):
            module.get_buckets = _get_buckets


def keep_the_last_batch() -> None:
    """Batch every sample, in evaluation above all.

    Break: ``data_utils.batch_by_size`` throws the last batch away when its size is no multiple of
    ``--required-batch-size-multiple`` (8 by default), although it promises "less than N or a
    multiple of N": a perplexity silently misses up to a batch of text, and five short sentences
    give no batch at all.
    """
    if len(_batches_of(np.arange(2))) == 0:
        _replace(data_utils, "batch_by_size", _batch_every_sample)


def flatten_nested_options() -> None:
    """Let a model registered with a subclass of ``TransformerConfig`` train from the command line.

    Break: the nested defaults of ``TransformerConfig`` are classes (``encoder: EncDecBaseConfig =
    field(default=EncDecBaseConfig)``), which ``dataclass.utils._override_attr`` writes into hydra's
    overrides as ``model.encoder=<class ...>``: OverrideParseException. With instances it would read
    ``args.embed_dim`` for encoder and decoder alike. Here ``model.encoder.embed_dim`` is read from
    ``args.encoder_embed_dim``, the name that ``--encoder-embed-dim``, the presets and
    ``TransformerConfig.from_namespace`` use.

    Trap: ``TransformerModelBase.add_args`` offers the options of ``TransformerConfig`` itself, with
    their defaults. A model with fields or presets of its own overrides it with
    ``gen_parser_from_dataclass(parser, ItsConfig(), delete_default=True, with_prefix="")``. And the
    file of a config may not postpone its annotations: fairseq reads types, not text.
    """
    overrides = dataclass_utils._override_attr("model", TransformerConfig, argparse.Namespace())
    if any("<class" in override for override in overrides):
        _replace(dataclass_utils, "_override_attr", _override_flat_attr)


FIXES: tuple[Callable[[], None], ...] = (
    restore_numpy_names,
    allow_checkpoint_globals,
    share_checkpoint_between_processes,
    evaluate_options_as_literals,
    keep_bf16_off_the_tpu,
    bucket_by_percentile_method,
    keep_the_last_batch,
    flatten_nested_options,
)


@functools.cache
def apply() -> None:
    """Apply every fix that is needed; a second call does nothing."""
    for fix in FIXES:
        fix()


def evaluate_literal(text: str) -> Any:
    """Return the value of ``text``: literals, their containers, and + - * / between them.

    Raises ValueError for any other expression, a name or a call above all; SyntaxError for what is
    not an expression; TypeError for what is not text (``utils.eval_bool`` counts on that one).
    """
    if not isinstance(text, str):
        raise TypeError(f"expected text, got {type(text).__name__}")
    tree = ast.parse(text.strip(), mode="eval")
    for node in ast.walk(tree):
        if not isinstance(node, _LITERAL_NODES):
            raise ValueError(f"not a literal, so not evaluated: {text!r}")
    return eval(compile(tree, "<option>", "eval"), {"__builtins__": {}})


# ---- stand-ins for numpy's globals in a checkpoint ----


class _NumericDtype:
    """Stands for ``numpy.dtype`` while a checkpoint loads: the code of a number type, no more."""

    def __init__(self, code: str, align: bool = False, copy: bool = False) -> None:
        self.str = _numeric(code).str

    def __setstate__(self, state: tuple) -> None:
        self.str = _numeric(state[1] + self.str[1:]).str  # state[1]: byte order


class _NumericArray(np.ndarray):
    """Stands for ``numpy.ndarray`` while a checkpoint loads, and saves as a plain array again."""

    def __new__(cls) -> "_NumericArray":
        return super().__new__(cls, (0,))

    def __setstate__(self, state: tuple) -> None:
        _, shape, dtype, fortran, data = state
        if self.size:  # a tensor made from this array may share the memory that would be freed
            raise UnpicklingError("an array in a checkpoint is filled twice")
        super().__setstate__((1, shape, _numeric(dtype.str), fortran, data))

    def __reduce_ex__(self, protocol: int) -> tuple:
        return self.view(np.ndarray).__reduce_ex__(protocol)


def _numeric(code: str) -> np.dtype:
    """Return the dtype, made anew from its code: nothing else that the file says of it counts."""
    dtype = np.dtype(code)
    if dtype.kind not in _NUMERIC_KINDS:
        raise UnpicklingError(f"a checkpoint may hold numbers only, not the dtype {code!r}")
    return dtype


def _reconstruct(kind: type, shape: tuple, code: bytes) -> _NumericArray:
    """Return an array for ``__setstate__`` to fill, as numpy pickles one; no argument matters."""
    return _NumericArray()


def _scalar(dtype: _NumericDtype, data: bytes) -> np.generic:
    """Return the one number in ``data``."""
    (value,) = np.frombuffer(data, _numeric(dtype.str))
    return value


def _numpy_stand_ins() -> list[tuple[Callable, str]]:
    stand_ins = [(_NumericDtype, "numpy.dtype"), (_NumericArray, "numpy.ndarray")]
    for module in ("numpy._core.multiarray", "numpy.core.multiarray"):  # numpy 2, numpy 1
        stand_ins += [(_reconstruct, f"{module}._reconstruct"), (_scalar, f"{module}.scalar")]
    return stand_ins


# ---- replacements of fairseq's functions: each takes the original as its first argument ----


def _broadcast_plain_config(original: Callable, obj: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(obj, dict) and OmegaConf.is_config(obj.get("cfg")):
        obj = {**obj, "cfg": OmegaConf.to_container(obj["cfg"], enum_to_str=True)}
    obj = original(obj, *args, **kwargs)
    if isinstance(obj, dict) and isinstance(obj.get("cfg"), dict):
        obj["cfg"] = OmegaConf.create(obj["cfg"], flags={"allow_objects": True})
    return obj


def _override_without_implied_tpu(original: Callable, args: argparse.Namespace) -> Any:
    if getattr(args, "bf16", False) and getattr(args, "tpu", False) and "--tpu" not in sys.argv:
        args.tpu = False
    return original(args)


def _batches_of(indices: np.ndarray) -> list:
    return data_utils.batch_by_size(
        indices, None, num_tokens_vec=indices, max_sentences=8, required_batch_size_multiple=8
    )


def _batch_every_sample(original: Callable, indices: Any, *rest: Any, **keywords: Any) -> list:
    """``original``, and its samples (a prefix of ``indices``) completed by those it dropped."""
    if not isinstance(indices, np.ndarray):
        indices = np.fromiter(indices, dtype=np.int64, count=-1)
    batches = list(original(indices, *rest, **keywords))
    dropped = indices[sum(map(len, batches)) :]
    return [*batches, dropped] if len(dropped) else batches


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
    # the original reads nothing of the class but its table of fields
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


# ---- how the fixes look and patch ----


def _loads(sample: object) -> bool:
    """Whether ``torch.load``, called as fairseq calls it, accepts what ``torch.save`` wrote."""
    buffer = io.BytesIO()
    torch.save(sample, buffer)
    buffer.seek(0)
    try:
        torch.load(buffer)
    except UnpicklingError:
        return False
    return True


def _loading_is_safe() -> bool:
    return not _loads(timedelta())  # a type that no state dict needs and nobody allows


def _replace(module: ModuleType, name: str, replacement: Callable) -> None:
    """Put ``replacement`` in front of ``module.name``, once."""
    original = getattr(module, name)
    if getattr(original, "func", None) is not replacement:
        setattr(module, name, functools.partial(replacement, original))
