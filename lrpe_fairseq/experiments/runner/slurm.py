"""The runs of a table as one Slurm job array: ``scripts/run_table.sh <table> --slurm``.

Each element of the array is the same command with ``--array-task``, so that what is finished,
resumed or retried is decided as on one machine. An element that is preempted, out of time or
killed goes back into the queue, one that is cancelled does not, and a last job renders the tables
when all have ended.
"""

import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

RESTARTS = 3
"""How often a run that failed is put back; one that ran out of time always is."""

JOB = """#!/usr/bin/env bash
set -uo pipefail
cd {root}
{setup}
{command} --array-task "$SLURM_ARRAY_TASK_ID" &
runner=$!
told=
trap 'told=USR1; kill -TERM $runner' USR1  # before the time is up
trap 'told=TERM; kill -TERM $runner' TERM  # preempted: Slurm requeues; cancelled: nobody does
while kill -0 $runner 2>/dev/null; do wait $runner; done
wait $runner
status=$?
[ $status -eq 0 ] || [ "$told" = TERM ] && exit $status
if [ "$told" = USR1 ] || [ "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ]; then
  scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID" && exec sleep 600
fi
exit $status
"""


@dataclass(frozen=True)
class Site:
    """What sbatch is told about a cluster; the keys of configs/slurm.yaml."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    nodes: int = 1
    gpus_per_node: int = 0
    cpus_per_task: int = 1
    mem: str | None = None
    running: int | None = None
    warning: int = 120
    sbatch: list[str] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)

    def options(self) -> list[str]:
        """Options of sbatch for one run."""
        named = ("partition", "account", "qos", "time", "nodes", "cpus_per_task", "mem")
        found = [f"--{n.replace('_', '-')}={getattr(self, n)}" for n in named if getattr(self, n)]
        if self.gpus_per_node:
            found.append(f"--gpus-per-node={self.gpus_per_node}")
        return [*found, "--ntasks-per-node=1", *self.sbatch]


def load_site(path: Path, chosen: Mapping[str, Any]) -> Site:
    """The settings of ``path`` with those of ``chosen`` that are not None in their place.

    Raises: ValueError for a key that sbatch would not be told about.
    """
    settings = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    settings |= {key: value for key, value in chosen.items() if value is not None}
    unknown = sorted(set(settings) - {f.name for f in fields(Site)})
    if unknown:
        raise ValueError(f"{path} has no key {', '.join(unknown)}; see configs/slurm.yaml")
    return Site(**settings)


def submit(
    root: Path, table: str, arguments: Sequence[str], tasks: Sequence[int], site: Site
) -> str:
    """Submit one array with the elements ``tasks`` and the job that renders the tables after it.

    arguments: of run_table, without those that are about Slurm. Returns the array's job id.
    Raises: ValueError with what sbatch said where it refuses.
    """
    folder = root / "runs" / table / "slurm"
    folder.mkdir(parents=True, exist_ok=True)
    runner = [sys.executable, "-m", "lrpe_fairseq.experiments.commands.run_table", *arguments]
    script = folder / "job.sh"
    script.write_text(job_script(root, runner, site), encoding="utf-8")
    at_most = f"%{site.running}" if site.running else ""
    array = [
        f"--array={','.join(map(str, tasks))}{at_most}",
        *("--requeue", "--open-mode=append", f"--signal=B:USR1@{site.warning}"),
        *(f"--job-name=lrpe-{table}", f"--output={folder}/%a.log"),
        *site.options(),
    ]
    job = _sbatch([*array, str(script)])
    render = shlex.join([sys.executable, "-m", "lrpe_fairseq.experiments.report.tables"])
    after = [f"--dependency=afterany:{job}", f"--job-name=lrpe-{table}-tables"]
    where = [f"--chdir={root}", f"--output={folder}/tables.log"]
    partition = [f"--partition={site.partition}"] if site.partition else []
    _sbatch([*after, *where, *partition, f"--wrap={render}"])
    return job


def job_script(root: Path, command: Sequence[str], site: Site) -> str:
    """The batch script of one element."""
    return JOB.format(
        root=shlex.quote(str(root)),
        setup="\n".join(site.setup),
        command=shlex.join(command),
        restarts=RESTARTS,
    )


def _sbatch(options: Sequence[str]) -> str:
    """Call sbatch and return the job id."""
    try:
        done = subprocess.run(["sbatch", "--parsable", *options], capture_output=True, text=True)
    except FileNotFoundError:
        raise ValueError("there is no sbatch here: --slurm needs a Slurm cluster") from None
    if done.returncode:
        raise ValueError(f"sbatch refused: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout.strip().partition(";")[0]
