"""A plugin of hydra: ``fairseq-hydra-train ... model.<option>=<value>`` without a line in the YAML.

hydra refuses to override a key that a YAML lacks, before fairseq imports ``lrpe_fairseq``, which
knows the options. Sections of our classes therefore accept every key here. Names and types are
checked when fairseq merges a section with its class; see ``models/options.py``.

hydra puts the schema of fairseq's configuration below the file that ``--config-name`` names, but
above the bases in that file's ``defaults``, so that fairseq's defaults would replace what a base
says. The bases and the file are therefore merged once more above the schema.

fairseq registers a schema under the name that ``--config-name`` gives, so that hydra takes one
without a file for a configuration. Such a name is refused.

hydra imports this package in all of its programs, so it imports and changes nothing else.
"""

import copy
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.object_type import ObjectType
from omegaconf import DictConfig, OmegaConf

BASE = "base"
"""The base of a folder of configs/; its file, and files above it, are merged above the schema."""

_apply = ConfigLoaderImpl._apply_overrides_to_config
_compose = ConfigLoaderImpl._compose_config_from_defaults_list


def _apply_to_open_sections(overrides: list[Any], cfg: DictConfig) -> None:
    """Apply ``overrides`` after opening the sections whose ``_name`` is one of ours."""
    given = {override.key_or_group: override.value() for override in overrides}
    for part in cfg:
        if not OmegaConf.is_missing(cfg, part) and isinstance(cfg[part], DictConfig):
            name = given.get(f"{part}._name", OmegaConf.select(cfg[part], "_name"))
            if str(name).startswith("lrpe_"):
                OmegaConf.set_struct(cfg[part], False)
    _apply(overrides, cfg)


def _compose_bases_above_the_schema(self: ConfigLoaderImpl, defaults: list[Any], repo: Any) -> Any:
    """Compose ``defaults``, and merge a base and the files that list it above the schema.

    Raises: SystemExit if the configuration of the command line is no file.
    """
    _require_file([default.config_path for default in defaults if default.primary], repo)
    paths = [default.config_path for default in defaults]
    paths = paths[paths.index(BASE) :] if BASE in paths else []
    files = [copy.deepcopy(repo.load_config(path).config) for path in paths]  # _compose edits them
    config = _compose(self, defaults, repo)
    for file in files:
        config.merge_with(file)
    return config


def _require_file(primary: list[str], repo: Any) -> None:
    """Refuse a name without a file in fairseq's program; others may have schemas only."""
    folders = [source for source in repo.get_sources() if source.scheme() != "structured"]
    if not any(source.path.replace(".", "/").endswith("fairseq/config") for source in folders):
        return
    if not primary or any(source.is_config(primary[0]) for source in folders):
        return
    from lrpe_fairseq.errors import did_you_mean, refuse

    known = [name for source in folders for name in source.list("", ObjectType.CONFIG)]
    refuse(
        f"no configuration {primary[0]!r} in {folders[-1].path}{did_you_mean(primary[0], known)}"
    )


ConfigLoaderImpl._compose_config_from_defaults_list = _compose_bases_above_the_schema
ConfigLoaderImpl._apply_overrides_to_config = staticmethod(_apply_to_open_sections)
