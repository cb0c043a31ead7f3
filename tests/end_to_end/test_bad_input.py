"""What cannot work is refused in one sentence, without a traceback."""

import subprocess
from argparse import Namespace
from pathlib import Path

import fairseq.models
import fairseq.tasks
import pytest

from lrpe_fairseq.encodings import ENCODINGS
from tests.end_to_end.commands import (
    SMALL,
    TRAINING,
    build,
    environment,
    hydra,
    side_by_side,
    words,
    yaml_config,
)
from tests.end_to_end.forked import run_forked

pytestmark = pytest.mark.end_to_end

READ = {
    "mistyped option": {"postion_encoding": "rope"},
    "mistyped number": {"decoder_layers": "six"},
}
UNRELATED = "two processes that form no group"
SENTENCES = {
    "unknown encoding": f"unknown position encoding 'lrpe-type9'; choose one of "
    f"{', '.join(ENCODINGS)}, or lrpe:<P>:<Lambda> with P in ",
    UNRELATED: "2 processes were started without a process group",
    "mistyped option": "unknown model option 'postion_encoding'; did you mean 'position_encoding'?",
    "mistyped number": "bad value of model option 'decoder_layers': Value 'six' of type 'str' "
    "could not be converted to Integer",
}

Refusals = dict[str, subprocess.CompletedProcess]


@pytest.fixture(scope="session")
def save_dir(tmp_path_factory):
    """Where a training that was not refused would write."""
    return tmp_path_factory.mktemp("refused") / "checkpoints"


@pytest.fixture(scope="session")
def refusals(corpus, save_dir):
    """The results of every refused command, each in a process of its own."""
    train = words([corpus.data, TRAINING, SMALL, "--max-update 1 --save-dir", save_dir])
    encoding = [*train, "--position-encoding", "lrpe-type9"]
    launched = environment(WORLD_SIZE="2", RANK="0", LOCAL_RANK="0")  # as torchrun sets them
    jobs = {
        "unknown encoding": lambda: run_forked("fairseq_cli.train", encoding),
        UNRELATED: lambda: run_forked("fairseq_cli.train", train, environment=launched),
    }
    for label, model in READ.items():
        config = yaml_config(corpus, save_dir, model)
        read = words(hydra(save_dir.parent / label.replace(" ", "-"), config))
        jobs[label] = lambda read=read: run_forked("fairseq_cli.hydra_train", read)
    return dict(zip(jobs, side_by_side(*jobs.values()), strict=True))


def said(ended: subprocess.CompletedProcess) -> list[str]:
    """The sentences of ours on standard error."""
    prefix = "lrpe_fairseq: "
    lines = ended.stderr.splitlines()
    return [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]


@pytest.mark.parametrize("label", SENTENCES)
def test_a_bad_choice_ends_a_training_with_one_sentence(refusals, label):
    ended = refusals[label]
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr + ended.stdout
    (sentence,) = said(ended)
    assert sentence.startswith(SENTENCES[label])
    assert ended.stderr.rstrip().endswith(sentence)


def test_nothing_that_was_refused_left_a_checkpoint(refusals, save_dir):
    assert all(ended.returncode for ended in refusals.values())
    assert not list(save_dir.glob("*.pt"))


# ---- the same, without starting a process ----


def test_data_without_a_dictionary_are_named_with_the_folder_that_has_one(tmp_path, capsys):
    def refused(data: Path) -> str:
        with pytest.raises(SystemExit) as refusal:
            fairseq.tasks.setup_task(Namespace(task="language_modeling", data=str(data)))
        assert refusal.value.code == 2
        return capsys.readouterr().err

    (tmp_path / "bin").mkdir()
    assert f"{tmp_path}/dict.txt does not exist; the data must be a folder" in refused(tmp_path)
    (tmp_path / "bin" / "dict.txt").write_text("a 1\n")
    assert f"dict.txt does not exist; did you mean {tmp_path}/bin?" in refused(tmp_path)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            "--attention-type linear --position-encoding t5",
            "position encoding 't5' needs the score matrix, which linear attention does not "
            "compute; use it with softmax attention",
        ),
        ("--position-encoding lrpe:unknown:rotation", "unknown position encoding"),
        ("--position-encoding lrpe:identity:unknown", "unknown position encoding"),
        ("--position-encoding ''", "unknown position encoding ''"),
        ("--decoder-attention-heads 5", "width 32 is not divisible by 5 attention heads"),
        ("--decoder-attention-heads 0", "0 attention heads"),
        ("--document-boundary book", "--document-boundary 'book' is no symbol of the dictionary"),
    ],
)
def test_a_model_that_cannot_be_built_says_why(corpus, options, reason):
    with pytest.raises(SystemExit, match=reason) as refusal:
        build(corpus, SMALL, options)
    assert refusal.value.code == 2
    assert "\n" not in str(refusal.value)
