"""One file for each family of experiments, and the list of the families.

A family is a subclass of :class:`TrainingRun`. It declares its configurations, what prepares its
data, the curve that its run files keep, its budget, its options in tables, and the next step
after a training; and it measures a trained model.
"""

from pathlib import Path

from lrpe_fairseq.experiments.families.finetuning import FinetuningRun
from lrpe_fairseq.experiments.families.lm import LMRun
from lrpe_fairseq.experiments.families.pretraining import PretrainingRun
from lrpe_fairseq.experiments.families.translation import TranslationRun
from lrpe_fairseq.experiments.records.files import CONFIGS, ROOT, load_config, relative
from lrpe_fairseq.experiments.runner.training import TrainingRun

FAMILIES: dict[str, type[TrainingRun]] = {
    "lm": LMRun,
    "pretraining": PretrainingRun,
    "finetuning": FinetuningRun,
    "translation": TranslationRun,
}


def family_of(config: Path) -> type[TrainingRun]:
    """The family that trains with ``config``, a file of configs/<folder>.

    Raises: ValueError if there is no such file, or no family has it.
    """
    if not config.exists():
        raise ValueError(f"{relative(config)} is not there")
    task = load_config(config).task._name
    for family in FAMILIES.values():
        if config.parent == CONFIGS / family.configs and family.task in ("", task):
            return family
    raise ValueError(
        f"{relative(config)}, of task {task}, is of none of the families {', '.join(FAMILIES)}"
    )


def preparation_of(data: Path) -> list[str]:
    """The script that prepares ``data`` for any family, and its arguments; empty if none does."""
    found = (family.preparation_of(data) for family in FAMILIES.values())
    return next(filter(None, found), [])


def known_data() -> list[Path]:
    """Every data folder that a family knows by name."""
    names = (name for family in FAMILIES.values() for name in family.data_scripts)
    return [ROOT / "data" / name for name in dict.fromkeys(names)]
