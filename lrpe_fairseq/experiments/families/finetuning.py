"""Fine-tuning runs: a pre-trained model on one GLUE task, scored on its development set.

The model's options are copied from the checkpoint; fairseq itself would ignore them and use those
of the command line.
"""

import itertools
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from omegaconf import OmegaConf

from lrpe_fairseq.experiments.data import glue
from lrpe_fairseq.experiments.data.folders import Checksums, digest_of, manifest
from lrpe_fairseq.experiments.records import checkpoints, precision
from lrpe_fairseq.experiments.records.files import ROOT, load_config, relative
from lrpe_fairseq.experiments.records.keys import Cell, comparable
from lrpe_fairseq.experiments.records.runs import Run
from lrpe_fairseq.experiments.records.tables import Table, file_name
from lrpe_fairseq.experiments.runner.processes import RunFailed, Shell, written_by
from lrpe_fairseq.experiments.runner.training import TrainingRun

EXPERIMENT = "table3"
GLUE = "glue"
WARM_UP = 0.06  # fraction of the updates, as in RoBERTa's fine-tuning
SCHEDULE = {  # follows from the number of examples
    "optimization.max_update",
    "lr_scheduler.total_num_update",
    "lr_scheduler.warmup_updates",
}
FREE = {  # model options that fine-tuning may set
    "dropout",
    "attention_dropout",
    "activation_dropout",
    "pooler_dropout",
    "pooler_activation_fn",
    "checkpoint_activations",
    "load_checkpoint_heads",
    "max_positions",
}
EMBEDDING = "encoder.sentence_encoder.embed_tokens.weight"


@dataclass(frozen=True)
class FinetuningRun(TrainingRun):
    """Fine-tuning of ``checkpoint`` on the task ``data.name``, with the peak learning rate lr."""

    configs: ClassVar[str] = "roberta"
    task: ClassVar[str] = "sentence_prediction"
    checkpoint: Path = Path()
    lr: float = 1e-5

    @property
    def glue_task(self) -> glue.GlueTask:
        """The GLUE task. Raises: ValueError if the data folder is not named after one."""
        return glue.named(self.data.name)

    @classmethod
    def of_cell(
        cls, table: Table, cell: Cell, scale: str, config: Path, seed: int
    ) -> list[TrainingRun]:
        """Return the runs of a cell, whose data set is a GLUE task: one per learning rate."""
        # Seed 1 of pre-training: seeds of a row are those of its fine-tuning.
        folder = f"{scale}-{file_name(f'{cell.label}-{cell.attention}')}-seed1"
        best = ROOT / "runs" / table.pretrained / folder / "checkpoints" / checkpoints.BEST
        source = {"checkpoint": best, "label": cell.label}
        source |= {"attention_type": cell.attention, "position_encoding": cell.encoding}
        tasks = [cell.dataset.removeprefix("glue-")]
        rates = table.rates_at(scale, cell.rates)
        home = table.experiments[0]
        return finetuning_runs(source, config, scale, tasks, rates, [seed], home)

    @classmethod
    def preparation_of(cls, data: Path) -> list[str]:
        """Return the command for data/glue-<pre-training data>/<task>, with that data's pieces."""
        home = data.parent
        pieces = data.parent.name.removeprefix("glue-")
        if pieces == home.name:
            return []
        script = f"data-prep/glue/prepare.py {data.name} --tokens-of"
        return [*script.split(), relative(home.parent / pieces), "--dest", relative(home)]

    def encoding_choices(self) -> dict[str, str]:
        """Options of the checkpoint's model, the task's head and metric, and its updates."""
        return {**self._model(), **self._task(), **self._updates()}

    def data_checksums(self) -> Checksums:
        """Also that of the pre-trained checkpoint."""
        known = super().data_checksums()
        # Without the checkpoint nothing can be trained, and a plan must still be printed.
        readable = known and self.checkpoint.is_file()
        return {**known, "pretrained": digest_of(self.checkpoint)} if readable else known

    def require_inputs(self) -> None:
        """Also require that checkpoint, data and task match.

        Raises: RunFailed without the checkpoint, or if its dictionary is not that of the data.
        """
        if not self.checkpoint.exists():
            row = (self.checkpoint.absolute().parents[2].name, self.label, self.attention_type)
            raise RunFailed(
                f"{relative(self.checkpoint)} does not exist: pre-train it first, with python -m "
                f"lrpe_fairseq.experiments train_row {shlex.join(row)} --scale {self.scale}"
            )
        super().require_inputs()
        require_match(self.checkpoint, self.data)

    def splits(self) -> set[str]:
        """Also every development set."""
        return super().splits() | set(evaluated(self.data))

    def differences(self, config: Mapping[str, Any]) -> set[str]:
        """Without prepared data the schedule is unknown, so it does not differ."""
        unknown = set() if manifest(self.data).get("splits") else SCHEDULE
        return super().differences(config) - unknown

    def max_update(self) -> int:
        """The number of updates of the whole run; 0 while the data is not prepared."""
        return int(self.settings().optimization.max_update) if manifest(self.data) else 0

    def measure(self, run: Shell) -> Run:
        """Return the task's metrics on every development set of the data."""
        metrics: Run = {}
        for split in evaluated(self.data):
            out = self.folder / f"eval-{split}.json"
            best = self.checkpoints / checkpoints.BEST
            metrics[split] = {GLUE: written_by(run, out, "eval_glue", best, self.data, split)}
        return {"metrics": metrics, "protocol": {GLUE: self._protocol()}}

    def record(self, measured: Run, threads: int) -> Run:
        """Return the content of the run file, with the pre-trained checkpoint."""
        pretrained = checkpoints.load(self.checkpoint)
        return {
            **super().record(measured, threads),
            "pretrained": {
                "checkpoint": relative(self.checkpoint),
                "seed": checkpoints.options(pretrained)["common.seed"],
                "updates": checkpoints.updates(pretrained),
            },
        }

    def _protocol(self) -> str:
        metric = self.glue_task.metrics[0]
        part = "".join(f" {text}" for text in subsets(manifest(self.data)["splits"]))
        return (
            f"The development set of GLUE, with the checkpoint of the epoch that has the best "
            f"{metric} there; {', '.join(self.glue_task.metrics)} times 100.{part}"
        )

    def _model(self) -> dict[str, str]:
        """Every option of the checkpoint's model that fine-tuning must keep.

        Raises: ValueError if the checkpoint has another attention or encoding than the cell.
        """
        if not self.checkpoint.is_file():
            return super().encoding_choices()
        model = model_options(self.checkpoint)
        attention, encoding = model["model.attention_type"], model["model.position_encoding"]
        choices = {"attention_type": attention, "position_encoding": encoding}
        # The path names a row; the checkpoint there may be of another one.
        if any(comparable(k, v) != comparable(k, getattr(self, k)) for k, v in choices.items()):
            raise ValueError(
                f"the checkpoint has {attention} attention and the encoding {encoding}, not "
                f"{self.attention_type} and {self.position_encoding}"
            )
        return {**model, "task.max_positions": str(max_positions(self.checkpoint))}

    def _task(self) -> dict[str, str]:
        best, _ = glue.CRITERION[self.glue_task.metrics[0]]
        reports = {glue.CRITERION[metric][1] for metric in self.glue_task.metrics} - {""}
        return {
            "task.num_classes": str(self.glue_task.classes),
            "criterion.regression_target": str(not self.glue_task.labels).lower(),
            **{f"criterion.{report}": "true" for report in sorted(reports)},
            "checkpoint.best_checkpoint_metric": best,
            "checkpoint.finetune_from_model": relative(self.checkpoint),
            "optimization.lr": f"[{self.lr:g}]",
        }

    def _updates(self) -> dict[str, str]:
        """The updates of the YAML's epochs, up to its max_update, and the schedule; or nothing."""
        splits = manifest(self.data).get("splits")
        # Before the data are prepared the updates are unknown; nothing is trained then.
        if not splits:
            return {}
        settings = OmegaConf.merge(self.yaml(), OmegaConf.from_dotlist(list(self.overrides)))
        # fairseq's schedules count updates; papers state epochs.
        batches = math.ceil(splits["train"]["examples"] / settings.dataset.batch_size)
        updates = batches * settings.optimization.max_epoch
        updates = min(updates, settings.optimization.max_update or updates)
        return {
            "optimization.max_update": str(updates),
            "lr_scheduler.total_num_update": str(updates),
            "lr_scheduler.warmup_updates": str(round(WARM_UP * updates)),
        }


def source_of(checkpoint: Path) -> dict[str, Any]:
    """Describe a checkpoint by its encoding. Raises: ValueError unless it is an lrpe_roberta."""
    model = model_options(checkpoint)
    names = ("attention_type", "position_encoding")
    source = {"checkpoint": checkpoint, **{name: model[f"model.{name}"] for name in names}}
    return {**source, "label": source["position_encoding"]}


def finetuning_runs(
    source: Mapping[str, Any],
    config: Path,
    scale: str,
    tasks: Sequence[str],
    rates: Sequence[float],
    seeds: Sequence[int],
    experiment: str = EXPERIMENT,
    home: Path | None = None,
) -> list[TrainingRun]:
    """Return one run per task, learning rate (default: that of ``config``) and seed.

    source: fields of the run that describe the pre-trained model. experiment: the folder of the
        runs under runs/ and results/runs/. home: the folder with a data folder per task; None for
        that of ``config``.
    """
    settings = load_config(config)
    home = home or ROOT / Path(settings.task.data).parent.parent
    # The configuration's list is per epoch in fairseq; it has one value.
    rates = rates or list(settings.optimization.lr)
    started = source["checkpoint"].absolute().parent.parent.name
    made = []
    for seed, task, lr in itertools.product(seeds, tasks, rates):
        name = f"{started}-{task}-lr{lr:g}-seed{seed}"
        made.append(
            FinetuningRun(
                experiment=experiment,
                config=config.stem,
                data=home / task,
                seed=seed,
                scale=scale,
                folder=ROOT / "runs" / experiment / name,
                result=ROOT / "results" / "runs" / experiment / f"{name}.json",
                lr=lr,
                overrides=precision.overrides(scale, settings),
                **source,
            )
        )
    return made


def model_options(checkpoint: Path) -> dict[str, str]:
    """Return ``model.key`` -> value for all options that fine-tuning must keep.

    Raises: ValueError if the checkpoint does not load or is not an lrpe_roberta model.
    """
    from lrpe_fairseq.models.masked_lm import LRPERobertaConfig

    known = checkpoints.options(checkpoints.load(checkpoint))
    name = str(known.get("model._name", ""))
    if not name.startswith("lrpe_roberta"):
        raise ValueError(f"{relative(checkpoint)} is a model of {name}, not of lrpe_roberta")
    ours = {"_name", *LRPERobertaConfig.__dataclass_fields__} - FREE  # fairseq adds others
    kept = {key: known.get(f"model.{key}") for key in sorted(ours)}
    return {
        f"model.{key}": str(value).lower() if isinstance(value, bool) else str(value)
        for key, value in kept.items()
        if value is not None
    }


def max_positions(checkpoint: Path) -> int:
    """Return the longest input that the checkpoint's model accepts, in tokens."""
    known = checkpoints.options(checkpoints.load(checkpoint))
    return int(known.get("model.max_positions") or known["task.tokens_per_sample"])


def evaluated(data: Path) -> list[str]:
    """Return the development sets of ``data``; none if nothing is prepared."""
    return [split for split in manifest(data).get("splits", {}) if split != "train"]


def subsets(splits: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return a sentence for each split of a manifest that is a subset of the official one."""
    return [
        f"{_use(split)} on a subset: {counts['examples']:,} of {counts['official']:,} examples."
        for split, counts in splits.items()
        # A subset makes numbers that no published one compares with.
        if counts["examples"] != counts["official"]
    ]


def _use(split: str) -> str:
    return "Trained" if split == "train" else f"Evaluated ({split})"


def require_match(checkpoint: Path, data: Path) -> None:
    """Raise ValueError or RunFailed unless the checkpoint can be fine-tuned on ``data``."""
    checkpoints.require_model(checkpoint, "lrpe_roberta")
    ours = data / "bin" / "input0" / "dict.txt"
    if not checkpoints.same_dictionary(checkpoint, EMBEDDING, ours, added=1):  # <mask>
        raise RunFailed(
            f"{relative(checkpoint)} was pre-trained with another dictionary than "
            f"{relative(data)} has: prepare it with data-prep/glue/prepare.py --tokens-of "
            "the data of pre-training"
        )
