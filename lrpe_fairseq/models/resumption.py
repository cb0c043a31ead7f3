"""A checkpoint and the training or the command that reads it: do their options agree?

``compat.resumed_place`` calls these functions when fairseq loads a checkpoint.
"""

import logging
from collections.abc import Iterable
from typing import Any

from omegaconf import OmegaConf

from lrpe_fairseq.encodings import options_of_encodings, options_read_by
from lrpe_fairseq.errors import refuse
from lrpe_fairseq.models.pruning import as_built, is_ours
from lrpe_fairseq.patterns import OPTIONS, canonical, values
from lrpe_fairseq.stock import STOCK

logger = logging.getLogger(__name__)

OF_ATTENTION = (
    "attention",
    "encoding",
    "fidelity",
    "grid",
    "positional_embeddings",
    "memory_length",
    "document_boundary",
    "kv_heads",
    "head_dim",
    "out_bias",
    "score_scale",
    "scale_",  # of NormFormer
)
"""Parts of the names of options that choose a model's attention, beside those of encodings."""
WITHOUT_WEIGHTS = ("memory_length", "document_boundary")
"""Options of attention that no weight depends on."""
RENAMED = ("yarn", "yarn-printed")
"""A context scaling of older checkpoints, and its present name."""


def check_resumed(path: str, before: Any, now: Any) -> None:
    """Refuse to resume a training with another encoding, attention, memory, document boundary,
    size of images or number of learned positions. Options that nothing reads may differ.

    before, now: the configurations of the checkpoint and of this training.
    Raises: Refusal, which names the options that differ.
    """
    trained, wanted = _attentions(before, now)
    # these decide the shapes of weights or what they mean, and are no options of attention
    trained |= _image_size(before.get("task")) | _learned_positions(before)
    wanted |= _image_size(now.get("task")) | _learned_positions(now)
    had, has = _differences(trained, wanted)
    if had:
        refuse(
            f"{path} was trained with {had}; this training has {has}: choose another --save-dir "
            "(checkpoint.save_dir), or if the weights fit, start from them with "
            "--finetune-from-model (checkpoint.finetune_from_model)"
        )


def check_started(path: str, before: Any, now: Any) -> None:
    """Refuse to start a training from weights of another encoding or attention, unless it says so.

    ``--finetune-from-model`` says so, and gets a warning. ``--restore-file`` with
    ``--reset-optimizer`` does not. Memory and document boundary may be others, because no weight
    depends on them. before, now: as in :func:`check_resumed`.
    Raises: Refusal, which names the options that differ.
    """
    trained, wanted = _attentions(before, now)
    for options in (trained, wanted):
        for name in WITHOUT_WEIGHTS:
            options.pop(name, None)
    had, has = _differences(trained, wanted)
    if not had:
        return
    said = f"{path} was trained with {had}; this training has {has}"
    # said on purpose, such as other gates on trained weights
    if path == now["checkpoint"]["finetune_from_model"]:
        logger.warning("%s", said)
        return
    refuse(
        f"{said}: train with the options of the checkpoint, or if the weights fit, start from them "
        "with --finetune-from-model (checkpoint.finetune_from_model) instead of --restore-file"
    )


def _attentions(before: Any, now: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Return the options of attention of two configurations, those of the layers that were built.

    They are empty if one of the two is not of a model of this package.
    """
    model_before = _as_dict(before["model"] or {})
    model_now = _as_dict(now["model"] or {})
    if not is_ours(model_before) or not is_ours(model_now):
        return {}, {}
    # a checkpoint of a pruned model has the options of the layers that are left
    built_before, built_now = as_built(model_before, model_now)
    return _read_options(built_before), _read_options(built_now)


def _read_options(model: dict[str, Any]) -> dict[str, str]:
    """Return the options of :func:`_attention` that a part of the model reads."""
    chosen = _attention(model)
    stock_cross = all(chosen.get(f"cross.{name}", usual) == usual for name, usual in STOCK.items())
    return {
        name: value
        for name, value in chosen.items()
        if not _unread_by_encoding(name, chosen) and not (stock_cross and _is_extra_of_cross(name))
    }


def _unread_by_encoding(name: str, chosen: dict[str, str]) -> bool:
    """True for an option of encodings that no encoding of its section reads."""
    section, _, last = name.rpartition(".")
    if last not in options_of_encodings():
        return False
    encodings = values(chosen.get(f"{section}.position_encoding".removeprefix("."), "none"))
    return all(last not in options_read_by(encoding) for encoding in encodings)


def _is_extra_of_cross(name: str) -> bool:
    """True for an option of cross-attention that fairseq's own does not have."""
    section, _, last = name.rpartition(".")
    return section == "cross" and last not in STOCK


def _differences(trained: dict[str, str], wanted: dict[str, str]) -> tuple[str, str]:
    """Return the options that both have with different values, as text; empty if there are none."""
    differing = sorted(
        name
        for name in trained.keys() & wanted.keys()
        if trained[name] != wanted[name]
        and (trained[name], wanted[name]) != RENAMED  # the same under its new name
    )
    return _listed(trained, differing), _listed(wanted, differing)


def _listed(options: dict[str, Any], names: Iterable[str]) -> str:
    """Return ``name=value, name=value``."""
    return ", ".join(f"{name}={options[name]}" for name in names)


def check_unfinished(path: str, state: dict[str, Any], now: Any) -> None:
    """Refuse to go on with a training that has all its updates, and had another seed or rate.

    Nothing would be trained, and every job of a sweep in one folder would return the first model.
    state: of the checkpoint. now: the configuration of this training.
    Raises: Refusal, which names seed and rate of both.
    """
    last = now["optimization"]["max_update"]  # 0: no limit
    if not 0 < last <= state["optimizer_history"][-1]["num_updates"]:
        return
    had = _seed_and_rate(state["cfg"])
    has = _seed_and_rate(now)
    if had != has:
        refuse(
            f"{path} has all its updates with {_listed(had, had)}, so nothing would be trained "
            f"with {_listed(has, has)}: choose another --save-dir (checkpoint.save_dir) for every "
            "training"
        )


def _seed_and_rate(cfg: Any) -> dict[str, Any]:
    return {
        "common.seed": cfg["common"]["seed"],
        "optimization.lr": list(cfg["optimization"]["lr"]),
    }


def _image_size(task: Any) -> dict[str, str]:
    """Return the size of images; {} for a task without one."""
    size = task.get("image_size") if isinstance(task, dict) else getattr(task, "image_size", None)
    return {} if size is None else {"image_size": str(size)}


def _learned_positions(cfg: Any) -> dict[str, str]:
    """Return the longest input of an encoder with learned positions; {} for other models."""
    model = _as_dict(cfg.get("model") or {})
    task = _as_dict(cfg.get("task") or {})
    if not model.get("encoder_learned_pos") or model.get("no_token_positional_embeddings"):
        return {}
    # in the order in which the model takes its length
    lengths = (
        model.get("max_positions"),
        task.get("max_positions"),
        task.get("tokens_per_sample"),
    )
    longest = next((length for length in lengths if length), None)
    return {"max_positions": str(longest)}


def _as_dict(options: Any) -> dict[str, Any]:
    """Return a section of a configuration, or flat options, as a dictionary."""
    if OmegaConf.is_config(options):
        return OmegaConf.to_container(options, resolve=True, enum_to_str=True)
    return options if isinstance(options, dict) else vars(options)


def _attention(options: Any, section: str = "") -> dict[str, str]:
    """Return the options of a model that choose its attention, by dotted name."""
    chosen = {}
    for name, value in _as_dict(options).items():
        if isinstance(value, dict):
            chosen |= _attention(value, f"{section}{name}.")
        elif _chooses_attention(name):
            # equal patterns are written in several ways
            chosen[section + name] = canonical(value) if name in OPTIONS else str(value)
    return chosen


def _chooses_attention(name: str) -> bool:
    """True for the name of an option of attention or encoding; a dropout may differ."""
    if name in options_of_encodings():
        return True
    return "dropout" not in name and any(part in name for part in OF_ATTENTION)


def warn_about_other_attention(model: Any, overrides: dict[str, Any]) -> None:
    """Warn if a checkpoint is read with another attention or encoding than it was trained with.

    model: the options of its model before the overrides.
    """
    for name, trained in _attention(model).items():
        overridden = overrides.get(name.replace(".", "_"), trained)
        if name.endswith(("attention_type", "position_encoding")) and str(overridden) != trained:
            logger.warning("the model was trained with %s=%s, not %s", name, trained, overridden)


def warn_about_yarn(path: str, cfg: Any, overrides: dict[str, Any] | None) -> None:
    """Warn if a checkpoint was saved with context scaling "yarn", whose meaning has changed.

    cfg: its configuration, with ``overrides`` (by flat name) applied. An option that they set says
    nothing about the checkpoint.
    """
    for name, saved in _attention(cfg.get("model") or {}).items():
        # overrides are applied when the configuration comes here, and have flat names
        overridden = overrides is not None and name.replace(".", "_") in overrides
        if name.endswith("context_scaling") and saved == RENAMED[0] and not overridden:
            logger.warning(
                "%s has %s=yarn, which is the ramp of the authors' code now and was the formula as "
                "printed: if it was trained with the latter, load it with %s=yarn-printed",
                path,
                name,
                name,
            )
