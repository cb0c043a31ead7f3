"""Submit the runs of a table as one Slurm job array: ``scripts/run_table.sh <table> --slurm``.

Each element of the array runs the same command with ``--array-task``, which skips, resumes and
retries runs as on one machine. An element that is preempted or out of time is requeued, and one
that fails or is killed three times; one that is canceled is not. A final job renders the tables
after all elements have ended.
"""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lrpe_fairseq.experiments.runner.processes import GRACE
from lrpe_fairseq.experiments.runner.training import TrainingRun

RESTARTS = 3
"""How often a failed run is requeued. Preemptions and time limits do not count."""

MARGIN = 10
"""Seconds before the time limit at which a training that has not saved is killed."""

ACCOUNTING = ("partition", "account", "qos")
"""Settings of every job, also of the one that renders the tables."""

RENDER = "from lrpe_fairseq.experiments import report; raise SystemExit(report.render({!r}))"
"""What a job runs after a table."""

JOB = """#!/usr/bin/env bash
set -uo pipefail
cd {root}
{setup}
export {variable}={grace}
failures={folder}/"$SLURM_ARRAY_JOB_ID-$SLURM_ARRAY_TASK_ID".failures
told=
trap 'told=USR1; kill -TERM $!' USR1  # before the time is up
trap 'told=TERM; kill -TERM $!' TERM  # preempted: Slurm requeues; canceled: nobody does
# By name: the table may change while the job waits.
runs=({runs})
{command} --array-task "${{runs[$SLURM_ARRAY_TASK_ID]}}" &
while kill -0 $! 2>/dev/null; do wait $!; done
wait $!
status=$?
if [ $status -eq 0 ] || [ "$told" = TERM ]; then exit $status; fi
if [ "$told" != USR1 ]; then
  echo $status >> "$failures" || exit $status  # a full disk
fi
if [ ! -e "$failures" ] || [ "$(wc -l < "$failures")" -le {restarts} ]; then
  scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID" && exec sleep 600
fi
exit $status
"""


@dataclass(frozen=True)
class Site:
    """Settings of a cluster for sbatch: the keys of configs/slurm.yaml."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    nodes: int = 1
    gpus_per_node: int = 0
    cpus_per_process: int = 1
    mem: str | None = None
    running: int | None = None
    warning: int = 120
    sbatch: list[str] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)

    def named(self, *names: str) -> list[str]:
        """Return the options of sbatch for those of these settings that are set."""
        return [f"--{n.replace('_', '-')}={getattr(self, n)}" for n in names if getattr(self, n)]

    def options(self) -> list[str]:
        """Return the options of sbatch for one run."""
        words = self.named(*ACCOUNTING, "time", "nodes", "mem")
        # Slurm's task is a node's part of the training, which starts a process for each GPU.
        words.append(f"--cpus-per-task={self.cpus_per_process * max(1, self.gpus_per_node)}")
        if self.gpus_per_node:
            words.append(f"--gpus-per-node={self.gpus_per_node}")
        return [*words, "--ntasks-per-node=1", *self.sbatch]


def load_site(path: Path, chosen: Mapping[str, Any]) -> Site:
    """Return the settings of ``path``, replaced by those of ``chosen`` that are not None.

    A single string for ``setup`` is one shell line; for ``sbatch`` it is split as by a shell.

    Raises: ValueError for malformed YAML, an unknown key or a value of the wrong type.
    """
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        # The command line comes before the file.
        settings |= {key: value for key, value in chosen.items() if value is not None}
        Site(**settings)
    except (TypeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is not as configs/slurm.yaml: {error}") from None
    for name, split in (("setup", lambda line: [line]), ("sbatch", shlex.split)):
        if isinstance(settings.get(name), str):
            settings[name] = split(settings[name])
    _check_types(path, settings)
    return Site(**settings)


def _check_types(path: Path, settings: Mapping[str, Any]) -> None:
    """Raise ValueError for a value that sbatch would misread."""
    if not isinstance(settings.get("time", ""), str | None):
        raise ValueError(
            f'{path}: write time in quotes, such as "24:00:00": YAML reads it as the number '
            f"{settings['time']}"
        )
    for name in ("nodes", "cpus_per_process", "warning"):
        # bool is an int, and YAML reads "yes" as one.
        if type(settings.get(name, 1)) is not int or settings.get(name, 1) < 1:
            raise ValueError(f"{path}: {name} must be an integer from 1 on, not {settings[name]!r}")
    for name in ("setup", "sbatch"):
        if not isinstance(settings.get(name, []), list):
            raise ValueError(f"{path}: {name} must be a list of strings, not {settings[name]!r}")


def require_sbatch() -> None:
    """Raise ValueError if there is no sbatch."""
    if not shutil.which("sbatch"):
        raise ValueError("there is no sbatch here: --slurm needs a Slurm cluster")


class Plan(NamedTuple):
    """What is sent to Slurm: an array of runs, and a job that renders the tables after it."""

    script: Path
    text: str  # of the script, which every element runs
    array: list[str]  # options of sbatch
    render: list[str]  # of the later job, without its dependency

    def __str__(self) -> str:
        """The two calls of sbatch, and the script."""
        first = shlex.join(["sbatch", *self.array, str(self.script)])
        then = shlex.join(["sbatch", "--dependency=afterany:JOB", *self.render])
        return f"{first}\n{then}  # JOB: the id of the array\n\n# {self.script}\n{self.text}"


def planned(
    root: Path,
    table: str,
    arguments: Sequence[str],
    runs: Mapping[int, str],
    site: Site,
    command: str = "run_table",
) -> Plan:
    """Return an array of the elements ``runs``, and the job that renders the tables after it.

    arguments: those of ``command``, without the ones for Slurm. runs: names by number of the
    element. Nothing is written.
    """
    folder = root / "runs" / table / "slurm"
    # The same Python: a job has no activated environment.
    runner = [sys.executable, "-m", "lrpe_fairseq.experiments", command, *arguments]
    at_most = f"%{site.running}" if site.running else ""
    array = [
        f"--array={','.join(map(str, runs))}{at_most}",
        # A requeued element continues its log.
        *("--requeue", "--open-mode=append", f"--signal=B:USR1@{site.warning}"),
        *(f"--job-name=lrpe-{table}", f"--output={folder}/%a.log"),
        *site.options(),
    ]
    render = shlex.join([sys.executable, "-c", RENDER.format(table)])
    where = [f"--chdir={root}", f"--output={folder}/tables.log"]
    after = [f"--job-name=lrpe-{table}-tables", *where, *site.named(*ACCOUNTING)]
    text = job_script(root, folder, runner, runs, site)
    return Plan(folder / "job.sh", text, array, [*after, f"--wrap={render}"])


def unfinished(runs: Sequence[TrainingRun]) -> dict[int, str]:
    """Return the names of the runs to submit, by their number among all ``runs``."""
    return {number: run.name for number, run in enumerate(runs) if not run.finished()}


def element(runs: Sequence[TrainingRun], name: str) -> TrainingRun:
    """Return the run of an element. Raises: ValueError if no run has this name."""
    for run in runs:
        if run.name == name:
            return run
    raise ValueError(
        f"there is no run {name} any more: the table has changed since the job was submitted; "
        "submit it again"
    )


def submit(plan: Plan) -> str:
    """Submit a plan; return the array's job id.

    Raises: ValueError with sbatch's message if it fails.
    """
    require_sbatch()
    plan.script.parent.mkdir(parents=True, exist_ok=True)
    plan.script.write_text(plan.text, encoding="utf-8")
    job = _sbatch([*plan.array, str(plan.script)])
    try:
        _sbatch([f"--dependency=afterany:{job}", *plan.render])
    except ValueError as error:
        raise ValueError(
            f"job array {job} was submitted, but not the job that renders the tables after it "
            f"({error}): run make tables when the array has ended"
        ) from None
    return job


def job_script(
    root: Path, folder: Path, command: Sequence[str], runs: Mapping[int, str], site: Site
) -> str:
    """Return the batch script of the elements ``runs``, which counts failures in ``folder``."""
    return JOB.format(
        runs=" ".join(f"[{number}]={shlex.quote(name)}" for number, name in runs.items()),
        root=shlex.quote(str(root)),
        folder=shlex.quote(str(folder)),
        setup="\n".join(site.setup),
        command=shlex.join(command),
        restarts=RESTARTS,
        variable=GRACE,
        # Ended before Slurm sends SIGKILL to all processes at once.
        grace=max(MARGIN, site.warning - MARGIN),
    )


def _sbatch(options: Sequence[str]) -> str:
    """Call sbatch and return the job id. Raises: ValueError with the last line that it printed."""
    done = subprocess.run(["sbatch", "--parsable", *options], capture_output=True, text=True)
    # With several clusters sbatch prints "id;cluster".
    job = done.stdout.strip().partition(";")[0]
    if done.returncode:
        reason = done.stderr.strip().splitlines() or ["it printed no reason"]
        raise ValueError(f"sbatch failed with status {done.returncode}: {reason[-1]}")
    # A wrapper of sbatch may print a banner; the dependency would then be wrong.
    if not job.isdigit():
        raise ValueError(f"sbatch printed no job id, but {done.stdout.strip()!r}")
    return job
