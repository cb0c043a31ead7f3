"""fairseq's commands as a user types them, the checkpoints they leave, and models built from the
same options without starting a process.

:func:`run` forks a process that has fairseq imported already; :func:`run_here` calls the command in
this process; :func:`run_together` starts our launcher.
"""

import contextlib
import copy
import functools
import importlib
import io
import os
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
from fairseq import checkpoint_utils, options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask
from omegaconf import OmegaConf

import lrpe_fairseq
from lrpe_fairseq import safe_loading
from tests.end_to_end.forked import PATIENCE, run_forked

PLUGIN = Path(lrpe_fairseq.__file__).parent
LAUNCHER = Path(__file__).parents[2] / "scripts" / "train.sh"

TASK = f"--user-dir {shlex.quote(str(PLUGIN))} --task language_modeling --tokens-per-sample 32"
SMALL = (
    "--arch lrpe_lm_tiny --decoder-layers 2 --decoder-embed-dim 32 --decoder-input-dim 32 "
    "--decoder-output-dim 32 --decoder-ffn-embed-dim 64"
)


def small_transformer(layers: int = 1, width: int = 32, inner: int = 32) -> str:
    """Options of an encoder-decoder model with alike halves."""
    sizes = {"layers": layers, "embed-dim": width, "ffn-embed-dim": inner}
    halves = [f"--{half}-{k} {n}" for half in ("encoder", "decoder") for k, n in sizes.items()]
    return " ".join(["--arch lrpe_transformer_tiny", *halves])


TRAINING = (
    f"{TASK} --optimizer adam --lr 3e-3 --max-tokens 128 --required-batch-size-multiple 1 "
    "--num-workers 0 --cpu --no-epoch-checkpoints --log-format simple"
)

Result = TypeVar("Result")


@dataclass(frozen=True)
class Corpus:
    """A binarized corpus, and the text it was made from."""

    data: Path
    lines: dict[str, list[str]]

    def token_count(self, split: str) -> int:
        """Words of a split, and one end of sentence for each line."""
        return sum(len(line.split()) + 1 for line in self.lines[split])


def run(tool: str, *arguments: object, given: str = "") -> str:
    """Run a fairseq command in a forked process, and return what it wrote; it must succeed."""
    return _succeed(run_forked(tool, words(arguments), given=given))


def run_here(tool: str, *arguments: object, given: str = "") -> str:
    """As :func:`run`, but within this process: what it printed, without its log."""
    called = importlib.import_module(tool)
    output, typed = io.StringIO(), io.StringIO(given)
    with (
        mock.patch.object(sys, "argv", [tool, *words(arguments)]),
        mock.patch.object(sys, "stdin", typed),
        contextlib.redirect_stdout(output),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        called.cli_main()
    return output.getvalue()


def run_together(processes: int, *arguments: object) -> str:
    """Train in several processes that form one group, as our launcher starts them."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    given = {"env": environment(PROCS=str(processes), PATH=path), "timeout": PATIENCE}
    command = ["bash", str(LAUNCHER), *words(arguments)]
    return _succeed(subprocess.run(command, capture_output=True, text=True, check=False, **given))


def _succeed(ended: subprocess.CompletedProcess) -> str:
    assert ended.returncode == 0, f"{shlex.join(ended.args)}\n{ended.stdout}{ended.stderr}"
    return ended.stdout + ended.stderr


def words(arguments: Iterable[object]) -> list[str]:
    """The words of a command line."""
    return [
        word
        for argument in arguments
        for word in (shlex.split(argument) if isinstance(argument, str) else [str(argument)])
    ]


def user_dir(folder: Path, code: str) -> str:
    """The option for a plugin that does more than ours."""
    folder.mkdir()
    (folder / "__init__.py").write_text(code)
    return f"--user-dir {shlex.quote(str(folder))}"


def signalled(folder: Path, update: int, signal: str) -> str:
    """The option for a plugin that sends a signal to its own process in an update."""
    return user_dir(
        folder,
        f"""
import os, signal
import lrpe_fairseq.models
from fairseq.tasks.fairseq_task import FairseqTask
step, done = FairseqTask.train_step, []
def told(*given, **named):
    done.append(given)
    if len(done) == {update}:
        os.kill(os.getpid(), signal.{signal})
    return step(*given, **named)
FairseqTask.train_step = told
""",
    )


def assert_same(ours: Any, theirs: Any) -> None:
    """Dictionaries, lists and tensors are the same to the last bit."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def yaml_config(corpus: Corpus, save_dir: Path, model: dict[str, Any]) -> dict[str, Any]:
    """What a YAML says to train ``model``, a ``lrpe_lm_tiny``, as ``TRAINING`` says it."""
    return {
        "common": {"user_dir": str(PLUGIN), "cpu": True, "log_format": "simple"},
        "task": {"_name": "language_modeling", "data": str(corpus.data), "tokens_per_sample": 32},
        "criterion": "cross_entropy",
        "dataset": {"max_tokens": 128, "num_workers": 0, "required_batch_size_multiple": 1},
        "optimization": {"max_update": 2, "lr": [3e-3]},
        "optimizer": "adam",
        "lr_scheduler": "fixed",
        "checkpoint": {
            "save_dir": str(save_dir),
            "no_epoch_checkpoints": True,
            "save_interval_updates": 1,
        },
        "model": {"_name": "lrpe_lm_tiny", **model},
    }


def hydra(folder: Path, config: dict[str, Any]) -> list[object]:
    """Arguments by which ``fairseq-hydra-train`` reads ``config`` from a file in ``folder``."""
    folder.mkdir(exist_ok=True)
    OmegaConf.save(OmegaConf.create(config), folder / "experiment.yaml")
    run_dir = f"hydra.run.dir={folder / 'hydra'}"
    return ["--config-dir", folder, "--config-name experiment", shlex.quote(run_dir)]


def environment(**more: str) -> dict[str, str]:
    """This process's environment, the package importable and one thread for each process."""
    path = os.pathsep.join([str(PLUGIN.parent), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def side_by_side(*jobs: Callable[[], Result]) -> list[Result]:
    """Do ``jobs`` two at a time; their results in order."""
    return _pooled(2, jobs)


def at_once(*jobs: Callable[[], Result]) -> list[Result]:
    """Do all ``jobs`` at the same time, because they wait for each other."""
    return _pooled(len(jobs), jobs)


def _pooled(threads: int, jobs: Iterable[Callable[[], Result]]) -> list[Result]:
    with ThreadPoolExecutor(threads) as pool:
        return [future.result() for future in [pool.submit(job) for job in jobs]]


def saved(checkpoint: Path) -> dict[str, Any]:
    """A checkpoint as torch's safe loading reads it."""
    with safe_loading.allowed():
        return torch.load(checkpoint, weights_only=True)


def last_loss(checkpoint: Path) -> float:
    """Loss of the update before a checkpoint, with all its digits (the log has three)."""
    meters = saved(checkpoint)["extra_state"]["metrics"]["train"]
    return float({name: state for _, name, _, state in meters}["loss"]["val"])


def build(
    corpus: Corpus, *arguments: object, seed: int = 1
) -> tuple[BaseFairseqModel, FairseqTask, Any]:
    """Language model, task and configuration that ``fairseq-train`` makes of ``arguments``."""
    return built(corpus.data, TRAINING, *arguments, seed=seed)


def built(*arguments: object, seed: int = 1) -> tuple[BaseFairseqModel, FairseqTask, Any]:
    """Model, task and configuration that ``fairseq-train`` makes of its whole command line."""
    config = configured(*arguments)
    torch.manual_seed(seed)
    task = tasks.setup_task(config.task)
    return task.build_model(config.model), task, config


def configured(*arguments: object) -> Any:
    """Configuration that ``fairseq-train`` makes of its whole command line."""
    return copy.deepcopy(_configuration(tuple(words(arguments))))


@functools.cache
def _configuration(command_line: tuple[str, ...]) -> Any:
    """What fairseq reads from a command line; hydra takes a third of a second for it."""
    parser = options.get_training_parser()
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, list(command_line)))


def save(model: BaseFairseqModel, config: Any, checkpoint: Path) -> Path:
    """Write a checkpoint as a training would, without having trained; its path."""
    names = {"criterion_name": "", "optimizer_name": ""}
    history = {**names, "lr_scheduler_state": {}, "num_updates": 0}
    state = {
        "args": None,
        "cfg": OmegaConf.to_container(config, resolve=True, enum_to_str=True),
        "model": model.state_dict(),
        "optimizer_history": [history],
        "extra_state": {"train_iterator": {"epoch": 1}},
    }
    torch.save(state, checkpoint)
    return checkpoint


def load(checkpoint: Path) -> tuple[BaseFairseqModel, FairseqTask, Any]:
    """Model, task and configuration of a checkpoint, which alone names their options."""
    models, config, task = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)])
    return models[0].eval(), task, config
