"""A whole table on a real Slurm, which the test starts: an array whose elements are preempted,
killed and left alone by their node's daemon ends in the table of an undisturbed run. Two nodes of
one machine share a training."""

import contextlib
import getpass
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys

import pytest
import yaml

from lrpe_fairseq.experiments.commands import finetune_glue
from lrpe_fairseq.experiments.commands import run_table as run_table_command
from lrpe_fairseq.experiments.families import load_named
from lrpe_fairseq.experiments.families import runs as all_runs
from lrpe_fairseq.experiments.records.files import ROOT
from lrpe_fairseq.experiments.records.runs import read_runs
from lrpe_fairseq.experiments.runner import slurm
from tests.tiny_table import (
    BEYOND,
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
NODES = ("n1", "n2")
PATIENCE = 420  # seconds for the disturbed table
MISSING = [name for name in (*DAEMONS, "sbatch") if not shutil.which(name)]

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=2
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=one Nodes=n1 Default=YES State=UP
PartitionName=both Nodes=n1,n2 State=UP
"""


class Cluster:
    """Two nodes, their controller and its authentication."""

    def __init__(self, folder):
        self.folder, self.alive = folder, {}
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}

    def start(self):
        settings = {"host": socket.gethostname().split(".")[0], "ports": free_ports(3)}
        settings |= {"folder": self.folder, "user": getpass.getuser()}
        (self.folder / "slurm.conf").write_text(CONF.format(**settings))
        key = self.folder / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        files = {"key": key, "socket": self.folder / "munge.socket"}
        files |= {name: self.folder / f"munge.{name}" for name in ("pid", "log", "seed")}
        names = {"key": "key-file", "pid": "pid-file", "log": "log-file", "seed": "seed-file"}
        told = [f"--{names.get(name, name)}={path}" for name, path in files.items()]
        self.alive["munged"] = self.spawn("munged", "--foreground", "--force", *told)
        wait_until(files["socket"].exists, 10)
        self.alive["slurmctld"] = self.spawn("slurmctld", "-D")
        for node in NODES:
            self.start_node(node)
        wait_until(lambda: "idle" in self.ask("sinfo", "-h", "-p", "one"), 30)
        wait_until(lambda: " 2 " in self.ask("sinfo", "-h", "-p", "both", "-t", "idle"), 30)

    def start_node(self, node):
        self.alive[node] = self.spawn("slurmd", "-D", "-N", node)

    def spawn(self, daemon, *arguments):
        environment = {**os.environ, **self.environment}
        output = (self.folder / f"{daemon}.out").open("ab")
        command = [daemon, *arguments]
        return subprocess.Popen(command, stdout=output, stderr=output, env=environment)

    def ask(self, *command):
        environment = {**os.environ, **self.environment}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        return done.stdout

    def is_done(self, job):
        """True if no job is left. A requeued job starts without Slurm's delay of two minutes."""
        for number in range(4):
            self.ask("scontrol", "update", f"jobid={job}_{number}", "StartTime=now")
        return not self.ask("squeue", "-h")

    def stop(self):
        self.ask("scancel", "--user", getpass.getuser())
        wait_until(lambda: not self.ask("squeue", "-h"), 60)
        for daemon in reversed(self.alive.values()):
            daemon.terminate()
            daemon.wait(30)


@pytest.fixture(scope="session")  # before the table, which takes long
def cluster(tmp_path_factory):
    if MISSING or os.getuid():
        pytest.skip(f"needs root and {', '.join(MISSING) or 'nothing else'} (Debian: slurm-wlm)")
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)
    cluster = Cluster(folder)
    cluster.start()
    yield cluster
    cluster.stop()


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def test_a_disturbed_array_ends_in_the_table_of_an_undisturbed_run(
    cluster, corpus, undisturbed_table, tmp_path
):
    disturbed = repository(tmp_path / "disturbed", corpus)
    said = run_table(disturbed, "--slurm", **cluster.environment)
    job = said.split("job array ")[1].split(":")[0]
    first, second = (f"tiny-Base-{kind}-seed1" for kind in ("linear", "softmax"))
    wait_until(lambda: reached(disturbed, first, 20), 120)
    cluster.alive["n1"].kill()  # jobs do not need it; it finds them when it is back
    cluster.alive["n1"].wait()
    cluster.start_node("n1")
    wait_until(lambda: reached(disturbed, first, BEYOND), 120)
    cluster.ask("scontrol", "requeue", f"{job}_0")
    wait_until(lambda: reached(disturbed, second, BEYOND) or finished(disturbed, second), 120)
    for pid in processes(f"--array-task\0tiny/{second}") + processes(f"runs/tiny/{second}"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: cluster.is_done(job), PATIENCE)

    assert_same_results(disturbed, undisturbed_table)
    assert "received a signal: saved" in log_of(disturbed, first)
    rendered = (disturbed / "results" / "README.md").read_text()
    [line] = [line for line in rendered.splitlines() if "A table for a test" in line]
    assert "not run" not in line
    assert "2 done" in run_table(disturbed, "--status")


def halved(folder):
    """Let an update of the table be two batches, one for each of two processes."""
    path = folder / "configs" / "lm" / "tiny.yaml"
    config = yaml.safe_load(path.read_text())
    config["dataset"]["max_tokens"], config["optimization"]["update_freq"] = 64, [2]
    path.write_text(yaml.safe_dump(config, sort_keys=False))


def test_two_nodes_share_a_training_and_save_together_when_they_are_preempted(
    cluster, corpus, tmp_path
):
    folders = [repository(tmp_path / name, corpus) for name in ("one process", "two nodes")]
    for folder in folders:
        halved(folder)
    alone, shared = folders
    one = ("--rows", "Base", "--attention", "linear")
    run_table(alone, *one)
    both = ("--slurm", "--partition", "both", "--nodes", "2")
    said = run_table(shared, *one, *both, **cluster.environment)
    job, name = said.split("job array ")[1].split(":")[0], "tiny-Base-linear-seed1"
    wait_until(lambda: reached(shared, name, BEYOND), 120)
    cluster.ask("scontrol", "requeue", f"{job}_0")
    wait_until(lambda: cluster.is_done(job), PATIENCE)

    log = log_of(shared, name)
    assert "distributed init (rank 1)" in log
    assert "received a signal: saved" in log
    assert "Loaded checkpoint" in log
    ours, theirs = (next(iter(read_runs(f / "results" / "runs").values())) for f in folders[::-1])
    assert ours["config"]["distributed_training.distributed_world_size"] == 2
    assert ours["config"]["optimization.update_freq"] == [1]
    ppl = (run["metrics"]["valid"]["blocks"]["ppl"] for run in (ours, theirs))
    assert next(ppl) == pytest.approx(next(ppl), rel=1e-3)


def test_two_nodes_train_a_table_in_bfloat16(cluster, corpus, tmp_path):
    folder = repository(tmp_path / "bf16", corpus)
    halved(folder)
    given = ("--rows", "Base", "--attention", "linear", "--precision", "bf16")
    both = ("--slurm", "--partition", "both", "--nodes", "2")
    said = run_table(folder, *given, *both, **cluster.environment)
    job, name = said.split("job array ")[1].split(":")[0], "tiny-bf16-Base-linear-seed1"
    wait_until(lambda: cluster.is_done(job), PATIENCE)

    assert "distributed init (rank 1)" in log_of(folder, name)
    (run,) = read_runs(folder / "results" / "runs").values()
    assert run["scale"] == "tiny-bf16"
    assert run["config"]["distributed_training.distributed_world_size"] == 2
    assert run["config"]["optimization.update_freq"] == [1]
    assert run["config"]["common.bf16"] is True
    assert run["metrics"]["valid"]["blocks"]["ppl"] < run["curve"][0]["valid_ppl"]
    assert "1 done" in run_table(folder, *given, "--status")


RANKS = """
import torch
from fairseq.dataclass.configs import DistributedTrainingConfig
from fairseq.distributed.utils import infer_init_method
from omegaconf import OmegaConf
from lrpe_fairseq.experiments.runner.devices import Devices
torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 4
words = Devices(nodes=2).launch(["x", "++distributed_training.distributed_world_size=8"])
told = dict(word.split(".", 1)[1].split("=") for word in words if word.startswith("++"))
config = OmegaConf.structured(DistributedTrainingConfig(tpu=False))
config.merge_with({key: int(value) for key, value in told.items()})
infer_init_method(config)
print(config.distributed_init_method, config.distributed_rank, config.distributed_world_size)
"""


def test_fairseq_counts_the_gpus_of_both_nodes(cluster):
    where = ("--partition=both", "--nodes=2", "--ntasks-per-node=1", f"--chdir={ROOT}")
    said = cluster.ask("srun", *where, sys.executable, "-c", RANKS)
    found = sorted(line.split() for line in said.splitlines() if line.startswith("tcp://"))
    address = found[0][0]
    assert found == [[address, "0", "8"], [address, "4", "8"]]
    assert address.startswith("tcp://n1:")


def test_the_settings_of_a_cluster_reach_sbatch_and_the_command_line_wins(tmp_path):
    written = "{partition: gpu, time: '1:00:00', setup: [module load x]}"
    (tmp_path / "slurm.yaml").write_text(written)
    site = slurm.load_site(tmp_path / "slurm.yaml", {"time": "2:00:00", "nodes": None})
    assert {"--partition=gpu", "--time=2:00:00", "--nodes=1"} <= set(site.options())
    assert "--cpus-per-task=1" in site.options()
    of_eight = slurm.load_site(ROOT / "configs" / "slurm.yaml", {"gpus_per_node": 8})
    assert "--cpus-per-task=32" in of_eight.options()  # each process has loaders
    script = slurm.job_script(tmp_path, tmp_path, ["python", "-m", "x"], {0: "a/b"}, site)
    assert "export LRPE_FAIRSEQ_GRACE=110" in script
    assert script.index("module load x") < script.index("python -m x --array-task")
    subprocess.run(["bash", "-n", "-c", script], check=True)


ONE = {2: "table/run"}
TASK = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
FAILING = "exit 1"
OUT_OF_TIME = "kill -USR1 $PPID; sleep 5; exit 1"  # as Slurm tells the script
CANCELED = "kill -TERM $PPID; sleep 5; exit 1"


@pytest.mark.parametrize(
    ("lives", "requeued"),
    [
        ([FAILING] * 6, 3),
        ([OUT_OF_TIME] * 5 + ["exit 0"], 5),
        ([FAILING, OUT_OF_TIME] * 3 + [FAILING] * 2, 6),
        ([FAILING, CANCELED], 1),
    ],
)
def test_only_failures_count_against_the_restarts(tmp_path, lives, requeued):
    (tmp_path / "scontrol").write_text('#!/bin/sh\necho "$@" >> requeued\nkill -KILL $PPID\n')
    (tmp_path / "scontrol").chmod(0o755)
    environment = {**os.environ, **TASK, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for life in lives:
        script = slurm.job_script(tmp_path, tmp_path, ["bash", "-c", life], ONE, slurm.Site())
        before = calls(tmp_path)
        subprocess.run(["bash", "-c", script], env=environment, timeout=30)
        if calls(tmp_path) == before:
            break
    assert calls(tmp_path) == ["requeue 7_2"] * requeued


def calls(folder):
    """Return how scontrol was called."""
    log = folder / "requeued"
    return log.read_text().splitlines() if log.exists() else []


def test_an_element_runs_the_run_that_was_submitted(tmp_path, capsys):
    runs = {0: "table/first", 2: "table/it's the second"}
    script = slurm.job_script(tmp_path, tmp_path, ["echo"], runs, slurm.Site())
    done = subprocess.run(
        ["bash", "-c", script], env={**os.environ, **TASK}, capture_output=True, text=True
    )
    assert done.stdout == "--array-task table/it's the second\n"
    of_table = all_runs(load_named("table2"), "small", [1])
    assert slurm.element(of_table, of_table[3].name) is of_table[3]
    assert run_table_command.main(["table2", "--array-task", "table2/gone"]) == 2
    assert "there is no run table2/gone any more" in capsys.readouterr().err


def test_a_run_that_cannot_count_its_failure_is_not_requeued(tmp_path):
    absent = tmp_path / "absent"
    script = slurm.job_script(tmp_path, absent, ["false"], ONE, slurm.Site())
    done = subprocess.run(["bash", "-c", script], env={**os.environ, **TASK}, timeout=30)
    assert done.returncode == 1


def test_the_job_that_renders_the_tables_has_the_account_too(monkeypatch, tmp_path):
    submitted: list[list[str]] = []
    monkeypatch.setattr(slurm, "require_sbatch", lambda: None)
    monkeypatch.setattr(slurm, "_sbatch", lambda options: submitted.append(list(options)) or "7")
    site = slurm.Site(partition="gpu", account="nlp", qos="long", gpus_per_node=4)
    plan = slurm.planned(tmp_path, "table2", ["table2"], {0: "a", 2: "c"}, site)
    assert slurm.submit(plan) == "7"
    for options in submitted:
        assert {"--partition=gpu", "--account=nlp", "--qos=long"} <= set(options)
    assert ["--gpus-per-node=4" in options for options in submitted] == [True, False]
    assert "report.render('table2')" in " ".join(shlex.split(submitted[1][-1]))


DRY = ("--slurm", "--dry-run", "--seeds", "1")


def test_a_dry_run_prints_the_jobs_and_how_each_run_divides_an_update(capsys):
    given = ["table2", "--scale", "paper", "--rows", "RoPE", "--gpus-per-node", "4", *DRY]
    assert run_table_command.main([*given, "--precision", "bf16"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("sbatch --array=0,1 --requeue ")
    assert "--gpus-per-node=4" in said.splitlines()[0]
    script = said[said.index("#!/usr/bin/env bash") :].partition("\nelement ")[0]
    subprocess.run(["bash", "-n", "-c", script], check=True)
    assert "--precision bf16" in script
    assert "--dry-run" not in script
    line = "table2/paper-bf16-RoPE-linear-seed1  4 of 4 processes, world size 4, update_freq [4]"
    assert line in said
    assert "2 of 2 runs; nothing was submitted" in said
    assert not (ROOT / "runs" / "table2" / "slurm" / "job.sh").exists()


def test_a_run_says_that_it_uses_fewer_gpus_than_it_gets(capsys):
    given = ["table2", "--scale", "paper", "--rows", "RoPE", "--gpus-per-node", "7", *DRY]
    assert run_table_command.main(given) == 0
    assert "4 of 7 processes, world size 4, update_freq [4]" in capsys.readouterr().out


def test_fine_tuning_is_planned_with_the_whole_path_of_its_checkpoint(
    capsys, monkeypatch, tmp_path
):
    source = {"checkpoint": tmp_path / "best.pt", "label": "rope"}
    source |= {"attention_type": "linear", "position_encoding": "rope"}
    monkeypatch.setattr(finetune_glue, "source_of", lambda checkpoint: source)
    monkeypatch.chdir(tmp_path)
    assert finetune_glue.main(["best.pt", "CoLA", *DRY]) == 0
    said = capsys.readouterr().out
    assert said.startswith("sbatch --array=0,1,2,3 ")
    assert f"finetune_glue {tmp_path / 'best.pt'} CoLA --seeds 1 --array-task" in said
    assert "4 of 4 runs; nothing was submitted" in said
    assert finetune_glue.main(["best.pt", "CoLA", "--data", "own", *DRY]) == 0
    assert f"CoLA --data {tmp_path / 'own'} --seeds 1 --array-task" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("told", "leaves", "status", "requeued"),
    [
        (signal.SIGUSR1, 75, 75, True),
        (signal.SIGTERM, 75, 75, False),  # Slurm itself requeues a preempted job
        (signal.SIGUSR1, 0, 0, False),  # it ended just before
        (None, 1, 1, False),
    ],
)
def test_the_example_of_a_job_requeues_a_training_that_its_time_limit_stopped(
    tmp_path, told, leaves, status, requeued
):
    folder = tmp_path / "programs"
    folder.mkdir()
    ends = f"sleep 0.2; exit {leaves}"
    training = f"trap '{ends}' USR1 TERM; touch started; " + (
        "for i in $(seq 300); do sleep 0.1; done" if told else ends
    )
    for name, text in {"fairseq-hydra-train": training, "scontrol": 'echo "$@" > called'}.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / name).chmod(0o755)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").write_text("")
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    job = subprocess.Popen(
        ["bash", ROOT / "examples" / "train.sbatch"],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "SLURM_JOB_ID": "7"},
    )
    if told:
        wait_until((tmp_path / "started").exists, 20)
        job.send_signal(told)
    assert job.wait(20) == status
    assert (tmp_path / "called").exists() == requeued
