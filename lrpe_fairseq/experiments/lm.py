"""One language-model run: train it through fairseq-hydra-train, evaluate it, write its run file.

A run is finished when its run file validates, not when a folder exists. Everything else in the
run folder (checkpoints, logs) is work that a second call takes up where the first one stopped.
"""

import json
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from lrpe_fairseq.experiments import checkpoints, fairseq_log, processes
from lrpe_fairseq.experiments.corpus import write_json
from lrpe_fairseq.experiments.processes import ChildFailed, Children
from lrpe_fairseq.experiments.runs import Run, environment, read_run, write_run

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs" / "lm"
BIN = Path(sys.executable).parent
PREPARE = {  # data folder -> what fills it
    "pydoc": "data-prep/pydoc/prepare.py",
    "wikitext-2-bpe": "data-prep/wikitext/prepare.py wikitext-2 --level bpe",
    "wikitext-103-word": "data-prep/wikitext/prepare.py wikitext-103 --level word",
}
DECIDING = ("task", "model", "criterion", "optimizer", "lr_scheduler", "optimization")
INCIDENTAL = {"data", "update-freq"}  # where the data lies; how many processes share an update
BLOCKS, SLIDING = "blocks", "sliding"
PLAIN_TASK = "language_modeling"
EVERYTHING = tuple((split, p) for split in ("valid", "test") for p in (BLOCKS, SLIDING))


class RunFailed(Exception):
    """A training or an evaluation ended with an error; the text is its last line."""


@dataclass(frozen=True)
class Devices:
    """What one run may use: CPU threads, and GPUs by index (all of them if None)."""

    threads: int = 1
    gpus: tuple[int, ...] | None = None

    @property
    def processes(self) -> int:
        """How many processes fairseq will start: one for each GPU."""
        visible = torch.cuda.device_count()
        return max(1, visible if self.gpus is None else min(visible, len(self.gpus)))

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for the child processes."""
        found = {"OMP_NUM_THREADS": str(self.threads), "PYTHONUNBUFFERED": "1"}
        if self.gpus is not None:
            found["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.gpus))
        return found


@dataclass(frozen=True)
class LMRun:
    """One language model to train and evaluate.

    config: a file of configs/lm, without its ending. data: a folder of data-prep (``bin``,
    ``manifest.json``). overrides: ``section.key=value``, applied after everything else. folder:
    where it works. result: its run file. evaluations: (split, protocol) pairs to measure.
    """

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
    evaluations: tuple[tuple[str, str], ...] = EVERYTHING

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

    def settings(self) -> Any:
        """The YAML with this run's overrides. Raises: ValueError if there is no such YAML."""
        path = CONFIGS / f"{self.config}.yaml"
        if not path.exists():
            known = ", ".join(sorted(found.stem for found in CONFIGS.glob("*.yaml")))
            raise ValueError(f"configs/lm has no {self.config}.yaml; it has {known}")
        chosen = OmegaConf.from_dotlist([f"{k}={v}" for k, v in self._chosen().items()])
        return OmegaConf.merge(OmegaConf.load(path), chosen)

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
            *("--config-dir", str(CONFIGS), "--config-name", self.config),
            *(_override(key, value) for key, value in chosen.items()),
        ]

    def evaluation_command(self, split: str, protocol: str) -> list[str]:
        """The fairseq-eval-lm command of one (split, protocol) pair."""
        settings = self.settings()
        tokens = int(settings.task.tokens_per_sample)
        return evaluation_command(
            self.checkpoints / checkpoints.BEST,
            self.data,
            split,
            tokens_per_sample=tokens,
            context_window=context_window(protocol, tokens),
            max_tokens=int(settings.dataset.max_tokens),
            task=settings.task._name if protocol == BLOCKS else PLAIN_TASK,
        )

    def finished(self) -> bool:
        """Whether the run file is there, valid, and of the settings that the run has now."""
        try:
            return not self.differences(read_run(self.result)["config"])
        except (OSError, ValueError):
            return False

    def differences(self, config: dict[str, Any]) -> set[str]:
        """The options of a training, as in a run file, that decide the result and differ here."""
        settings = OmegaConf.to_container(self.settings())
        wanted = {
            checkpoints.option_name(section, key): value
            for section in DECIDING
            for key, value in settings[section].items()
        }
        wanted |= {"seed": self.seed, "max-tokens": settings["dataset"]["max_tokens"]}
        return {n for n in set(wanted) - INCIDENTAL if config.get(n, wanted[n]) != wanted[n]}

    def progress(self) -> tuple[int, int]:
        """(updates done, updates in all)."""
        return fairseq_log.last_update(self.log), self.max_update()

    def work(self, children: Children, devices: Devices, say: Callable[[str], None]) -> None:
        """Bring the run to its end: train what is missing, evaluate, write the run file.

        Raises: RunFailed, Stopped, or processes.Busy if another process is at it.
        """
        require_data(self.data)
        with processes.locked(self.folder) as lock:
            if not self.finished():
                self._train(children, devices, lock, say)
                metrics = self._evaluate(children, devices, lock)
                write_run(self.result, self._record(metrics, devices.threads))
                checkpoints.drop_intermediate(self.checkpoints)

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
            "task.data": _relative(self.data / "bin"),
            "model.attention_type": self.attention_type,
            "model.position_encoding": self.position_encoding,
            "model.encoding_seed": str(self.seed),
            "common.seed": str(self.seed),
            "common.tensorboard_logdir": _relative(self.folder / "tensorboard"),
            "checkpoint.save_dir": _relative(self.checkpoints),
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
        command = self.command(devices.processes)
        (self.folder / "command.txt").write_text(shlex.join(command) + "\n", encoding="utf-8")
        memory = run_child(children, command, self.log, devices, lock)
        peak = max(round(memory, 1), self._usage().get("peak_memory_mb", 0))
        write_json(self.folder / "usage.json", {"peak_memory_mb": peak})

    def _usage(self) -> dict[str, float]:
        """What finished parts of the training used; empty if the runner died before the child."""
        path = self.folder / "usage.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def _evaluate(self, children: Children, devices: Devices, lock: int) -> Run:
        metrics: Run = {}
        for split, protocol in self.evaluations:
            log = self.folder / f"eval-{split}-{protocol}.log"
            log.unlink(missing_ok=True)
            run_child(children, self.evaluation_command(split, protocol), log, devices, lock)
            measured = read_evaluation(log, self.data, split)
            metrics.setdefault(split, {})[protocol] = measured
        return metrics

    def _record(self, metrics: Run, threads: int) -> Run:
        best, last = (
            checkpoints.load(self.checkpoints / name)
            for name in (checkpoints.BEST, checkpoints.LAST)
        )
        log = fairseq_log.read_training_log(self.log)
        tokens = int(self.settings().task.tokens_per_sample)
        return {
            "experiment": self.experiment,
            "label": self.label,
            "scale": self.scale,
            "dataset": dataset_name(self.data),
            **described_by(best),
            "metrics": metrics,
            "protocol": protocols(tokens, {protocol for _, protocol in self.evaluations}),
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
        "attention_type": config["attention-type"],
        "position_encoding": config["position-encoding"],
        "seed": config["seed"],
        "config": config,
        "evaluated_update": checkpoints.updates(state),
    }


def context_window(protocol: str, tokens_per_sample: int) -> int:
    """fairseq's --context-window for a protocol: none, or half of what the model sees at once."""
    return {BLOCKS: 0, SLIDING: tokens_per_sample // 2}[protocol]


def protocols(tokens_per_sample: int, names: set[str]) -> dict[str, str]:
    """One sentence for each protocol that was used."""
    half = tokens_per_sample // 2
    said = {
        BLOCKS: f"fairseq-eval-lm over non-overlapping blocks of {tokens_per_sample} tokens; a "
        "token sees what precedes it in its block, and a model's memory of earlier blocks.",
        SLIDING: f"fairseq-eval-lm --context-window {half}: windows of {tokens_per_sample} tokens "
        f"moved on by {tokens_per_sample - half}; a token sees at least the {half} before it.",
    }
    return {name: said[name] for name in sorted(names)}


def evaluation_command(
    checkpoint: Path,
    data: Path,
    split: str,
    *,
    tokens_per_sample: int,
    context_window: int,
    max_tokens: int,
    task: str = PLAIN_TASK,
) -> list[str]:
    """fairseq-eval-lm for a checkpoint. Without --tokens-per-sample it would skip everything.

    ``task``: the one that carries a memory from block to block, where the model has one.
    """
    return [
        str(BIN / "fairseq-eval-lm"),
        _relative(data / "bin"),
        *("--task", task),
        *("--user-dir", "lrpe_fairseq"),
        *("--path", _relative(checkpoint)),
        *("--gen-subset", split),
        *("--tokens-per-sample", str(tokens_per_sample)),
        *("--context-window", str(context_window)),
        *("--sample-break-mode", "none"),
        *("--max-tokens", str(max_tokens)),
        *("--num-workers", "0"),
        "--no-progress-bar",
    ]


def read_evaluation(log: Path, data: Path, split: str) -> dict[str, float]:
    """loss, ppl and tokens of a finished evaluation, and ``word_ppl`` where words were counted.

    Word perplexity spreads the same total log-probability over the words and line ends of the
    text, so that it does not depend on how the text was cut into pieces.

    Raises: RunFailed if nothing, or not the whole split, was evaluated.
    """
    try:
        measured = fairseq_log.parse_evaluation(log.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunFailed(f"{error} ({log})") from None
    counts = manifest(data).get("splits", {}).get(split, {})
    expected = counts.get("tokens", measured["tokens"])
    if measured["tokens"] != expected:
        raise RunFailed(f"{log}: {measured['tokens']} of {expected} tokens were evaluated")
    if "words_with_eos" in counts:
        bits = measured["loss"] * measured["tokens"] / counts["words_with_eos"]
        measured["word_ppl"] = 2**bits
    return measured


def manifest(data: Path) -> dict[str, Any]:
    """What data-prep wrote about a data folder; empty if it was made by other means."""
    path = data / "manifest.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def dataset_name(data: Path) -> str:
    """Corpus and level, such as ``wikitext-2-bpe``; the folder's name without a manifest."""
    known = manifest(data)
    return f"{known['corpus']}-{known['level']}" if "corpus" in known else data.name


def require_data(data: Path) -> None:
    """Raise RunFailed, with the command that helps, if ``data`` is not prepared."""
    if not (data / "bin" / "dict.txt").exists():
        script = PREPARE.get(data.name)
        how = f"run .venv/bin/python {script} --dest {_relative(data)}" if script else "prepare it"
        raise RunFailed(f"{_relative(data)} is not there: {how}")


def run_child(
    children: Children, command: list[str], log: Path, devices: Devices, lock: int | None
) -> float:
    """Run one command from the repository's root and return its peak memory in MB.

    Raises: Stopped; RunFailed with the last line it printed.
    """
    try:
        return children.run(command, log, cwd=ROOT, environment=devices.environment, lock=lock)
    except ChildFailed as error:
        raise RunFailed(f"{fairseq_log.last_line(log)} ({error}, {_relative(log)})") from None


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


def _relative(path: Path) -> str:
    """A path as seen from the repository's root, where every command runs."""
    absolute = path.absolute()
    return str(absolute.relative_to(ROOT) if absolute.is_relative_to(ROOT) else absolute)
