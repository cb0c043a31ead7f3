"""A whole table on a real Slurm of one node, which the test starts: an array whose elements are
preempted, killed and left alone by their node's daemon ends in the table of an undisturbed run."""

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from lrpe_fairseq.experiments import slurm
from lrpe_fairseq.experiments.training import ROOT
from tests.end_to_end.commands import Corpus
from tests.tiny_table import (
    assert_same_results,
    finished,
    log_of,
    processes,
    reached,
    repository,
    run_table,
    wait_until,
)

DAEMONS = ("munged", "slurmctld", "slurmd")
PATIENCE = 420  # seconds for the disturbed table
MISSING = [name for name in (*DAEMONS, "sbatch") if not shutil.which(name)]

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=2
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
NodeName={host} NodeAddr=127.0.0.1 CPUs=2
PartitionName=main Nodes=ALL Default=YES State=UP
"""


class Cluster:
    """One node, its controller and their authentication."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.alive = folder, {}
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        settings = {"host": socket.gethostname().split(".")[0], "ports": free_ports(2)}
        settings |= {"folder": self.folder, "user": getpass.getuser()}
        (self.folder / "slurm.conf").write_text(CONF.format(**settings))
        key = self.folder / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        files = {"key": key, "socket": self.folder / "munge.socket"}
        files |= {name: self.folder / f"munge.{name}" for name in ("pid", "log", "seed")}
        names = {"key": "key-file", "pid": "pid-file", "log": "log-file", "seed": "seed-file"}
        told = [f"--{names.get(name, name)}={path}" for name, path in files.items()]
        self.spawn("munged", "--foreground", "--force", *told)
        wait_until(files["socket"].exists, 10)
        self.spawn("slurmctld", "-D")
        self.spawn("slurmd", "-D")
        wait_until(lambda: "idle" in self.ask("sinfo", "-h"), 30)

    def spawn(self, daemon: str, *arguments: str) -> None:
        environment = {**os.environ, **self.environment}
        command = [daemon, *arguments]
        output = (self.folder / f"{daemon}.out").open("ab")
        self.alive[daemon] = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment
        )

    def ask(self, *command: str) -> str:
        environment = {**os.environ, **self.environment}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        return done.stdout

    def is_done(self, job: str) -> bool:
        """Whether no job is left; one that was requeued need not wait for its two minutes."""
        for number in range(4):
            self.ask("scontrol", "update", f"jobid={job}_{number}", "StartTime=now")
        return not self.ask("squeue", "-h")

    def stop(self) -> None:
        self.ask("scancel", "--user", getpass.getuser())
        wait_until(lambda: not self.ask("squeue", "-h"), 60)
        for daemon in reversed(DAEMONS):
            self.alive[daemon].terminate()
            self.alive[daemon].wait(30)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if MISSING or os.getuid():
        pytest.skip(f"needs root and {', '.join(MISSING) or 'nothing else'} (Debian: slurm-wlm)")
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)
    cluster = Cluster(folder)
    cluster.start()
    yield cluster
    cluster.stop()


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def test_a_disturbed_array_ends_in_the_table_of_an_undisturbed_run(
    cluster: Cluster,
    corpus: Corpus,
    undisturbed_table: Path,
    tmp_path: Path,
) -> None:
    disturbed = repository(tmp_path / "disturbed", corpus)
    said = run_table(disturbed, "--slurm", **cluster.environment)
    job = said.split("job array ")[1].split(":")[0]
    first, second, *_ = (
        f"tiny-{row}-{kind}-seed1" for row in ("Base", "RoPE") for kind in ("linear", "softmax")
    )
    wait_until(lambda: reached(disturbed, first, 20), 120)
    cluster.alive["slurmd"].kill()  # jobs do not need it; it finds them when it is back
    cluster.alive["slurmd"].wait()
    cluster.spawn("slurmd", "-D")
    wait_until(lambda: reached(disturbed, first, 400), 120)
    cluster.ask("scontrol", "requeue", f"{job}_0")
    wait_until(lambda: reached(disturbed, second, 400) or finished(disturbed, second), 120)
    for pid in processes("--array-task\0001") + processes(f"runs/tiny/{second}"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: cluster.is_done(job), PATIENCE)

    assert_same_results(disturbed, undisturbed_table)
    assert "told to end: saved" in log_of(disturbed, first)
    rendered = (disturbed / "results" / "README.md").read_text()
    assert "not run" not in rendered.split("## A table for a test")[1]
    assert "4 done" in run_table(disturbed, "--status")


def test_the_settings_of_a_cluster_reach_sbatch_and_the_command_line_wins(tmp_path: Path) -> None:
    (tmp_path / "slurm.yaml").write_text(
        "{partition: gpu, time: '1:00:00', setup: [module load x]}"
    )
    site = slurm.load_site(tmp_path / "slurm.yaml", {"time": "2:00:00", "nodes": None})
    assert {"--partition=gpu", "--time=2:00:00", "--nodes=1"} <= set(site.options())
    script = slurm.job_script(tmp_path, ["python", "-m", "x"], site)
    assert script.index("module load x") < script.index("python -m x --array-task")
    subprocess.run(["bash", "-n", "-c", script], check=True)


def test_a_setting_that_sbatch_would_never_see_is_refused(tmp_path: Path) -> None:
    (tmp_path / "slurm.yaml").write_text("{partion: gpu}")
    with pytest.raises(ValueError, match="no key partion"):
        slurm.load_site(tmp_path / "slurm.yaml", {})


def test_the_settings_in_the_repository_are_complete() -> None:
    settings = yaml.safe_load((ROOT / "configs" / "slurm.yaml").read_text())
    assert slurm.Site(**settings).options()


def test_without_slurm_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="there is no sbatch here"):
        slurm.submit(tmp_path, "table2", ["table2"], [0], slurm.Site())
