"""Every command ends bad input with exit status 2 and one line on standard error."""

import runpy
import subprocess
import sys
from unittest import mock

import pytest

from lrpe_fairseq.experiments.__main__ import COMMANDS, INTERNAL
from lrpe_fairseq.experiments.__main__ import main as program
from lrpe_fairseq.experiments.commands import train_row
from lrpe_fairseq.experiments.records.console import UserError, command
from lrpe_fairseq.experiments.records.files import ROOT
from lrpe_fairseq.experiments.runner import by_hand

NO_INPUT = {"doctor", "quickstart"}  # they take no arguments
BAD = {  # command -> arguments, with {absent} for a path that does not exist
    "compare": "table2 Type2 Nobody",
    "convert": "{absent}/model {absent}/out",
    "drift": "{absent} {absent} --label mine --out {absent}/o.json",
    "eval_classifier": "{absent}/a.pt {absent}",
    "eval_glue": "{absent}/a.pt {absent}/RTE valid --out {absent}/o.json",
    "eval_lm": "{absent}/a.pt {absent}",
    "eval_mt": "{absent}/a.pt {absent}",
    "export": "{absent}/a.pt {absent}/out",
    "finetune_glue": "{absent}/a.pt RTE",
    "import_roberta": "{absent}/model {absent}/out",
    "ngrams": "{absent}",
    "pairs": "{absent}/a.pt {absent} --label mine --out {absent}/o.json",
    "prepare": "{absent}/a.txt --dest {other}",
    "run_table": "table0",
    "score_lm": "{absent}/a.pt {absent} test blocks-64 --out {absent}/o.json",
    "train_row": "table2 Nobody linear",
}
BAD_DATA = {  # folder of data-prep -> arguments, with {other} for the data of another corpus
    "algebraic": "--task copy --dest {other}",
    "books": "pg19 --dest {other}",
    "cifar10": "--dest {other}",
    "digits": "--dest {other}",
    "gutenberg": "--from {absent} --dest {other}",
    "glue": "RTE --dest {absent} --tokens-of {absent}",
    "imagenet": "--dest {absent}",
    "listops": "--dest {other}",
    "lra": "text --dest {other}",
    "mnist5k": "--dest {other}",
    "multi30k": "--dest {other}",
    "newstest": "--dest {other}",
    "pathfinder": "--dest {other}",
    "pydoc": "--dest {other}",
    "retrieval": "--dest {other}",
    "sst2-bytes": "--dest {other}",
    "synthetic": "--task copy --dest {other}",
    "wikibook": "--dest {other}",
    "wikitext": "wikitext-2 --level word --dest {other}",
    "wmt14-en-de": "--dest {other}",
}


@pytest.fixture
def places(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "manifest.json").write_text('{"corpus": "mine", "level": "mine"}')
    return {"absent": tmp_path / "absent", "other": tmp_path / "other"}


def assert_refused(main, arguments, capsys):
    assert main(arguments.split()) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "Traceback" not in said


def test_no_command_is_forgotten_here():
    assert {*COMMANDS, *INTERNAL} == BAD.keys() | NO_INPUT
    assert {path.parent.name for path in ROOT.glob("data-prep/*/prepare.py")} == BAD_DATA.keys()


def test_help_says_in_a_line_what_each_command_of_a_user_does(capsys):
    assert program(["--help"]) == 0
    head, title, *lines = capsys.readouterr().out.splitlines()
    assert (head, title) == ("python -m lrpe_fairseq.experiments COMMAND …", "commands:")
    assert [line.split()[0] for line in lines] == [*COMMANDS]
    assert "  eval_lm         Evaluate a language model by hand" in lines
    assert all(len(line.split()) > 3 and len(line) <= 100 for line in lines)
    assert program([]) == 2


@pytest.mark.parametrize("name", BAD)
def test_a_command_refuses_bad_input_with_status_2(name, places, capsys):
    assert_refused(program, f"{name} {BAD[name].format(**places)}", capsys)
    assert not places["absent"].exists()


@pytest.mark.parametrize("name", BAD_DATA)
def test_data_preparation_refuses_bad_input_with_status_2(name, places, capsys):
    main = runpy.run_path(str(ROOT / "data-prep" / name / "prepare.py"))["main"]
    assert_refused(main, BAD_DATA[name].format(**places), capsys)


def test_a_row_is_trained_on_the_data_set_that_was_chosen():
    row = ["tmlr-table4", "RoPE", "linear", "--scale", "small"]
    chosen = {"": "listops-20-100", "sst2-bytes": "sst2-bytes", "pathfinder16": "pathfinder16"}
    for name, data in chosen.items():
        given = [*row, "--dataset", name] if name else row
        assert train_row._run(train_row._parse(given)).data.name == data
    with pytest.raises(ValueError, match="no data set 'lra-image' at scale small; it has listops-"):
        train_row._run(train_row._parse([*row, "--dataset", "lra-image"]))


def test_a_row_that_a_scale_lacks_is_refused_with_the_scales_that_have_it():
    said = r"^T5 with softmax attention is not in table images at scale mnist5k: choose --scale \w+"
    with pytest.raises(ValueError, match=said) as refused:
        train_row._run(train_row._parse(["images", "T5", "softmax", "--scale", "mnist5k"]))
    for scale in str(refused.value).partition("--scale ")[2].split(" or "):
        given = ["images", "T5", "softmax", "--scale", scale]
        assert train_row._run(train_row._parse(given)).scale == scale


CHANGES = {
    "optimization.max_epch=1": "no setting 'optimization.max_epch'; did you mean 'optimization.max",
    "foo.bar=1": "there is no setting 'foo.bar'",
    "foobar=1": "an override is section.key=value, not 'foobar=1'",
    "lr_scheduler.warmup_update=5": "did you mean 'lr_scheduler.warmup_updates'?",
    "model.encoder.layerz=2": "did you mean 'model.encoder.layers'?",
    "task.data=x": "task.data cannot be changed here: choose the data with --dataset",
    "--seed=-1": "--seed must be at least 1",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_that_no_training_can_have_is_refused_before_a_folder_is_made(
    change, capsys, monkeypatch, tmp_path
):
    monkeypatch.setattr(train_row, "ROOT", tmp_path)
    assert train_row.main(["table4", "RoPE", "linear", "--scale", "small", change]) == 2
    assert CHANGES[change] in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_changes_that_a_training_can_have_name_a_folder_below_by_hand():
    changes = ["optimizer.adam_betas=(0.9, 0.95)", "optimization.lr=[0.001]", "model.fidelity=a/b"]
    run = train_row._run(train_row._parse(["images", "RoPE", "linear", *changes]))
    assert run.folder.parent == ROOT / "runs" / "by-hand" / "images"
    assert not set(run.folder.name) & set(" ()/[]")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("model.attention_window=64,128", "model.attention_window=64_128"),
        ("model.position_encoding=rope,alibi", "model.position_encoding=rope:alibi"),
    ],
)
def test_other_changes_have_other_folders(one, other):
    def folder(change):
        return train_row._run(train_row._parse(["images", "RoPE", "linear", change])).folder

    assert folder(one) == folder(one)
    assert folder(one) != folder(other)


def test_a_folder_of_plain_changes_is_named_by_them_alone():
    run = train_row._run(train_row._parse(["images", "RoPE", "linear", "model.dropout=0.2"]))
    assert run.folder.name.endswith("-model.dropout=0.2")


def test_an_evaluation_needs_a_place_for_its_result_before_it_begins(tmp_path):
    (tmp_path / "file").write_text("")
    parser = by_hand.arguments("it", "Evaluate.")
    out = str(tmp_path / "file" / "out.json")
    with pytest.raises(UserError, match=r"no folder that can be written .* another --out"):
        by_hand.parsed(parser, ["model.pt", "data", "--out", out])
    missing = tmp_path / "absent" / "model.pt"  # refused later, with a better sentence
    assert by_hand.parsed(parser, [str(missing), "data"]).out == missing.with_suffix(".json")
    assert not missing.parent.exists()


@pytest.mark.parametrize("error", [UserError("a\nb"), ValueError("a b"), OSError("a  b")])
def test_errors_for_users_become_one_line(error, capsys):
    assert command("it")(mock.Mock(side_effect=error, __name__="main"))() == 2
    assert capsys.readouterr().err == "it: a b\n"


@pytest.mark.parametrize("lines", [1, 100_000])  # less and more than a pipe holds
def test_a_command_without_a_reader_ends_silently(lines):
    code = (
        "import sys\n"
        "from lrpe_fairseq.experiments.records.console import command\n"
        f"main = command('c')(lambda: print('line\\n' * {lines}))\n"
        "sys.stdin.read()\n"  # until the reader has ended
        "sys.exit(main())\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as child:
        child.stdout.close()
        child.stdout = None
        _, said = child.communicate()
    assert (child.returncode, said) == (141, "")


def test_other_errors_keep_their_traceback_and_ctrl_c_is_130():
    @command("it")
    def main(error=None):
        if error:
            raise error

    with pytest.raises(KeyError):
        main(KeyError("a bug"))
    assert main(KeyboardInterrupt()) == 130
    assert main() == 0
