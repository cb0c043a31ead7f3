"""One run: train it through fairseq-hydra-train, evaluate it, write its run file.

:class:`TrainingRun` is the same for every family of models; a family says which configurations it
has and how a trained model is measured.

A run is finished when its run file validates, not when a folder exists. Everything else in the
run folder (checkpoints, logs) is work that a second call takes up where the first one stopped.
"""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from omegaconf import OmegaConf

from lrpe_fairseq.experiments.data.corpus import write_json
from lrpe_fairseq.experiments.records import checkpoints, fairseq_log
from lrpe_fairseq.experiments.records.runs import Run, environment, plain, read_run, write_run
from lrpe_fairseq.experiments.runner import processes
from lrpe_fairseq.experiments.runner.processes import ChildFailed, Children

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = ROOT / "configs"
BIN = Path(sys.executable).parent
PREPARE = {  # data folder -> what fills it
    "pydoc": "data-prep/pydoc/prepare.py",
    "wikitext-2-bpe": "data-prep/wikitext/prepare.py wikitext-2 --level bpe",
    "multi30k": "data-prep/multi30k/prepare.py",
    "newstest": "data-prep/newstest/prepare.py",
    "wmt14-en-de": "data-prep/wmt14-en-de/prepare.py",
    "wikitext-103-gpt2": "data-prep/wikitext/prepare.py wikitext-103 --level gpt2",
    "wikitext-103-word": "data-prep/wikitext/prepare.py wikitext-103 --level word",
}
DECIDING = ("task", "model", "criterion", "optimizer", "lr_scheduler", "optimization")
INCIDENTAL = {"data", "update-freq"}  # where the data lies; how many processes share an update


class RunFailed(Exception):
    """A training or an evaluation ended with an error; the text is its last line."""


@dataclass(frozen=True)
class Devices:
    """What one run may use: CPU threads, GPUs by index (all of them if None), and Slurm nodes that
    are all like this one."""

    threads: int = 1
    gpus: tuple[int, ...] | None = None
    nodes: int = 1

    @property
    def processes(self) -> int:
        """How many processes fairseq will start: one for each GPU."""
        visible = torch.cuda.device_count()
        mine = visible if self.gpus is None else min(visible, len(self.gpus))
        return max(1, mine) * self.nodes

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for the child processes.

        Threads that wait do not spin: beside other work that makes a training of two threads
        several times slower, and on an idle machine it gains nothing.
        """
        found = {"OMP_NUM_THREADS": str(self.threads), "PYTHONUNBUFFERED": "1"}
        found["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "passive")
        if self.gpus is not None:
            found["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.gpus))
        return found

    def launch(self, command: list[str]) -> list[str]:
        """``command``, a training, on every node.

        fairseq forms the group of GPUs by Slurm's variables; it counts no processes without a
        GPU, so that those are told their ranks.
        """
        if self.nodes == 1:
            return command
        port = 20000 + int(os.environ.get("SLURM_JOB_ID", "0")) % 20000
        group: dict[str, Any] = {"distributed_world_size": self.processes}
        if torch.cuda.is_available():
            group["distributed_port"] = port
        else:
            group |= {
                "distributed_init_method": f"tcp://{socket.gethostname()}:{port}",
                "distributed_no_spawn": True,
                "distributed_backend": "gloo",
                "ddp_backend": "legacy_ddp",
            }
            ranked = 'exec "$@" ++distributed_training.distributed_rank=$SLURM_PROCID'
            command = ["bash", "-c", ranked, "rank", *command]
        return [
            *("srun", f"--nodes={self.nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1"),
            *command,
            *(f"++distributed_training.{key}={value}" for key, value in group.items()),
        ]


@dataclass(frozen=True)
class TrainingRun(ABC):
    """One model to train and evaluate.

    config: a file of configs/<family>, without its ending. data: a folder of data-prep (``bin``,
    ``manifest.json``). overrides: ``section.key=value``, applied after everything else. folder:
    where it works. result: its run file. evaluations: (split, protocol) pairs to measure.
    """

    family: ClassVar[str]
    """The folder of configs/ that holds the configurations."""

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
    evaluations: tuple[tuple[str, str], ...] = ()

    @abstractmethod
    def measure(self, children: Children, devices: Devices, lock: int) -> Run:
        """Evaluate the trained model: the fields ``metrics`` and ``protocol`` of the run file.

        Raises: RunFailed, Stopped.
        """

    def encoding_choices(self) -> dict[str, str]:
        """What the attention and encoding of the run are called in fairseq's configuration."""
        return {
            "model.attention_type": self.attention_type,
            "model.position_encoding": self.position_encoding,
            "model.encoding_seed": str(self.seed),
        }

    @property
    def name(self) -> str:
        """How the run is called on the screen."""
        return f"{self.experiment}/{self.folder.name}"

    @property
    def log(self) -> Path:
        """What training prints."""
        return self.folder / "train.log"

    @property
    def checkpoints(self) -> Path:
        """Where training saves."""
        return self.folder / "checkpoints"

    def yaml(self) -> Any:
        """The YAML as it is. Raises: ValueError if there is no such YAML."""
        folder = CONFIGS / self.family
        path = folder / f"{self.config}.yaml"
        if not path.exists():
            known = ", ".join(sorted(found.stem for found in folder.glob("*.yaml")))
            raise ValueError(f"configs/{self.family} has no {self.config}.yaml; it has {known}")
        return OmegaConf.load(path)

    def settings(self) -> Any:
        """The YAML with this run's overrides. Raises: ValueError if there is no such YAML."""
        chosen = OmegaConf.from_dotlist([f"{k}={v}" for k, v in self._chosen().items()])
        return OmegaConf.merge(self.yaml(), chosen)

    def max_update(self) -> int:
        """The number of updates after which the run ends."""
        return int(self.settings().optimization.max_update)

    def command(self, processes: int = 1) -> list[str]:
        """The training command for this many processes; the tokens of an update stay the same.

        Raises: ValueError if they cannot be shared out evenly.
        """
        chosen = self._chosen()
        if processes > 1:
            chosen["optimization.update_freq"] = f"[{_update_freq(self.settings(), processes)}]"
        return [
            str(BIN / "fairseq-hydra-train"),
            *("--config-dir", str(CONFIGS / self.family), "--config-name", self.config),
            *(_override(key, value) for key, value in chosen.items()),
        ]

    def finished(self) -> bool:
        """Whether the run file is there, valid, and of the settings that the run has now."""
        try:
            return not self.differences(read_run(self.result)["config"])
        except (OSError, ValueError):
            return False

    def differences(self, config: dict[str, Any]) -> set[str]:
        """The options of a training, as in a run file, that decide the result and differ here."""
        settings = OmegaConf.to_container(self.settings())
        wanted = checkpoints.named({section: settings[section] for section in DECIDING})
        wanted |= {"seed": self.seed, **_batch(settings["dataset"])}
        return {
            name
            for name in set(wanted) - INCIDENTAL  # fairseq keeps "3000" of a YAML as 3000.0
            if plain(config.get(name, wanted[name])) != plain(wanted[name])
        }

    def progress(self) -> tuple[int, int]:
        """(updates done, updates in all)."""
        return fairseq_log.last_update(self.log), self.max_update()

    def outcome(self) -> str:
        """The first number of the run file, or the best so far and the training time left."""
        if self.finished():
            return _first_number(read_run(self.result)["metrics"])
        log = fairseq_log.read_training_log(self.log)
        best, left = log.best(), log.seconds_left(self.max_update())
        parts = [f"best valid ppl {best:.2f}" if best else "", f"ETA {clock(left)}" if left else ""]
        return ", ".join(filter(None, parts))

    def work(self, children: Children, devices: Devices, say: Callable[[str], None]) -> None:
        """Bring the run to its end: train what is missing, evaluate, write the run file.

        Raises: RunFailed, Stopped, or processes.Busy if another process is at it.
        """
        self.require_inputs()
        with processes.locked(self.folder) as lock:
            if not self.finished():
                self._train(children, devices, lock, say)
                measured = self.measure(children, devices, lock)
                write_run(self.result, self._record(measured, devices.threads))
                checkpoints.drop_intermediate(self.checkpoints)

    def require_inputs(self) -> None:
        """Raise RunFailed, with what helps, if something that the run reads is not there."""
        require_data(self.data)
        splits = manifest(self.data).get("splits", {})
        for split, _ in self.evaluations:
            if splits and split not in splits:
                raise RunFailed(
                    f"{relative(self.data)} has no split {split}, which is to be evaluated; it has "
                    f"{', '.join(splits)}"
                )

    def ready_to_resume(self, say: Callable[[str], None]) -> int:
        """The updates that a sound checkpoint of these settings has seen; others are removed."""
        seen = checkpoints.ready_to_resume(self.checkpoints, say)
        if not seen:
            return 0
        config = checkpoints.options(checkpoints.load(self.checkpoints / checkpoints.LAST))
        longer = {"max-update"} if seen <= self.max_update() else set()  # more of the same is fine
        changed = sorted(self.differences(config) - longer)
        if changed:
            checkpoints.remove_all(self.checkpoints)
            say(f"{', '.join(changed)} changed, so training starts over")
        return 0 if changed else seen

    def _chosen(self) -> dict[str, str]:
        chosen = {
            "task.data": relative(self.data / "bin"),
            **self.encoding_choices(),
            "common.seed": str(self.seed),
            "common.tensorboard_logdir": relative(self.folder / "tensorboard"),
            "checkpoint.save_dir": relative(self.checkpoints),
        }
        for override in self.overrides:
            key, equals, value = override.partition("=")
            if not equals or "." not in key:
                raise ValueError(f"an override is section.key=value, not {override!r}")
            chosen[key] = value
        return chosen

    def _train(
        self, children: Children, devices: Devices, lock: int, say: Callable[[str], None]
    ) -> None:
        seen = self.ready_to_resume(say)
        if seen >= self.max_update():
            return  # fairseq would train one update too many
        if not seen:
            self.log.unlink(missing_ok=True)
        command = devices.launch(self.command(devices.processes))
        (self.folder / "command.txt").write_text(shlex.join(command) + "\n", encoding="utf-8")
        memory = run_child(children, command, self.log, devices, lock)
        self._require_the_end()
        peak = max(round(memory, 1), self._usage().get("peak_memory_mb", 0))
        write_json(self.folder / "usage.json", {"peak_memory_mb": peak})

    def _require_the_end(self) -> None:
        seen = checkpoints.updates(checkpoints.load(self.checkpoints / checkpoints.LAST))
        if seen < self.max_update():
            raise RunFailed(f"training ended after {seen} of {self.max_update()} updates")

    def _usage(self) -> dict[str, float]:
        """What finished parts of the training used; empty if the runner died before the child."""
        path = self.folder / "usage.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def _record(self, measured: Run, threads: int) -> Run:
        best, last = (
            checkpoints.load(self.checkpoints / name)
            for name in (checkpoints.BEST, checkpoints.LAST)
        )
        log = fairseq_log.read_training_log(self.log)
        return {
            "experiment": self.experiment,
            "label": self.label,
            "scale": self.scale,
            "dataset": dataset_name(self.data),
            **described_by(best),
            **measured,
            "tokens_per_second": round(log.tokens_per_second(), 1),
            "wall_seconds": checkpoints.seconds(last),
            "curve": log.curve(),
            "threads": threads,
            **self._usage(),
            **environment(),
        }


def described_by(state: dict[str, Any]) -> Run:
    """The fields of a run file that a checkpoint knows by itself."""
    config = checkpoints.options(state)
    return {
        "task": config["task"],
        "attention_type": _sides(config, "attention-type"),
        "position_encoding": _sides(config, "position-encoding"),
        "seed": config["seed"],
        "config": config,
        "evaluated_update": checkpoints.updates(state),
    }


def _batch(dataset: dict[str, Any]) -> dict[str, Any]:
    """How much a process takes at once: tokens, or sentences."""
    known = [key for key in ("max_tokens", "batch_size") if key in dataset]
    return {key.replace("_", "-"): dataset[key] for key in known}


def _first_number(metrics: Run) -> str:
    """Such as ``valid blocks ppl 57.30``: perplexity where there is one."""
    split, protocols = next(iter(metrics.items()))
    protocol, measured = next(iter(protocols.items()))
    counts = ("examples", "sentences", "tokens")
    name = "ppl" if "ppl" in measured else next(key for key in measured if key not in counts)
    return f"{split} {protocol} {name} {measured[name]:.2f}"


def _sides(config: Run, option: str) -> str | dict[str, str]:
    """A name, or the names of encoder and decoder where the model has both."""
    if option in config:
        return config[option]
    return {side: config[f"{side}-{option}"] for side in ("encoder", "decoder")}


def manifest(data: Path) -> dict[str, Any]:
    """What data-prep wrote about a data folder; empty if it was made by other means."""
    path = data / "manifest.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def dataset_name(data: Path) -> str:
    """Corpus and level, such as ``wikitext-2-bpe``; the folder's name without a manifest."""
    known = manifest(data)
    return f"{known['corpus']}-{known['level']}" if "corpus" in known else data.name


def prepare_data(data: Path, source: Path | None = None) -> None:
    """Prepare ``data`` if it is not there: from the network, or from the files in ``source``.

    Raises: RunFailed if that fails or nothing is known to prepare it.
    """
    if _prepared(data):
        return
    command = _preparation(data)
    if not command:
        require_data(data)
    script = [sys.executable, *command, *(["--from", str(source)] if source else [])]
    print(shlex.join(script), flush=True)
    if subprocess.run(script, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}).returncode:
        raise RunFailed(f"{relative(data)} could not be prepared")


def require_data(data: Path) -> None:
    """Raise RunFailed, with the command that helps, if ``data`` is not prepared."""
    if not _prepared(data):
        command = _preparation(data)
        how = f"run .venv/bin/python {shlex.join(command)}" if command else "prepare it"
        raise RunFailed(f"{relative(data)} is not there: {how}")


def _preparation(data: Path) -> list[str]:
    """The script that prepares a folder, and its arguments; empty if none is known."""
    home, pieces = data.parent, data.parent.name.removeprefix("glue-")
    if pieces != home.name:  # data/glue-<what the model was pre-trained on>/<task>
        script = f"data-prep/glue/prepare.py {data.name} --tokens-of"
        return [*script.split(), relative(home.parent / pieces), "--dest", relative(home)]
    known = PREPARE.get(data.name)
    return [*known.split(), "--dest", relative(data)] if known else []


def _prepared(data: Path) -> bool:
    return any((data / "bin").rglob("dict*.txt"))


def run_child(
    children: Children, command: list[str], log: Path, devices: Devices, lock: int | None
) -> float:
    """Run one command from the repository's root and return its peak memory in MB.

    Raises: Stopped; RunFailed with the last line it printed.
    """
    try:
        return children.run(command, log, cwd=ROOT, environment=devices.environment, lock=lock)
    except ChildFailed as error:
        raise RunFailed(f"{fairseq_log.last_line(log)} ({error}, {relative(log)})") from None


def clock(seconds: float) -> str:
    """h:mm:ss."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"


def _update_freq(settings: Any, processes: int) -> int:
    """Gradient accumulation that leaves the tokens of an update as the YAML has them."""
    frequency = settings.optimization.update_freq[0]
    if frequency % processes:
        raise ValueError(
            f"{frequency} batches of {settings.dataset.max_tokens} tokens cannot be shared by "
            f"{processes} processes: use another number of GPUs, or set dataset.max_tokens and "
            "optimization.update_freq so that their product stays"
        )
    return frequency // processes


def _override(key: str, value: str) -> str:
    """``++key=value`` in hydra's grammar: sets the key whether or not the YAML has it."""
    if re.fullmatch(r"[\w./:+-]+|\[[\w.,+-]*\]", value):
        return f"++{key}={value}"
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"++{key}='{escaped}'"


def relative(path: Path) -> str:
    """A path as seen from the repository's root, where every command runs."""
    absolute = path.absolute()
    return str(absolute.relative_to(ROOT) if absolute.is_relative_to(ROOT) else absolute)
