"""Compare the options of a finished training with the current configuration.

A configuration is resolved as in fairseq-hydra-train: defaults of fairseq and of our models, then
the YAML, then overrides. An option that was deleted from a YAML is therefore compared with its
default.
"""

import functools
import re
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from omegaconf import OmegaConf

from lrpe_fairseq.errors import did_you_mean
from lrpe_fairseq.experiments.records import checkpoints, keys
from lrpe_fairseq.experiments.records.keys import plain

Config = dict[str, dict[str, Any]]
Names = tuple[tuple[str, str | None], ...]
IMPORTING = threading.Lock()  # two threads that import fairseq at once find parts of it missing

INCIDENTAL = {
    *("log_file", "log_format", "log_interval", "no_progress_bar", "reset_logging", "profile"),
    *("aim_repo", "aim_run_hash", "azureml_logging", "tensorboard_logdir", "wandb_project"),
    *("save_dir", "no_save_optimizer_state", "write_checkpoints_asynchronously", "user_dir"),
    *("num_workers", "num_workers_valid", "data_buffer_size", "use_plasma_view", "plasma_path"),
    *("max_tokens_valid", "batch_size_valid", "all_gather_list_size", "empty_cache_freq"),
    *("stop_time_hours", "suppress_crashes"),
}
"""Options without effect on the trained weights: logs, output paths, loading, validation batches.
Those of ``distributed_training`` have none either, except for the number of processes."""


def resolved(settings: Any) -> Config:
    """Return ``settings`` merged over the defaults of every section, and resolved.

    OmegaConf does the same ten times slower; fairseq's interpolations are whole values.
    """
    chosen = OmegaConf.to_container(settings)
    stated = {part: chosen[part] for part in checkpoints.SECTIONS if chosen.get(part)}
    merged = _merged(_defaults(_names(settings)), stated)
    return _resolved(merged, merged)


def _merged(below: Config, above: Config) -> Config:
    both = {k: (below.get(k), value) for k, value in above.items()}
    return below | {
        k: _merged(old, new) if isinstance(old, dict) and isinstance(new, dict) else new
        for k, (old, new) in both.items()
    }


def _resolved(value: Any, config: Config) -> Any:
    """Return ``value`` with its interpolations, such as ``${task.data}``, replaced."""
    if isinstance(value, dict):
        return {key: _resolved(inner, config) for key, inner in value.items()}
    link = re.fullmatch(r"\$\{([\w.]+)\}", value) if isinstance(value, str) else None
    return (
        _resolved(functools.reduce(dict.get, link[1].split("."), config), config) if link else value
    )


def require_known(settings: Any, changes: Iterable[str]) -> None:
    """Refuse a change of a key that the configuration ``settings`` does not have.

    Raises: ValueError, one sentence. Trap: hydra would add it, and nothing would read it.
    """
    known = options(resolved(settings))
    for key in changes:
        if key not in known:
            raise ValueError(f"there is no setting {key!r}{did_you_mean(key, known)}")


def options(config: Config) -> dict[str, Any]:
    """Return the resolved configuration by dotted keys, as in a run file."""
    return checkpoints.dotted({part: config.get(part) or {} for part in checkpoints.SECTIONS})


def differences(settings: Any, config: Mapping[str, Any]) -> set[str]:
    """Return the options in which ``config``, from a run file, differs from ``settings``.

    Batch sizes are compared as tokens or samples per update over all processes, encodings by their
    canonical names. An option that did not exist when the training ran counts as its default. What
    nothing reads is not compared.
    """
    wanted = options(resolved(settings))
    usual = _usual(_names(settings))
    # A training that is older than an option had its default.
    had = {**{name: usual.get(name, wanted[name]) for name in wanted}, **config}
    spread = OmegaConf.select(settings, keys.WORLD, default=1)
    names = {name for name in wanted if not _is_incidental(name)}
    names -= keys.unread(had) & keys.unread(wanted)
    changed = {n for n in names if keys.comparable(n, had[n]) != keys.comparable(n, wanted[n])}
    # a checkpoint may lack what the model reads from its task
    changed -= {n for n in changed if None in (had[n], wanted[n]) and n == "model.max_positions"}
    ours = {**wanted, keys.WORLD: spread}
    theirs = {**had, keys.WORLD: config.get(keys.WORLD, 1)}
    return changed | _differences_of_batches(ours, theirs)


def _differences_of_batches(wanted: Mapping[str, Any], had: Mapping[str, Any]) -> set[str]:
    """Return the options of batches that differ, if they make another training.

    With BatchNorm also equal updates differ if they are accumulated from other batches.
    """
    per_update = all(keys.sizes(wanted, n) == keys.sizes(had, n) for n in keys.LIMITS)
    batch_norm = wanted.get("model.norm") == "batch"
    if per_update and not (batch_norm and keys.steps(wanted) != keys.steps(had)):
        return set()
    limits = {name for name in keys.LIMITS if plain(wanted[name]) != plain(had[name])}
    together = keys.batches(wanted) != keys.batches(had)
    return limits | ({keys.FREQUENCY} if together or not limits else set())


def _names(settings: Any) -> Names:
    """Return (section, ``_name``) of the sections that have a class per name."""
    named = [part for part in checkpoints.SECTIONS if part not in checkpoints.PLAIN]
    parts = [part for part in named if settings.get(part)]
    return tuple((part, settings[part].get("_name")) for part in parts)


@functools.cache
def _usual(names: Names) -> dict[str, Any]:
    """Return the options of a training whose YAML only names the classes."""
    return options(_resolved(_defaults(names), _defaults(names)))


@functools.cache
def _defaults(names: Names) -> Config:
    """Return the defaults of all sections, not resolved; ``names`` select their classes."""
    with IMPORTING:
        from fairseq.dataclass.configs import FairseqConfig
        from fairseq.dataclass.initialize import add_defaults

        from lrpe_fairseq import criterions, models, optim, tasks  # noqa: F401  (register classes)

    kinds = {part: FairseqConfig.__dataclass_fields__[part].default for part in checkpoints.PLAIN}
    values = {part: OmegaConf.structured(kind) for part, kind in kinds.items()}
    config = OmegaConf.create({**values, **{part: {"_name": name} for part, name in names}})
    add_defaults(config)
    return OmegaConf.to_container(config)


def _is_incidental(name: str) -> bool:
    """True for an option without effect on the weights, and for the sizes of batches."""
    section, _, key = name.partition(".")
    batches = name in (*keys.LIMITS, keys.FREQUENCY)
    return batches or section == "distributed_training" or key in INCIDENTAL
