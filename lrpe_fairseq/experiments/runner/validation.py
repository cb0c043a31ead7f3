"""fairseq-validate with the best checkpoint of a run."""

from collections.abc import Callable
from pathlib import Path

from lrpe_fairseq.experiments.records import checkpoints, fairseq_log, shards
from lrpe_fairseq.experiments.records.files import relative
from lrpe_fairseq.experiments.records.runs import Run
from lrpe_fairseq.experiments.runner.devices import Devices
from lrpe_fairseq.experiments.runner.launch import BIN
from lrpe_fairseq.experiments.runner.processes import Children, RunFailed, run_child
from lrpe_fairseq.experiments.runner.training import TrainingRun

Read = Callable[[Path, str], dict[str, float]]
"""(log, split) -> metrics of the split."""


def command(run: TrainingRun, task: str, splits: str, *options: str) -> list[str]:
    """Return fairseq-validate on ``splits``, separated by commas, with more ``options``."""
    return [
        str(BIN / "fairseq-validate"),
        relative(shards.first(run.data)),
        *("--user-dir", "lrpe_fairseq"),
        *("--task", task),
        *("--path", relative(run.checkpoints / checkpoints.BEST)),
        *("--valid-subset", splits),
        *options,
        *("--num-workers", "0"),
        *("--log-format", "json"),
    ]


def measure(
    run: TrainingRun,
    validate: Callable[[str], list[str]],
    read: Read,
    children: Children,
    devices: Devices,
    lock: int,
) -> Run:
    """Return the ``metrics`` of every split of ``run.evaluations``, each in its own process.

    validate: split -> command. read: reads its output, a log in the folder of the run.
    """
    metrics: Run = {}
    for split, protocol in run.evaluations:
        log = run.folder / f"eval-{split}-{protocol}.log"
        log.unlink(missing_ok=True)
        run_child(children, validate(split), log, devices, lock)
        metrics.setdefault(split, {})[protocol] = read(log, split)
    return metrics


def parse(log: Path, split: str) -> dict[str, float]:
    """Return what fairseq-validate printed for a split.

    Raises: RunFailed if it printed nothing for it.
    """
    try:
        return fairseq_log.parse_validation(log.read_text(encoding="utf-8"), split)
    except ValueError as error:
        raise RunFailed(f"{error} ({log})") from None
