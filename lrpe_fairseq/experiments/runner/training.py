"""One run: train it with fairseq-hydra-train, evaluate it, write its run file.

:class:`TrainingRun` is the base class of all families of experiments; a family declares its
configurations, the scripts that prepare its data, and the evaluation of a trained model.

A run is finished if its run file is valid and has the current settings and every evaluation; an
existing folder is not enough. The next call resumes from the checkpoints in the run folder. A run
file that only lacks evaluations gets them from the checkpoint, without training.
"""

import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from omegaconf import OmegaConf

from lrpe_fairseq.experiments.data import folders
from lrpe_fairseq.experiments.records import (
    checkpoints,
    fairseq_log,
    precision,
    provenance,
    runs,
)
from lrpe_fairseq.experiments.records.bases import BaseError
from lrpe_fairseq.experiments.records.files import CONFIGS, ROOT, first_shard, load_config, relative
from lrpe_fairseq.experiments.records.keys import RATE, WORLD, Cell
from lrpe_fairseq.experiments.records.machine import environment, machine
from lrpe_fairseq.experiments.records.runs import Evaluations, Run, read_run, write_run
from lrpe_fairseq.experiments.records.tables import Table
from lrpe_fairseq.experiments.runner import branches, identity, processes
from lrpe_fairseq.experiments.runner import devices as device_rules
from lrpe_fairseq.experiments.runner.devices import BIN, Devices
from lrpe_fairseq.experiments.runner.processes import Children, Diverged, RunFailed, Shell

Say = Callable[[str], None]
LOG_FORMAT = "common.log_format"


@dataclass(frozen=True)
class TrainingRun(ABC):
    """One model to train and evaluate; a family of experiments is a subclass.

    config: a file of configs/<configs>, without its ending. data: a folder of data-prep (``bin``,
    ``manifest.json``). overrides: ``section.key=value``, applied after everything else. folder:
    of checkpoints and logs. result: the run file. evaluations: (split, protocol) pairs to measure.
    """

    configs: ClassVar[str]
    """The folder under configs/ with the family's configurations."""
    task: ClassVar[str] = ""
    """fairseq's task, if two families share a folder of configurations."""
    data_scripts: ClassVar[Mapping[str, str]] = {}
    """Name of a data folder -> the script that makes it, with arguments."""
    curve: ClassVar[str] = "valid_ppl"
    """The metric of every validation that the run file keeps as a curve."""
    next_step: ClassVar[str] = "evaluate with: scripts/run_table.sh {table} --scale {scale}"
    """Text printed after a training; may contain {best}, {data}, {table} and {scale}."""
    data_name: ClassVar[str] = ""
    """Data folder of a column's data set; may contain {dataset} and {scale}. Empty: of the YAML."""
    run_name: ClassVar[str] = "{scale}-{cell}-seed{seed}"
    """Name of a run; may contain {dataset}, {data} and, to train with every rate, {lr}."""
    always: ClassVar[Evaluations] = ()
    """Evaluations of every run of a table, beside those that its columns show."""

    experiment: str
    label: str
    config: str
    data: Path
    attention_type: str
    position_encoding: str
    seed: int
    scale: str
    folder: Path
    result: Path
    overrides: tuple[str, ...] = ()
    evaluations: Evaluations = ()

    @abstractmethod
    def measure(self, run: Shell) -> Run:
        """Evaluate the trained model; return ``metrics`` and ``protocol`` of the run file.

        run: starts an evaluation, on the devices of the training. Raises: RunFailed, Stopped.
        """

    # Methods that a family may override.

    @classmethod
    def of_cell(
        cls, table: Table, cell: Cell, scale: str, config: Path, seed: int
    ) -> "list[TrainingRun]":
        """Return the runs of a cell of ``table``: one, unless the family searches a rate."""
        yaml = load_config(config)
        data = ROOT / folders.data_home(yaml.task.data)
        if cls.data_name and cell.dataset:
            base, _ = precision.parted(scale)
            data = ROOT / "data" / cls.data_name.format(dataset=cell.dataset, scale=base)
        # One run without a rate in its name, unless the family searches rates.
        rates: list[float | None] = [None]
        if "{lr}" in cls.run_name:
            rates = table.rates_at(scale, cell.rates) or list(yaml.optimization.lr)
        made = []
        pattern = cls.run_name if cell.dataset else cls.run_name.replace("{dataset}-", "")
        known = {"scale": scale, "cell": cell.name, "dataset": cell.dataset, "seed": seed}
        for rate in rates:
            lr = f"{rate:g}" if rate else ""
            name = pattern.format(**known, data=data.name, lr=lr)
            of_rate = (f"{RATE}=[{lr}]",) if lr else ()
            run = cls(
                experiment=table.name,
                label=cell.label,
                config=config.stem,
                data=data,
                attention_type=cell.attention,
                position_encoding=cell.encoding,
                seed=seed,
                scale=scale,
                folder=ROOT / "runs" / table.name / name,
                result=ROOT / "results" / "runs" / table.name / f"{name}.json",
                overrides=(
                    *of_rate,
                    *cls._overrides(cell, yaml),
                    *precision.overrides(scale, yaml),
                ),
                evaluations=tuple(dict.fromkeys([*cls.always, *cell.evaluations])),
                **cls.fields_of(table),
            )
            made.append(run)
        return made

    @classmethod
    def _overrides(cls, cell: Cell, yaml: Any) -> tuple[str, ...]:
        """Return the cell's other options that the YAML contradicts, then the cell's changes."""

        def words(options: Iterable[tuple[str, str]]) -> list[str]:
            return [_override(key, value) for name, value in options for key in cls.keys_of(name)]

        # Usual values are set only where the YAML has others: commands stay short.
        usual = [pair for pair in cell.options if pair not in cell.changed]
        contradicted = [word for word in words(usual) if _contradicts(word, yaml)]
        return (*contradicted, *words(cell.changed))

    @classmethod
    def keys_of(cls, option: str) -> list[str]:
        """Return fairseq's keys that an option of a table sets."""
        return [option]

    @classmethod
    def fields_of(cls, table: Table) -> dict[str, Any]:
        """Return the family's own fields that depend on the table."""
        return {}

    @classmethod
    def preparation_of(cls, data: Path) -> list[str]:
        """Return the script that prepares ``data``, with arguments; empty if none is known."""
        known = cls.data_scripts.get(data.name)
        return [*known.split(), "--dest", relative(data)] if known else []

    def encoding_choices(self) -> dict[str, str]:
        """Return attention type and encoding of the run as keys of fairseq's configuration."""
        return {
            "model.attention_type": self.attention_type,
            "model.position_encoding": self.position_encoding,
            "model.encoding_seed": str(self.seed),
        }

    def require_inputs(self) -> None:
        """Raise UserError, which says what to do, if an input of the run is missing."""
        folders.require(self.data, self.preparation_of(self.data))
        folders.require_splits(self.data, [split for split, _ in self.evaluations])

    # fairseq-validate, for families that use it.

    def validation(self, task: str, splits: str, *options: str) -> list[str]:
        """Return fairseq-validate of the best checkpoint on ``splits``, separated by commas."""
        return [
            str(BIN / "fairseq-validate"),
            relative(first_shard(self.data)),
            *("--user-dir", "lrpe_fairseq"),
            *("--task", task),
            *("--path", relative(self.checkpoints / checkpoints.BEST)),
            *("--valid-subset", splits),
            *options,
            *("--num-workers", "0"),
            *("--log-format", "json"),
        ]

    # Names, folders and configuration.

    @property
    def name(self) -> str:
        """Name of the run on the screen."""
        return f"{self.experiment}/{self.folder.name}"

    @property
    def log(self) -> Path:
        """The training log."""
        return self.folder / "train.log"

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.folder / "checkpoints"

    def yaml(self) -> Any:
        """Return the YAML without overrides. Raises: ValueError if it does not exist."""
        return load_config(CONFIGS / self.configs / f"{self.config}.yaml")

    def settings(self) -> Any:
        """Return the YAML with this run's overrides. Raises: ValueError if it does not exist."""
        chosen = OmegaConf.from_dotlist([f"{k}={v}" for k, v in self.chosen().items()])
        return OmegaConf.merge(self.yaml(), chosen)

    def chosen(self) -> dict[str, str]:
        """Return every key of fairseq's configuration that the run sets."""
        return {
            "task.data": self._path_of_data(),
            **self.encoding_choices(),
            "common.seed": str(self.seed),
            "common.tensorboard_logdir": relative(self.folder / "tensorboard"),
            **self._log_format(),
            "checkpoint.save_dir": relative(self.checkpoints),
            **device_rules.parse_overrides(self.overrides),
        }

    def _log_format(self) -> dict[str, str]:
        """Return what makes the training log JSON; empty if the YAML does."""
        stated = OmegaConf.select(self.yaml(), LOG_FORMAT)
        return {} if stated == "json" else {LOG_FORMAT: "json"}

    def _path_of_data(self) -> str:
        """Return fairseq's path of the data; while they are not prepared, that of the YAML."""
        if not folders.is_prepared(self.data):
            planned = self.yaml().task.data
            if ROOT / folders.data_home(planned) == self.data:
                return planned
        return folders.joined_shards(self.data)

    def max_update(self) -> int:
        """Return the number of updates of the whole run."""
        return int(self.settings().optimization.max_update)

    def command(self, processes: int = 1) -> list[str]:
        """Return the training command for this many processes, with updates of the same size.

        Raises: ValueError if the processes cannot have equal parts of an update.
        """
        chosen = self.chosen()
        if processes > 1:
            chosen |= device_rules.divided(self.settings(), processes)
        chosen[WORLD] = str(processes)  # fairseq's default is all GPUs
        return [
            str(BIN / "fairseq-hydra-train"),
            *("--config-dir", str(CONFIGS / self.configs), "--config-name", self.config),
            *(device_rules.hydra_override(key, value) for key, value in chosen.items()),
        ]

    def usable(self, devices: Devices, say: Say) -> Devices:
        """Return ``devices``, with fewer GPUs if an update cannot be divided equally among all."""
        settings = self.settings()
        able = (part for part in devices.parts() if device_rules.division(settings, part.processes))
        part = next(able, devices)
        if part != devices:
            say(
                f"{devices.processes} GPUs cannot have equal parts of "
                f"{device_rules.described(settings)}, so {part.processes} of them are used"
            )
        return part

    def equal_parts(self, processes: int) -> int:
        """Return how many of the processes of a machine can have equal parts of an update."""
        settings = self.settings()
        able = (n for n in range(processes, 1, -1) if device_rules.division(settings, n))
        return next(able, 1)

    def divided(self, processes: int) -> str:
        """Return in words how processes share an update, as :meth:`usable` chooses them."""
        settings, count = self.settings(), self.equal_parts(processes)
        parts = device_rules.divided(settings, count) if count > 1 else {}
        parts = parts or {"optimization.update_freq": str(list(settings.optimization.update_freq))}
        said = ", ".join(f"{key.partition('.')[2]} {value}" for key, value in parts.items())
        return f"{count} of {processes} processes, world size {count}, {said}"

    def prepare_data(self, source: Path | None = None) -> None:
        """Prepare the data if they are missing, from ``source`` or the network."""
        folders.prepare(self.data, self.preparation_of(self.data), source)

    # Progress.

    def finished(self) -> bool:
        """True if the run file is valid, has the current settings and every evaluation."""
        known = self.recorded()
        return known is not None and not self.missing(known)

    def recorded(self) -> Run | None:
        """Return the run file if it is valid and has the current settings and data.

        Raises: BaseError if the base of the run file is missing or another one.
        """
        try:
            run = read_run(self.result)
        except BaseError:
            # The run is finished; trained again, its base would be lost for all others.
            raise
        # A damaged run file is written again from the checkpoint.
        except (OSError, ValueError):
            return None
        # A run file of other settings or data counts as missing, and is replaced.
        return None if self.differences(run["config"]) or self.other_data(run) else run

    def missing(self, run: Run) -> Evaluations:
        """Return the evaluations that the run file ``run`` lacks."""
        metrics = run["metrics"]
        return tuple(pair for pair in self.evaluations if pair[1] not in metrics.get(pair[0], {}))

    def differences(self, config: Mapping[str, Any]) -> set[str]:
        """Return the options that affect the result and differ from ``config`` of a run file."""
        return identity.differences(self.settings(), config)

    def splits(self) -> set[str]:
        """Return the splits that the run reads: training, validation and evaluation."""
        chosen = self.settings().dataset
        trained = chosen.get("train_subset") or "train"
        validated = chosen.get("valid_subset") or "valid"
        return {trained, *validated.split(","), *(split for split, _ in self.evaluations)}

    def data_checksums(self) -> folders.Checksums:
        """Return the checksums of the data of :meth:`splits`; empty if they are not prepared."""
        return folders.checksums(self.data, self.splits())

    def other_data(self, known: Run) -> list[str]:
        """Return the splits, or the dictionary, that are known to differ from ``known``."""
        return folders.changed(known.get("data", {}), self.data_checksums())

    def progress(self) -> tuple[int, int]:
        """Return (updates done, updates of the whole run)."""
        return fairseq_log.last_update(self.log), self._total_updates

    @cached_property
    def _total_updates(self) -> int:
        """:meth:`max_update`, which merges a whole configuration; lines of progress ask often."""
        return self.max_update()

    def outcome(self) -> str:
        """Return the first metric of the run file as text."""
        return runs.first_number(read_run(self.result)["metrics"])

    def ready_to_resume(self, say: Say) -> int:
        """Return the updates to resume from; checkpoints of other settings or data are deleted."""
        seen = checkpoints.ready_to_resume(self.checkpoints, say)
        if not seen:
            return 0
        config = checkpoints.options(checkpoints.load(self.checkpoints / checkpoints.LAST))
        allowed = seen <= self.max_update()  # a longer training is fine
        longer = {"optimization.max_update"} if allowed else set()
        if seen <= branches.common_updates(config, self.max_update()):
            longer = branches.LENGTH
        changed = sorted(self.differences(config) - longer)
        changed += [f"data ({part})" for part in self.other_data(provenance.usage(self.folder))]
        if changed:
            # They belong to another training; resuming them would mix two.
            checkpoints.remove(self.checkpoints)
            say(f"{', '.join(changed)} changed, so training starts over")
        return 0 if changed else seen

    # Training and evaluation.

    def work(self, children: Children, devices: Devices, say: Say) -> bool:
        """Train the remaining updates, evaluate, and write the run file.

        A finished training that lacks evaluations is only evaluated.

        Returns: False if there was nothing to do, because another process has finished the run.
        Raises: UserError, also for a finished training that lacks evaluations and its checkpoint;
            Stopped, or processes.Busy if another process trains this run.
        """
        self.require_inputs()
        with processes.locked(self.folder) as lock:
            run_here = shell(children, devices, lock)
            known = self.recorded()
            # Another process may have finished it while this one waited for the lock.
            if known and not self.missing(known):
                return False
            if known:
                self._complete(known, run_here, say)
                return True
            try:
                self.train(children, devices, lock, say)
            except Diverged as error:
                say(f"{error}; the run file says so")
                # A result, not an error: the page then says that the row diverged.
                measured = self.lost()
            else:
                checkpoints.require_best(self.checkpoints)
                measured = self.measure(run_here)
            write_run(self.result, self.record(measured, devices.threads))
            # After the run file: until then the training can be evaluated again.
            self._remove_periodic()
        return True

    def _remove_periodic(self) -> None:
        """Delete the periodic checkpoints, except those that other runs may go on from."""
        interval = branches.kept(self.settings())
        for updates, path in checkpoints.periodic(self.checkpoints).items():
            if not interval or updates % interval:
                path.unlink()

    def _complete(self, known: Run, run: Shell, say: Say) -> None:
        """Add the missing evaluations to the run file ``known``.

        Raises: RunFailed without the checkpoint of that training: published numbers are not
            replaced by those of another training unasked.
        """
        missing = self.missing(known)
        words = ", ".join(map(" ".join, missing))
        if not self._has_checkpoint_of(known):
            raise RunFailed(
                f"{relative(self.result)} lacks {words}, and {relative(self.checkpoints)} has no "
                "checkpoint of that training: to train it again, move the run file away"
            )
        say(f"evaluating {words}; nothing is trained")
        measured = replace(self, evaluations=missing).measure(run)
        checksums = self.data_checksums()
        write_run(self.result, runs.with_evaluations(known, measured, checksums, machine()))

    def _has_checkpoint_of(self, known: Run) -> bool:
        """True if the folder has the checkpoints of the training whose run file is ``known``."""
        try:
            paths = (self.checkpoints / name for name in (checkpoints.BEST, checkpoints.LAST))
            best, last = map(checkpoints.load_sound, paths)
        except ValueError:
            return False
        trained = checkpoints.updates(best), checkpoints.seconds(last)
        return trained == (known.get("evaluated_update"), known["wall_seconds"])

    def train(self, children: Children, devices: Devices, lock: int, say: Say) -> None:
        """Train until the last update, from the newest checkpoint if there is one.

        Raises: Diverged if the gradients of an update are not finite, RunFailed.
        """
        if self.begin(say) >= self.max_update():
            return  # fairseq would train one update too many
        devices = self.usable(devices, say)
        command = devices.launch(self.command(devices.processes))
        (self.folder / "command.txt").write_text(shlex.join(command) + "\n", encoding="utf-8")
        crash = self.checkpoints / checkpoints.CRASH
        # That of an earlier attempt would say that this one diverged.
        crash.unlink(missing_ok=True)
        try:
            children.run(command, self.log, environment=devices.environment, lock=lock)
        except RunFailed:
            if crash.exists() and fairseq_log.ended_not_finite(self.log):
                raise Diverged(
                    f"diverged after update {checkpoints.updates(checkpoints.load(crash)):,}: "
                    "gradients are not finite"
                ) from None
            raise
        seen = checkpoints.updates(checkpoints.load(self.checkpoints / checkpoints.LAST))
        if seen < self.max_update():
            raise RunFailed(f"training ended after {seen} of {self.max_update()} updates")

    def begin(self, say: Say) -> int:
        """Return the updates already done; if some are left, store the commit and the checksums.

        Raises: UserError if the data differ from their manifest.
        """
        folders.verify(self.data)
        # Own checkpoints first: they have more updates than a trunk that is shared.
        seen = self.ready_to_resume(say) or self.from_trunk(say)
        if seen < self.max_update():
            if not seen:
                self.log.unlink(missing_ok=True)
                checkpoints.remember_dictionaries(self.checkpoints, self.data)
            provenance.begin_part(self.folder, self.data_checksums(), resumed=seen > 0)
        return seen

    def from_trunk(self, say: Say) -> int:
        """Copy the newest checkpoint of another run that this one shares; return its updates.

        See :mod:`lrpe_fairseq.experiments.runner.branches`. 0: there is none.
        """
        if self.settings().lr_scheduler._name != branches.SCHEDULE:
            return 0
        for path, updates in branches.candidates(self.folder).items():
            try:
                if self._shares(path, updates):
                    branches.copy_trunk(path, self.folder, updates)
                    place = relative(path)
                    say(f"going on from {place}: until update {updates} it is this training")
                    return updates
            except (ValueError, OSError) as error:  # damaged, or removed meanwhile
                say(f"not going on from {relative(path)}: {error}")
        return 0

    def _shares(self, path: Path, updates: int) -> bool:
        """Return whether a checkpoint of another run is of this training, and its best so far."""
        state = checkpoints.load_sound(path)
        config = checkpoints.options(state)
        return (
            updates <= branches.common_updates(config, self.max_update())
            and self.differences(config) <= branches.LENGTH
            and branches.is_best(state)
            and not self.other_data(provenance.usage(path.parent.parent))
        )

    def lost(self) -> Run:
        """Return what :meth:`measure` returns, for a training that diverged."""
        crash = checkpoints.load(self.checkpoints / checkpoints.CRASH)
        return runs.diverged(checkpoints.updates(crash), self.evaluations)

    def record(self, measured: Run, threads: int) -> Run:
        """Return the run file; ``measured`` is the result of :meth:`measure` or :meth:`lost`.

        Raises: RunFailed if the data have changed since the start of the training.
        """
        # Data that were prepared again during the training: its first part read others.
        if changed := self.other_data(provenance.usage(self.folder)):
            raise RunFailed(
                f"{relative(self.data)} has changed since the training began ({', '.join(changed)})"
            )
        lost = "diverged_at" in measured
        # A training that diverged has no best checkpoint to describe.
        best = checkpoints.load(
            self.checkpoints / (checkpoints.CRASH if lost else checkpoints.BEST)
        )
        last = checkpoints.load(
            self.checkpoints / (checkpoints.CRASH if lost else checkpoints.LAST)
        )
        log = fairseq_log.read_training_log(self.log)
        logs = [self.log, *self.folder.glob("eval*.log")]
        optional = {
            "tokens_per_second": self._speed(log, None if lost else last),
            "million_parameters": fairseq_log.million_parameters(self.log),
        }
        return {
            "experiment": self.experiment,
            "label": self.label,
            "scale": self.scale,
            "dataset": folders.dataset_name(self.data),
            **runs.settings_of(checkpoints.options(best)),
            **({} if lost else {"evaluated_update": checkpoints.updates(best)}),
            **measured,
            "wall_seconds": checkpoints.seconds(last),
            "curve": log.curve(self.curve),
            "threads": threads,
            **{name: value for name, value in optional.items() if value is not None},
            "data": self.data_checksums(),
            **environment(logs, provenance.machines(self.folder)),
            **provenance.provenance(self.folder),
        }

    def _speed(self, log: fairseq_log.TrainingLog, last: Run | None) -> float | None:
        """Return the speed in the log, or else that in the last checkpoint; None without both.

        A training that diverged may have ended before the first line. A finished one may have
        logged without statistics (``common.log_format: none``), or its log was deleted.
        """
        if log.inner:
            return log.tokens_per_second()
        return None if last is None else checkpoints.speed(last)


def shell(children: Children, devices: Devices, lock: int | None = None) -> Shell:
    """Return what runs an evaluation as a child on ``devices``; it keeps ``lock`` open."""

    def run(command: list[str], log: Path) -> None:
        # An evaluation is read from its log, which must be of this call only.
        log.unlink(missing_ok=True)
        children.run(command, log, environment=devices.environment, lock=lock)

    return run


def _override(key: str, value: Any) -> str:
    """Return ``key=value`` in hydra's grammar; fairseq has a list of learning rates, by epoch."""
    value = f"[{value}]" if key == RATE and not isinstance(value, list) else value
    return f"{key}={str(value).lower() if isinstance(value, bool) else value}"


def _contradicts(override: str, yaml: Any) -> bool:
    """True if the YAML states another value of the key of ``section.key=value``."""
    key = override.partition("=")[0]
    stated = OmegaConf.select(yaml, key)
    return stated is not None and stated != OmegaConf.select(
        OmegaConf.from_dotlist([override]), key
    )
