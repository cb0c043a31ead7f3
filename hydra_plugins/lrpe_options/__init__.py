"""A plugin of hydra: ``fairseq-hydra-train ... model.<option>=<value>`` without a line in the YAML.

hydra refuses to override a key that a YAML lacks, before fairseq imports ``lrpe_fairseq``, which
knows the options. Sections of our classes therefore accept every key here. Names and types are
checked when fairseq merges a section with its class; see ``models/options.py``.

hydra imports this package in all of its programs, so it imports and changes nothing else.
"""

from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import DictConfig, OmegaConf

_apply = ConfigLoaderImpl._apply_overrides_to_config


def _apply_to_open_sections(overrides: list[Any], cfg: DictConfig) -> None:
    """Apply ``overrides`` after opening the sections whose ``_name`` is one of ours."""
    given = {override.key_or_group: override.value() for override in overrides}
    for part in cfg:
        if not OmegaConf.is_missing(cfg, part) and isinstance(cfg[part], DictConfig):
            name = given.get(f"{part}._name", OmegaConf.select(cfg[part], "_name"))
            if str(name).startswith("lrpe_"):
                OmegaConf.set_struct(cfg[part], False)
    _apply(overrides, cfg)


ConfigLoaderImpl._apply_overrides_to_config = staticmethod(_apply_to_open_sections)
