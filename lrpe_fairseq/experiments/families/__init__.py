"""One file per family of experiments, and the list of families.

A family is a subclass of :class:`TrainingRun`. It declares its configurations, data preparation,
validation curve, budget, table options and the next step after a training; and it measures a
trained model.
"""

from pathlib import Path

from lrpe_fairseq.experiments.families.classification import ClassificationRun
from lrpe_fairseq.experiments.families.finetuning import FinetuningRun
from lrpe_fairseq.experiments.families.generated import SyntheticRun, TransductionRun
from lrpe_fairseq.experiments.families.lm import LMRun, PretrainingRun
from lrpe_fairseq.experiments.families.translation import TranslationRun
from lrpe_fairseq.experiments.records.files import CONFIGS, load_config, relative
from lrpe_fairseq.experiments.runner.training import TrainingRun

FAMILIES: dict[str, type[TrainingRun]] = {
    "lm": LMRun,
    "pretraining": PretrainingRun,
    "finetuning": FinetuningRun,
    "translation": TranslationRun,
    "transduction": TransductionRun,
    "classification": ClassificationRun,
    "synthetic": SyntheticRun,
}


def family_of(config: Path) -> type[TrainingRun]:
    """Return the family that trains with ``config``, a file of configs/<folder>.

    Raises: ValueError if the file does not exist or belongs to no family.
    """
    if not config.exists():
        raise ValueError(f"{relative(config)} does not exist")
    task = load_config(config).task._name
    for family in FAMILIES.values():
        if config.parent == CONFIGS / family.configs and family.task in ("", task):
            return family
    raise ValueError(
        f"{relative(config)} has task {task}, which no family trains ({', '.join(FAMILIES)})"
    )


def preparation_of(data: Path) -> list[str]:
    """Return the script that prepares ``data``, with its arguments; empty if no family has one."""
    found = (family.preparation_of(data) for family in FAMILIES.values())
    return next(filter(None, found), [])
