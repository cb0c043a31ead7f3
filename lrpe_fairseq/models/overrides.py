"""``--model-overrides`` for our models: support flat names of nested options, refuse unknown names.

fairseq overrides an option of a checkpoint wherever its name occurs in the configuration, and
silently ignores a name that does not occur. ``encoder_layers`` does not occur in
``lrpe_transformer``, whose configuration has ``encoder.layers``.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import Any

from fairseq import checkpoint_utils
from fairseq.dataclass.configs import FairseqConfig
from fairseq.models import MODEL_DATACLASS_REGISTRY
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_DATACLASS_REGISTRY
from omegaconf import DictConfig, open_dict

from lrpe_fairseq.compat.patching import replace_once
from lrpe_fairseq.errors import did_you_mean, refuse
from lrpe_fairseq.models.flags import options_of
from lrpe_fairseq.models.resumption import warn_about_other_attention

HUB_NAMES = ("data", "generation_args", "is_vocoder", "user_dir")
"""Names that ``from_pretrained`` passes in addition to options."""


def apply_flat_overrides() -> None:
    """Replace the function that overrides options of a checkpoint. A second call does nothing."""
    replace_once(checkpoint_utils, "overwrite_args_by_name", _override)


def _override(original: Callable, config: DictConfig, overrides: dict[str, Any]) -> None:
    family = _our_config(config)
    if family is not None:
        _refuse_unknown_names(config, family, overrides)
        warn_about_other_attention(config.model, overrides)
    original(config, overrides)
    # fairseq has set flat names in every section that has them; the rest is ours
    if family is not None:
        with open_dict(config):
            _override_sections(config.model, family, overrides)
            _add_later_options(config.model, family, overrides)
            if task := _task_config(config):
                _add_later_options(config.task, task, overrides)


def _our_config(config: DictConfig) -> type | None:
    """Return the configuration class of the checkpoint's model, or None if it is not ours."""
    name = getattr(config.get("model"), "_name", None)
    family = MODEL_DATACLASS_REGISTRY.get(name)
    ours = family is not None and family.__module__.startswith("lrpe_fairseq.")
    return family if ours else None


def _task_config(config: DictConfig) -> type | None:
    """Return the configuration class of the checkpoint's task, or None."""
    return TASK_DATACLASS_REGISTRY.get(getattr(config.get("task"), "_name", None))


def _add_later_options(section: DictConfig, options: type, overrides: dict[str, Any]) -> None:
    """Set options that the checkpoint lacks because they are newer than it."""
    for name in (option.name for option in fields(options)):
        if name in overrides and name not in section:
            section[name] = overrides[name]


def _override_sections(model: DictConfig, family: type, overrides: dict[str, Any]) -> None:
    """Set ``model.encoder.layers`` to the value of ``encoder_layers``, and so on."""
    for option, _ in options_of(family):
        section, _, name = option.partition(".")
        if name and f"{section}_{name}" in overrides:
            value = overrides[f"{section}_{name}"]
            # on the command line the option is text with commas, in a section a list
            if name == "layers_to_keep" and isinstance(value, str):
                value = [int(layer) for layer in value.split(",")]
            model[section][name] = value


def _refuse_unknown_names(config: DictConfig, family: type, overrides: dict[str, Any]) -> None:
    """Stop if a name overrides nothing; a Namespace in the configuration accepts every name."""
    # ``in`` is false for a key whose value is missing
    if any(isinstance(config[key], Namespace) for key in config if key in config):
        return
    model = {name.replace(".", "_") for name, _ in options_of(family)}
    task = _task_config(config)
    options = {option.name for option in fields(task)} if task else set()
    known = {*model, *options, *_names(config), *_known_to_fairseq(), *HUB_NAMES}
    for name in overrides:
        if name not in known:
            refuse(f"unknown option {name!r} in the overrides{did_you_mean(name, model)}")


def _names(config: DictConfig) -> Iterator[str]:
    """Yield every key of a configuration and of nested configurations."""
    for name in config:
        yield str(name)
        if name in config and isinstance(config[name], DictConfig):
            yield from _names(config[name])


def _known_to_fairseq() -> Iterator[str]:
    """Yield the options of fairseq's sections and of its tokenizers, BPE, criteria and so on."""
    registered = (r["dataclass_registry"].values() for r in REGISTRIES.values())
    for part in filter(is_dataclass, chain([FairseqConfig], *registered)):
        yield from (option.name for _, option in options_of(part))
