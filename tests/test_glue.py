"""GLUE: the files as published, labels at their numbers, metrics as GLUE defines them."""

import gzip
import json
import math
import random
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from fairseq.data.encoders.gpt2_bpe_utils import bytes_to_unicode

from lrpe_fairseq.experiments import families
from lrpe_fairseq.experiments.commands import train_row
from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.data import glue
from lrpe_fairseq.experiments.data import pieces as tokenizers
from lrpe_fairseq.experiments.data.pieces import GPT2, tokenizer_of
from lrpe_fairseq.experiments.records import checkpoints
from lrpe_fairseq.experiments.records.files import ROOT
from lrpe_fairseq.experiments.runner.processes import RunFailed
from tests.test_data_prep import counted, load, refusal, same_bytes, unpacked

prepare_glue = load("glue")

SENTENCES = ['a "cat sat', "the dog\u2028ran", "no bird sings", "it rains", 'quotes "" stay']


def write_task(folder, name, sizes, bom=False):
    """Random files of one task in the official form."""
    task, rng = glue.TASKS[name], random.Random(0)
    for split, size in sizes.items():
        rows = [["column"] * 12] if task.header else []
        for _ in range(size):
            row = ["x"] * 12
            for column in task.inputs:
                row[column] = rng.choice(SENTENCES)
            row[task.label] = rng.choice(task.labels or ["0.000", "2.5", "5.000"])
            rows.append(row)
        path = folder / name / f"{task.files[split]}.tsv"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = "".join("\t".join(row) + "\n" for row in rows)
        path.write_text("\ufeff" * bom + text, encoding="utf-8", newline="\n")


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """A prepared corpus: its tokenizer and dictionary."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "train").write_text("\n".join(SENTENCES * 5) + "\n", encoding="utf-8")
    steps = prep.Steps(folder, "test", "bpe")
    texts = {"train": folder / "train"}
    tokenizers.run_pieces(steps, texts, tokenizers.run_sentencepiece(steps, texts, 40))
    return folder


def run(name, dest, pieces, source):
    return prepare_glue.prepare(name, dest, prepare_glue.pieces_of(pieces), source)


@pytest.mark.parametrize("name", glue.TASKS)
def test_every_task_is_prepared_line_for_line_with_its_labels_at_their_numbers(
    name, tmp_path, pieces
):
    task = glue.TASKS[name]
    sizes = dict.fromkeys(task.files, 6)
    write_task(tmp_path / "from", name, sizes, bom=True)
    if name == "QQP":
        (tmp_path / "from/QQP/train.tsv").rename(tmp_path / "from/QQP/train.fewshot.tsv")
    if name == "RTE":
        plain = tmp_path / "from" / name / "dev.tsv"
        Path(f"{plain}.gz").write_bytes(gzip.compress(plain.read_bytes()))
        plain.unlink()
    manifest = run(name, tmp_path / "dest", pieces, tmp_path / "from")
    assert counted(manifest, "examples") == sizes
    assert manifest["splits"]["train"]["official"] == task.examples["train"]
    folder = tmp_path / "dest" / name
    processor = tokenizer_of(pieces)._processor
    for split in task.files:
        read = list(glue.read_examples(folder / "raw" / f"{task.files[split]}.tsv", task))
        for index in range(len(task.inputs)):
            encoded = list(prep.read_lines(folder / "text" / f"{split}.input{index}"))
            decoded = [processor.decode(line.split()) for line in encoded]
            assert decoded == [sentences[index] for sentences, _ in read]
            binary = prep.count_binary(folder / "bin" / f"input{index}" / split)
            assert binary["samples"] == 6
            assert binary["tokens"] == sum(len(line.split()) + 1 for line in encoded)
        labels = [label for _, label in read]
        if task.labels:
            labels = [str(task.labels.index(label)) for label in labels]
            words = prep.read_lines(folder / "bin" / "label" / "dict.txt")
            assert [w.split()[0] for w in words] == [str(n) for n in range(task.classes)]
            assert prep.count_binary(folder / "bin" / "label" / split)["unknown"] == 0
        else:
            assert list(prep.read_lines(folder / "bin" / "label" / f"{split}.label")) == labels
        assert list(prep.read_lines(folder / "text" / f"{split}.label")) == labels
    dictionaries = (folder / "bin" / "input0" / "dict.txt", pieces / "bin" / "dict.txt")
    assert dictionaries[0].read_text() == dictionaries[1].read_text()


def test_what_is_not_the_task_is_refused_in_one_sentence(tmp_path, pieces):
    def refused(case):
        dest = tmp_path / f"{case}-data"
        said = refusal(run, "RTE", dest, pieces, tmp_path / case)
        assert not (dest / "RTE" / "bin").exists()
        return said

    write_task(tmp_path / "short", "RTE", {"train": 5})
    assert "contains no dev.tsv" in refused("short")
    write_task(tmp_path / "many", "RTE", {"train": 5, "valid": 278})
    assert "278 examples instead of 277" in refused("many")
    write_task(tmp_path / "other", "RTE", {"train": 5, "valid": 277})
    assert "differs from the official" in refused("other")
    path = tmp_path / "label" / "RTE" / "dev.tsv"
    write_task(tmp_path / "label", "RTE", {"train": 5, "valid": 5})
    path.write_text(path.read_text().replace("entailment\n", "perhaps\n", 1))
    assert re.search("line 2.*perhaps", refused("label"))
    path.write_text("index\ta\tb\tlabel\n0\tonly two\n")
    assert "only 2 columns" in refused("label")
    path.write_bytes("index\ta\tb\tlabel\n0\tcafé\tb\tentailment\n".encode("latin-1"))
    assert "UTF-8" in refused("label")
    assert "has no tokenizer" in refusal(prepare_glue.pieces_of, tmp_path)


def test_the_official_archive_is_unpacked_and_a_broken_one_is_refused(tmp_path, monkeypatch):
    write_task(tmp_path / "from", "QNLI", {"train": 3, "valid": 3})
    packed = Path(shutil.make_archive(tmp_path / "QNLIv2", "zip", tmp_path / "from"))
    monkeypatch.setattr(glue, "GLUE", f"{tmp_path.as_uri()}/")
    glue.obtain("QNLI", tmp_path / "raw", None)
    same_bytes(tmp_path / "raw", tmp_path / "from" / "QNLI")
    packed.write_bytes(packed.read_bytes()[:-40])
    said = refusal(glue.obtain, "QNLI", tmp_path / "cut", None)
    assert "truncated or not the expected version" in said
    assert list((tmp_path / "cut").iterdir()) == []


def test_mrpc_is_put_together_from_its_pairs_and_the_list_of_dev_pairs(tmp_path):
    header = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n"
    rows = [f'{n % 2}\t{n}\t{n + 1}\tsay "one\tsay two\r\n' for n in range(0, 10, 2)]
    (tmp_path / "pairs").write_text(header + "".join(rows), encoding="utf-8", newline="")
    (tmp_path / "ids").write_text("2\t3\n6\t7\n")
    glue.split_mrpc(tmp_path / "pairs", tmp_path / "ids", tmp_path)
    task = glue.TASKS["MRPC"]
    train, dev = (list(glue.read_examples(tmp_path / f"{f}.tsv", task)) for f in ("train", "dev"))
    assert (len(train), len(dev)) == (3, 2)
    assert dev[0] == (['say "one', "say two"], "0")


def test_metrics_are_in_percent_and_constant_predictions_have_no_correlation():
    cola = glue.scores(glue.TASKS["CoLA"], [0, 1, 1, 0], [0, 1, 0, 0])
    assert cola == pytest.approx({"matthews": 100 / math.sqrt(3), "examples": 4})
    mrpc = glue.scores(glue.TASKS["MRPC"], [0, 1, 1, 0], [0, 1, 0, 0])
    assert mrpc == pytest.approx({"accuracy": 75, "f1": 200 / 3, "examples": 4})
    stsb = glue.scores(glue.TASKS["STS-B"], [0.1, 0.2, 3.0], [1.0, 2.0, 5.0])
    assert stsb["spearman"] == pytest.approx(100)
    assert 90 < stsb["pearson"] < 100
    equal = glue.scores(glue.TASKS["STS-B"], [0, 0, 0], [0, 1, 1])
    assert equal["pearson"] == equal["spearman"] == 0


def gpt2_files(folder):
    """The 256 bytes and two merges, in the form of the published files."""
    names = [*bytes_to_unicode().values(), "th", "the", "<|endoftext|>"]
    encoder = json.dumps({name: number for number, name in enumerate(names)}).encode()
    merges = b"#version: 0.2\nt h\nth e\n"
    return unpacked(folder, {"encoder.json": encoder, "vocab.bpe": merges})


def test_gpt2_pieces_give_the_text_back_and_all_have_a_place_in_the_dictionary(tmp_path):
    tokenizer = GPT2(gpt2_files(tmp_path / "gpt2"))
    lines = ["the cat — the <unk>", "", " = Title = "]
    cut = list(tokenizer.cut(lines))
    assert [tokenizer._encoder.decode(map(int, line.split())) for line in cut] == lines
    assert cut[0].split()[0] == str(257)  # "the"
    (tmp_path / "pieces").write_text("\n".join(cut) + "\n")
    tokenizers.write_dictionary(tokenizer, tmp_path / "pieces", tmp_path / "dict.txt")
    assert prep.count_types(tmp_path / "dict.txt") == {"size": 264, "symbols": 259}
    assert isinstance(tokenizer_of(tmp_path), GPT2)


FINE_TUNED = [
    ("tmlr-table1", "paper"),
    ("tmlr-table1", "small"),
    ("table3", "paper"),
    ("finetuning-rate", "small"),
]


@pytest.mark.parametrize(("name", "scale"), FINE_TUNED)
def test_without_its_checkpoint_a_run_names_the_command_that_makes_it(name, scale, tmp_path):
    every = families.runs(families.load_named(name), scale, [1])
    for checkpoint, run in {run.checkpoint: run for run in every}.items():
        absent = replace(run, checkpoint=tmp_path / checkpoint.relative_to(ROOT))
        with pytest.raises(RunFailed, match=r"checkpoint_best\.pt does not exist") as refused:
            absent.require_inputs()
        words = shlex.split(str(refused.value).partition("train_row ")[2])
        trained = train_row._run(train_row._parse(words))
        assert trained.checkpoints / checkpoints.BEST == checkpoint
