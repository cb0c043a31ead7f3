"""A plugin of hydra: ``fairseq-hydra-train ... model.<option>=<value>`` without a line in the YAML.

hydra refuses to override a key that a YAML lacks, before fairseq imports ``lrpe_fairseq``, which
knows the options. Sections of our classes therefore accept every key here. Names and types are
checked when fairseq merges a section with its class; see ``models/bad_options.py``.

hydra puts the schema of fairseq's configuration below the file that ``--config-name`` names, but
above the bases in that file's ``defaults``, so that fairseq's defaults would replace what a base
says. The bases and the file are therefore merged once more above the schema.

fairseq registers a schema under the name that ``--config-name`` gives, so that hydra takes one
without a file for a configuration. Such a name is refused.

The function that hydra calls for a training computes the value that a sweeper such as Optuna needs,
and drops it. Here it returns the value, after it has imported ``common.user_dir``: the package
there may act on the whole training (``lrpe_fairseq/compat/run_state.py``).

In fairseq-hydra-train, hydra's warning that fairseq registers its schema under the name of the file
is hidden; it stands twice before every training.

hydra imports this package in all of its programs. It therefore imports nothing of this project, and
everything here acts on configurations with fairseq's schema only: any other program of the same
environment composes the same configurations as without this package.
"""

import copy
import sys
import warnings
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.object_type import ObjectType
from omegaconf import DictConfig, OmegaConf

BASE = "base"
"""The base of a folder of configs/; its file, and files above it, are merged above the schema."""
SCHEMA = ("fairseq.dataclass.configs", "FairseqConfig")
"""Module and name of the schema of fairseq's configurations."""
PROGRAMS = ("fairseq_cli.hydra_train", "__main__")
"""Modules that may hold fairseq-hydra-train; with ``python -m`` it is the second."""
FILE = str(Path("fairseq_cli", "hydra_train.py"))
"""The file of fairseq-hydra-train."""
OF_THE_SCHEMA = r"\s*'.*' is validated against ConfigStore"
"""The warning that is hidden in fairseq-hydra-train."""

_apply = ConfigLoaderImpl._apply_overrides_to_config
_compose = ConfigLoaderImpl._compose_config_from_defaults_list


def _is_fairseqs(config: DictConfig) -> bool:
    """True if a configuration, or a schema, is fairseq's."""
    schema = OmegaConf.get_type(config)
    return (schema.__module__, schema.__name__) == SCHEMA


def _apply_to_open_sections(overrides: list[Any], cfg: DictConfig) -> None:
    """Apply ``overrides``, in fairseq's configuration after opening the sections of our classes."""
    if _is_fairseqs(cfg):
        _open_sections(overrides, cfg)
    _apply(overrides, cfg)


def _open_sections(overrides: list[Any], cfg: DictConfig) -> None:
    """Let the sections whose ``_name`` is one of ours accept every key."""
    values = {override.key_or_group: override.value() for override in overrides}
    for part in cfg:
        if not OmegaConf.is_missing(cfg, part) and isinstance(cfg[part], DictConfig):
            # the line may choose the class, too, after its section was composed
            name = values.get(f"{part}._name", OmegaConf.select(cfg[part], "_name"))
            if str(name).startswith("lrpe_"):
                OmegaConf.set_struct(cfg[part], False)


def _compose_bases_above_the_schema(self: ConfigLoaderImpl, defaults: list[Any], repo: Any) -> Any:
    """Compose ``defaults``; in fairseq's configuration, merge its base again above the schema.

    Raises: SystemExit if the configuration of fairseq-hydra-train is no file.
    """
    schemas = repo.get_schema_source()
    names = [d.config_path for d in defaults if d.primary and schemas.is_config(d.config_path)]
    if not any(_is_fairseqs(schemas.load_config(name).config) for name in names):
        return _compose(self, defaults, repo)
    warnings.filterwarnings("ignore", OF_THE_SCHEMA, UserWarning)  # imports cannot: hydra undoes it
    _require_file(names[0], repo)
    _return_values()
    files = _base_and_above(defaults, repo)  # read before, because _compose edits them
    config = _compose(self, defaults, repo)
    for file in files:
        config.merge_with(file)
    return config


def _base_and_above(defaults: list[Any], repo: Any) -> list[DictConfig]:
    """Return the base in the configuration's folder, and the files that are merged after it."""
    paths = [default.config_path for default in defaults]
    above = defaults[paths.index(BASE) :] if BASE in paths else []
    read = [(repo.load_config(default.config_path), default.package) for default in above]
    placed = [ConfigLoaderImpl._embed_result_config(file, package) for file, package in read]
    return [copy.deepcopy(file.config) for file in placed]  # hydra's own are cached


def _require_file(name: str, repo: Any) -> None:
    """Refuse the name of a schema without a file in fairseq-hydra-train."""
    folders = [source for source in repo.get_sources() if source.scheme() != "structured"]
    if not any(source.path.replace(".", "/").endswith("fairseq/config") for source in folders):
        return
    if any(source.is_config(name) for source in folders):
        return
    from lrpe_fairseq.errors import did_you_mean, refuse

    known = [name for source in folders for name in source.list("", ObjectType.CONFIG)]
    refuse(f"no configuration {name!r} in {folders[-1].path}{did_you_mean(name, known)}")


def _return_values() -> None:
    """Give the function that hydra calls for a training the code of :func:`hydra_main`.

    hydra holds the function itself by now, so that another function in its place would be too late.
    """
    for name in PROGRAMS:
        called = getattr(getattr(sys.modules.get(name), "hydra_main", None), "__wrapped__", None)
        if called is not None and called.__code__.co_filename.endswith(FILE):
            called.__code__ = hydra_main.__code__  # the names are those of its own module


def hydra_main(cfg: DictConfig) -> float:
    """Train as ``cfg`` says and return what fairseq returns: the value that a sweeper optimizes.

    Its code runs as fairseq's, with the names of ``fairseq_cli/hydra_train.py``.
    """
    from fairseq.utils import import_user_module

    import_user_module(cfg.common)
    return _hydra_main(cfg)  # noqa: F821


ConfigLoaderImpl._compose_config_from_defaults_list = _compose_bases_above_the_schema
ConfigLoaderImpl._apply_overrides_to_config = staticmethod(_apply_to_open_sections)
