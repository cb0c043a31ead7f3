"""Fine-tuning on GLUE: it takes the checkpoint's own model, resumes where it stopped, scores
exactly, and refuses in one sentence what does not fit."""

import functools
import re
import shutil
from dataclasses import replace
from itertools import product

import pytest
import torch

from lrpe_fairseq.attention.multihead import ATTENTION_TYPES
from lrpe_fairseq.experiments.commands import eval_glue, finetune_glue
from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.data import glue, pieces
from lrpe_fairseq.experiments.families import finetuning, load_named, runs
from lrpe_fairseq.experiments.families.finetuning import FinetuningRun
from lrpe_fairseq.experiments.records import checkpoints
from lrpe_fairseq.experiments.records.console import UserError
from lrpe_fairseq.experiments.records.files import ROOT
from lrpe_fairseq.experiments.records.runs import read_run
from lrpe_fairseq.experiments.runner import schedule
from lrpe_fairseq.experiments.runner.training import CONFIGS, Devices
from tests.end_to_end.cases import sampled
from tests.end_to_end.commands import PLUGIN, assert_same, run, side_by_side, signalled
from tests.end_to_end.forked import ForkedChildren, run_forked
from tests.test_data_prep import load
from tests.trial import trial

pytestmark = pytest.mark.end_to_end

prepare_glue = load("glue")
PRETRAIN = (
    f"--user-dir {PLUGIN} --task masked_lm --tokens-per-sample 32 --criterion masked_lm "
    "--arch lrpe_roberta_tiny --encoder-layers 2 --encoder-embed-dim 32 "
    "--encoder-ffn-embed-dim 64 --optimizer adam --lr 3e-3 --max-tokens 256 --num-workers 0 --cpu "
    "--no-epoch-checkpoints --log-format simple --max-update 40 --position-encoding lrpe-type3 "
    "--encoding-seed 5"
)
TASKS = ("RTE", "STS-B")
one_attention = pytest.mark.parametrize("pretrained", ["linear"], indirect=True)
NUMBERS = [f"number{letter}" for letter in "abcdefghijkl"]


def counted(first, size):
    return " ".join(NUMBERS[(first + i) % 12] for i in range(size))


@pytest.fixture(scope="session")
def words(tmp_path_factory):
    """Pre-training data with a tokenizer of its own."""
    folder = tmp_path_factory.mktemp("words")
    for split, size in (("train", 400), ("valid", 30)):
        text = "".join(f"{counted(i, 3 + i % 7)}\n" for i in range(size))
        (folder / split).write_text(text)
    texts = {split: folder / split for split in ("train", "valid")}
    steps = prep.Steps(folder, "words", "bpe")
    pieces.run_pieces(steps, texts, pieces.run_sentencepiece(steps, {"train": texts["train"]}, 48))
    return folder


@pytest.fixture(scope="session")
def pretrain(words, tmp_path_factory):
    """Pre-trains a model with an attention type, once; the best checkpoint."""

    @functools.cache
    def train_once(attention):
        folder = tmp_path_factory.mktemp("pretrained") / f"{attention}-seed1" / "checkpoints"
        options = f"--attention-type {attention}"
        run("fairseq_cli.train", words / "bin", PRETRAIN, options, "--save-dir", folder)
        return folder / checkpoints.BEST

    return train_once


@pytest.fixture(params=ATTENTION_TYPES)
def pretrained(request, pretrain):
    return pretrain(request.param)


@pytest.fixture(scope="session")
def tasks(words, tmp_path_factory):
    """RTE: does the second sentence count on? STS-B: by how much do the beginnings differ?"""
    folder = tmp_path_factory.mktemp("glue")
    for split, size in (("train", 160), ("dev", 48)):
        tags, scores = [["index", "a", "b", "label"]], [["c"] * 10]
        for i in range(size):
            apart = i % 2 * 5
            pair = [counted(i, 4), counted(i + 4 + apart, 4)]
            tags.append([str(i), *pair, prepare_glue.TASKS["RTE"].labels[i % 2]])
            scores.append([*["x"] * 7, *pair, f"{apart:.3f}"])
        for name, rows in (("RTE", tags), ("STS-B", scores)):
            path = folder / "from" / name / f"{split}.tsv"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join("\t".join(row) + "\n" for row in rows))
    pieces = prepare_glue.pieces_of(words)
    for name in ("RTE", "STS-B"):
        prepare_glue.prepare(name, folder / "glue-words", pieces, folder / "from")
    return folder / "glue-words"


def finetuning_run(pretrained, data, folder, **changes):
    given = {"config": "finetune-small", "position_encoding": "lrpe-type3", "lr": 3e-3}
    given["attention_type"] = pretrained.parent.parent.name.partition("-")[0]
    given["overrides"] = ("dataset.batch_size=8", "checkpoint.save_interval_updates=10")
    return trial(folder, FinetuningRun, data=data, checkpoint=pretrained, **given | changes)


def work(made):
    made.work(ForkedChildren(), Devices(), print)
    return read_run(made.result)


@pytest.fixture(scope="session")
def finished(tasks, tmp_path_factory):
    """Fine-tunes a checkpoint on a task, once for all tests that read the run."""

    @functools.cache
    def run_once(pretrained, name):
        made = finetuning_run(pretrained, tasks / name, tmp_path_factory.mktemp("finished"))
        work(made)
        return made

    return run_once


@pytest.mark.parametrize(
    ("pretrained", "name"),
    sampled(list(product(ATTENTION_TYPES, TASKS)), [("linear", "RTE"), ("softmax", "STS-B")]),
    indirect=["pretrained"],
)
def test_a_task_is_learned_by_the_model_of_the_checkpoint(pretrained, finished, name, monkeypatch):
    made = finished(pretrained, name)
    found = read_run(made.result)
    assert made.finished()
    assert (found["dataset"], found["task"]) == (f"glue-{name}", "sentence_prediction")
    model = found["config"]
    assert (model["model._name"], model["model.encoder_layers"]) == ("lrpe_roberta_tiny", 2)
    assert (model["model.encoding_seed"], model["model.encoder_embed_dim"]) == (5, 32)
    assert model["optimization.max_update"] == 3 * 20
    assert found["attention_type"] == made.attention_type
    assert "a subset: 160 of" in found["protocol"]["glue"]
    predicted, right = eval_glue.predict(made.checkpoints / checkpoints.BEST, made.data, "valid")
    expected = glue.scores(glue.TASKS[name], predicted, right)
    assert found["metrics"]["valid"]["glue"] == pytest.approx(expected)
    assert len(right) == 48
    monkeypatch.setattr(finetuning, "digest_of", lambda path: "that of another pre-training")
    assert not made.finished()
    first = glue.TASKS[name].metrics[0]
    reported = checkpoints.load(made.checkpoints / checkpoints.BEST)["extra_state"]["best"]
    assert expected[first] == pytest.approx(reported, abs=0.06)  # fairseq rounds to 0.1


@one_attention
def test_it_goes_on_where_a_kill_stopped_it_and_ends_where_it_would_have(
    pretrained, finished, tasks, tmp_path
):
    whole = finished(pretrained, "RTE")
    expected = read_run(whole.result)
    made = finetuning_run(pretrained, tasks / "RTE", tmp_path / "cut")
    made.checkpoints.mkdir(parents=True)
    signalled(tmp_path / "killed", 11, "SIGKILL")
    plugin = f"++common.user_dir={tmp_path / 'killed'}"
    killed = run_forked("fairseq_cli.hydra_train", [*made.command()[1:], plugin])
    made.log.write_text(killed.stdout + killed.stderr)
    assert killed.returncode == -9, made.log.read_text()[-500:]
    assert list(made.checkpoints.glob("checkpoint_*_10.pt"))
    found = work(made)
    assert found["metrics"] == expected["metrics"]
    last = [checkpoints.load(r.checkpoints / checkpoints.LAST)["model"] for r in (made, whole)]
    assert_same(*last)


@one_attention
def test_two_processes_share_the_batches_of_a_task_and_fill_the_same_cell(
    pretrained, tasks, tmp_path
):
    """The correlation of STS-B needs the predictions of both."""
    made = finetuning_run(pretrained, tasks / "STS-B", tmp_path)
    made = replace(made, overrides=(*made.overrides, "optimization.max_update=20"))
    group = {
        "distributed_world_size": "2",
        "distributed_init_method": f"file://{tmp_path}/group",
        "distributed_no_spawn": "true",
        "distributed_backend": "gloo",
        "ddp_backend": "legacy_ddp",
    }
    words = [*made.command(2)[1:], *(f"++distributed_training.{k}={v}" for k, v in group.items())]
    assert "++dataset.batch_size=4" in words
    rank = "++distributed_training.distributed_rank"
    train = functools.partial(run, "fairseq_cli.hydra_train", *words)
    side_by_side(*(functools.partial(train, f"{rank}={number}") for number in range(2)))
    last = checkpoints.load(made.checkpoints / checkpoints.LAST)
    assert checkpoints.updates(last) == made.max_update() == 20
    assert made.differences(checkpoints.options(last)) == set()
    predicted, right = eval_glue.predict(made.checkpoints / checkpoints.BEST, made.data, "valid")
    best = checkpoints.load(made.checkpoints / checkpoints.BEST)["extra_state"]["best"]
    expected = glue.scores(glue.TASKS["STS-B"], predicted, right)[glue.TASKS["STS-B"].metrics[0]]
    assert best == pytest.approx(expected, abs=0.06)


def refused(made):
    with pytest.raises(UserError) as error:
        made.work(ForkedChildren(), Devices(), print)
    assert not made.folder.exists()
    assert not made.result.exists()
    return str(error.value)


@one_attention
def test_what_does_not_fit_together_gets_one_sentence_and_nothing_is_begun(
    pretrained, tasks, tmp_path
):
    made = finetuning_run(pretrained, tasks / "RTE", tmp_path / "run")
    absent = replace(made, checkpoint=tmp_path / "a" / "b" / "c" / "absent.pt", label="Type 2")
    said = f"train_row a 'Type 2' {made.attention_type} --scale {made.scale}"
    assert said in refused(absent)
    assert "is not prepared: run" in refused(replace(made, data=tmp_path / "glue-words" / "RTE"))
    data = shutil.copytree(tasks / "RTE", tmp_path / "words" / "RTE")
    lines = (data / "bin" / "input0" / "dict.txt").read_text().splitlines()
    (data / "bin" / "input0" / "dict.txt").write_text("\n".join(reversed(lines)) + "\n")
    assert "with another dictionary" in refused(replace(made, data=data))
    with pytest.raises(ValueError, match="not linear and rope"):
        replace(made, position_encoding="rope").command()
    assert "++model.dropout=0.3" in replace(made, overrides=("model.dropout=0.3",)).command()
    with pytest.raises(ValueError, match="unknown GLUE task 'rte'"):
        replace(made, data=tasks / "rte").command()


def test_the_grid_is_every_task_rate_and_seed_and_its_best_rate_fills_the_table():
    table = load_named("table3")
    grid = [run for run in runs(table, "paper", [1, 2]) if run.label == "Type5"]
    found = {(run.data.name, run.lr, run.seed) for run in grid}
    assert len(grid) == len(found) == 8 * 4 * 2
    assert {lr for _, lr, _ in found} == {1e-5, 3e-5, 6e-5, 1e-4}
    assert all(
        column.best_over == "optimization.lr" for column in table.columns if not column.mean_of
    )
    fields = ("checkpoint", "label", "attention_type", "position_encoding")
    by_hand = finetuning.finetuning_runs(
        {name: getattr(grid[0], name) for name in fields},
        CONFIGS / "roberta" / "finetune.yaml",
        "paper",
        ["RTE"],
        table.rates_at("paper", ()),
        [1],
    )
    assert set(by_hand) <= set(grid)


@pytest.mark.parametrize("seed", [1, 2])
def test_only_the_checkpoints_of_its_table_fill_table_3(seed, monkeypatch):
    path = ROOT / f"runs/table8/small-RoPE-linear-seed{seed}/checkpoints/{checkpoints.BEST}"
    known = {"attention_type": "linear", "position_encoding": "rope", "label": "rope"}
    monkeypatch.setattr(finetune_glue, "source_of", lambda path: {"checkpoint": path, **known})
    options = finetune_glue._parse([str(path), "all", "--scale", "small"])
    home = ROOT / ("results/runs/table3" if seed == 1 else "runs/by-hand/table3")
    assert {run.lr for run in finetune_glue._finetunings(options)} == {3e-4}  # of scale small
    assert all(home in run.result.parents for run in finetune_glue._finetunings(options))


def test_checkpoints_in_folders_of_one_name_are_fine_tuned_apart(tmp_path, monkeypatch):
    known = {"attention_type": "linear", "position_encoding": "rope", "label": "rope"}
    monkeypatch.setattr(finetune_glue, "source_of", lambda path: {"checkpoint": path, **known})
    (tmp_path / "same").symlink_to("a")

    def folders(*path):
        given = str(tmp_path.joinpath(*path))
        options = finetune_glue._parse([given, "RTE", "--scale", "small"])
        return {run.folder for run in finetune_glue._finetunings(options)}

    first = folders("a", "exp", "checkpoints", checkpoints.BEST)
    assert first == folders("same", "exp", "checkpoints", checkpoints.BEST)
    assert first.isdisjoint(folders("b", "exp", "checkpoints", checkpoints.BEST))
    assert first.isdisjoint(folders("a", "exp", "checkpoints", checkpoints.LAST))


def test_data_of_another_tokenizer_are_named_and_prepared_with_its_pieces(tmp_path, monkeypatch):
    known = {"attention_type": "linear", "position_encoding": "rope", "label": "rope"}
    monkeypatch.setattr(finetune_glue, "source_of", lambda path: {"checkpoint": path, **known})
    own = str(tmp_path / "glue-roberta-base")
    options = finetune_glue._parse(["a.pt", "RTE", "--scale", "small", "--data", own, "--seeds=1"])
    (run,) = finetune_glue._finetunings(options)
    assert run.data == tmp_path / "glue-roberta-base" / "RTE"
    command = run.preparation_of(run.data)
    assert command[command.index("--tokens-of") + 1] == str(tmp_path / "roberta-base")
    assert run.progress() == (0, 0)  # before the data are prepared; a line of progress adds them


@pytest.mark.parametrize("pretrained", ["softmax"], indirect=True)
def test_the_command_begins_with_the_pretrained_weights_and_says_what_came_out(
    pretrained, tasks, tmp_path, monkeypatch, capsys
):
    made = finetuning_run(pretrained, tasks / "RTE", tmp_path, lr=0.0)
    few = ("optimizer.weight_decay=0.0", "optimization.max_update=5")
    made = replace(made, overrides=(*made.overrides, *few))
    monkeypatch.setattr(finetune_glue, "_finetunings", lambda options: [made])
    monkeypatch.setattr(FinetuningRun, "prepare_data", lambda self, source: None)
    monkeypatch.setattr(finetune_glue.report, "render", lambda *_: 0)
    monkeypatch.setattr(schedule, "Children", ForkedChildren)
    assert finetune_glue.main(["unread.pt", "RTE", "--jobs", "2"]) == 0
    assert made.finished()
    assert f"{made.folder.name}: {made.outcome()}" in capsys.readouterr().out
    start = checkpoints.load(pretrained)["model"]
    end = checkpoints.load(made.checkpoints / checkpoints.LAST)["model"]
    assert all(torch.equal(start[key], end[key]) for key in start)
    assert set(end) - set(start) == {key for key in end if key.startswith("classification_heads")}


def test_the_command_refuses_in_one_sentence(capsys):
    assert finetune_glue.main(["absent.pt", "RTE", "--scale", "big"]) == 2
    said = capsys.readouterr().err
    assert re.fullmatch(r"finetune_glue: .*no scale 'big'.*\n", said)
    assert finetune_glue.main(["absent.pt", "rte"]) == 2
    said = capsys.readouterr().err
    assert re.fullmatch(r"finetune_glue: .*unknown GLUE task 'rte'.*\n", said)
