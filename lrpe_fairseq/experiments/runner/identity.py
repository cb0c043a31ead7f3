"""Is a finished training the one that is configured now? Options compared by name and value."""

from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from lrpe_fairseq.experiments.records import checkpoints
from lrpe_fairseq.experiments.records.runs import plain

DECIDING = ("task", "model", "criterion", "optimizer", "lr_scheduler", "optimization")
INCIDENTAL = {"data", "update-freq"}  # where the data lies; how many processes share an update


def differences(settings: Any, seed: int, config: Mapping[str, Any]) -> set[str]:
    """The options of a training, as in a run file, that decide the result and differ.

    settings: the configuration of the run. config: the options of the finished training.
    """
    sections = OmegaConf.to_container(settings)
    wanted = checkpoints.named({section: sections[section] for section in DECIDING})
    wanted |= {"seed": seed, **_batch(sections["dataset"])}
    return {
        name
        for name in set(wanted) - INCIDENTAL  # fairseq keeps "3000" of a YAML as 3000.0
        if plain(config.get(name, wanted[name])) != plain(wanted[name])
    }


def _batch(dataset: Mapping[str, Any]) -> dict[str, Any]:
    """What one process takes at once: tokens, or sentences."""
    known = [key for key in ("max_tokens", "batch_size") if key in dataset]
    return {key.replace("_", "-"): dataset[key] for key in known}
