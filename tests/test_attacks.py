"""Every bad input of tests/attacks.py gets one sentence; what is no error works."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from unittest import mock

import pytest
import torch

from lrpe_fairseq.experiments.commands import eval_lm
from lrpe_fairseq.experiments.families.lm import LMRun
from lrpe_fairseq.experiments.records import checkpoints, console
from lrpe_fairseq.experiments.records.files import ROOT, read_json
from lrpe_fairseq.experiments.records.tables import file_name
from lrpe_fairseq.experiments.runner import schedule, slurm
from lrpe_fairseq.experiments.runner.devices import Devices
from lrpe_fairseq.experiments.runner.processes import Children
from tests.attacks import ATTACKS, Accepted, Lab, answer
from tests.trial import checkpoint, trial


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """Small data folders and checkpoints, made when they are first needed."""
    return Lab(tmp_path_factory.mktemp("lab"))


@pytest.mark.parametrize(("provoke", "sentence"), ATTACKS.values(), ids=ATTACKS)
def test_a_bad_input_gets_one_sentence_and_runs_no_program(provoke, sentence, lab):
    said = answer(provoke, lab)
    assert re.search(sentence, said), said
    assert "\n" not in said
    assert not lab.mark.exists()


def test_the_pickle_of_the_attacks_would_run_a_program(tmp_path):
    lab = Lab(tmp_path)
    torch.load(lab.pickled(), weights_only=False)
    assert lab.mark.exists()


def test_a_mean_of_checkpoints_is_never_resumed(tmp_path):
    parts = [checkpoint(tmp_path / f"checkpoint_1_{n}.pt", n) for n in (10, 20)]
    checkpoints.average(parts, tmp_path / checkpoints.AVERAGED)
    shutil.copyfile(tmp_path / checkpoints.AVERAGED, tmp_path / "checkpoint_mean.pt")
    for path in parts:
        path.unlink()
    (tmp_path / checkpoints.LAST).write_bytes(b"")
    said: list[str] = []
    assert checkpoints.ready_to_resume(tmp_path, said.append) == 0
    assert not (tmp_path / checkpoints.LAST).exists()
    assert "average of checkpoints" in " ".join(said)


@pytest.fixture
def run(lab, tmp_path):
    """A language-model run that has not begun."""
    return trial(tmp_path, data=lab.lm_data)


@pytest.mark.parametrize("damage", ["missing", "truncated", "zeroed"])
def test_a_bad_best_checkpoint_after_the_last_update_says_the_way_out(lab, run, damage):
    checkpoint(run.checkpoints / checkpoints.LAST, run.max_update())
    best = run.checkpoints / checkpoints.BEST
    if damage == "truncated":
        best.write_bytes(checkpoint(best, 5).read_bytes()[:1000])
    if damage == "zeroed":
        shutil.copyfile(lab.zeroed(checkpoint(best, 5)), best)
    with (
        mock.patch.object(LMRun, "train"),
        mock.patch.object(Children, "run", side_effect=Accepted),
        pytest.raises(ValueError, match=r"checkpoint_best\.pt.* to train again"),
    ):
        run.work(Children(), Devices(), print)


def test_a_training_keeps_the_checksum_of_its_dictionary(lab, run):
    with mock.patch.object(Children, "run", side_effect=Accepted), contextlib.suppress(Accepted):
        run.train(Children(), Devices(), 0, print)
    assert len(read_json(run.checkpoints / checkpoints.DICTIONARIES)["dict.txt"]) == 64


def test_where_only_the_size_of_a_dictionary_is_known_this_is_said(lab):
    away = lab.changed("away", data="/no/such/folder")
    said: list[str] = []
    dictionary = lab.lm_data / "bin" / "dict.txt"
    name = "decoder.embed_tokens.weight"
    assert checkpoints.same_dictionary(away, name, dictionary, say=said.append)
    assert "only the number of words" in said[0]


def test_relative_paths_count_from_where_the_user_stands(tmp_path, monkeypatch, capsys):
    (tmp_path / "here.pt").write_bytes(b"no checkpoint")
    (tmp_path / "data" / "bin").mkdir(parents=True)
    (tmp_path / "data" / "bin" / "dict.txt").write_text("a 1\n")
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv(console.STARTED_IN, str(tmp_path))
    assert eval_lm.main(["here.pt", "data"]) == 2
    assert "here.pt does not load" in capsys.readouterr().err


def test_shell_text_in_paths_and_labels_is_no_program(tmp_path):
    mark = tmp_path / "mark"
    root = tmp_path / f"$(touch {mark.name})"
    root.mkdir()
    words = ["true", f"; touch {mark}", f"`touch {mark}`"]
    script = slurm.job_script(root, root, words, {0: words[1]}, slurm.Site())
    given = {**os.environ, "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0"}
    subprocess.run(["bash", "-c", script], cwd=tmp_path, env=given, check=True)
    assert not mark.exists()
    assert not (root / mark.name).exists()
    assert file_name("../$(id)/a b") == ".._$_id__a_b".replace("$", "_")


def _stopped_twice():
    """True if what follows the first SIGTERM came to its end in spite of a second one."""
    with schedule._terminated_like_interrupted():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        except KeyboardInterrupt:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)
            return True
    return False


def test_a_second_sigterm_does_not_disturb_the_end():
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert _stopped_twice()
        os.kill(os.getpid(), signal.SIGTERM)  # on the way to the exit status
    finally:
        signal.signal(signal.SIGTERM, before)
