"""``prepare``: a user's own text becomes pieces without unknown tokens."""

import json
import shutil

import pytest

from lrpe_fairseq.experiments.__main__ import main
from lrpe_fairseq.experiments.commands import eval_mt
from lrpe_fairseq.experiments.data import corpus, own_text
from lrpe_fairseq.experiments.records.files import ROOT
from lrpe_fairseq.experiments.records.runs import read_run
from tests.end_to_end.commands import run
from tests.end_to_end.forked import ForkedChildren

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "saw",
    "another",
    "dog",
    "that",
    "ran",
    "off",
]
VOCABULARY = 320


def text_of(lines, start=0):
    return "".join(
        " ".join(WORDS[(i * j + start) % len(WORDS)] for j in range(1, 9)) + ".\n"
        for i in range(1, lines + 1)
    )


def prepare(*arguments):
    return main(["prepare", *map(str, arguments)])


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text(text_of(100) + "\n" + text_of(100, 3), encoding="utf-8")
    return path


def test_one_text_is_split_at_line_ends_and_nothing_is_lost(text, tmp_path):
    assert prepare(text, "--dest", tmp_path / "data", "--vocabulary", VOCABULARY) == 0
    parts = [(tmp_path / "data" / "text" / f"{s}.txt").read_text() for s in corpus.SPLITS]
    assert "".join(parts) == text.read_text()
    whole = len(text.read_text())
    for part in parts[1:]:
        assert len(part) / whole == pytest.approx(own_text.HELD_OUT, abs=0.01)


def test_characters_that_training_never_saw_are_bytes_and_not_unknown(text, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("Ein Kätzchen — 猫 🐈 ...\n", encoding="utf-8")
    arguments = ["--dest", tmp_path / "data", "--vocabulary", VOCABULARY]
    assert prepare(text, other, other, *arguments) == 0
    manifest = json.loads((tmp_path / "data" / "manifest.json").read_text())
    assert {split["unknown"] for split in manifest["splits"].values()} == {0}
    pieces = (tmp_path / "data" / "pieces" / "test.txt").read_text()
    assert "<0xE7> <0x8C> <0xAB>" in pieces  # the bytes of 猫
    assert manifest["dictionary"]["symbols"] == VOCABULARY - 1  # fairseq adds <unk> itself
    assert manifest["level"] == "bpe320"


@pytest.fixture
def pairs(tmp_path):
    """Prefixes of three texts in two languages."""
    prefixes = [tmp_path / split for split in corpus.SPLITS]
    for number, prefix in enumerate(prefixes):
        lines = text_of((60, 60, 4)[number], number)
        prefix.with_suffix(".en").write_text(lines, encoding="utf-8")
        prefix.with_suffix(".de").write_text(lines.upper(), encoding="utf-8")
    return prefixes


@pytest.mark.end_to_end
def test_pairs_of_texts_are_trained_on_and_scored(pairs, tmp_path, monkeypatch):
    monkeypatch.setattr(eval_mt, "Children", ForkedChildren)
    data, folder = tmp_path / "data", tmp_path / "run"
    for language in ("--languages", "en", "de"), ("--languages", "de", "en"):
        shutil.rmtree(data, ignore_errors=True)
        assert prepare(*pairs, *language, "--dest", data, "--vocabulary", 60) == 0
        known = json.loads((data / "manifest.json").read_text())
        assert known["languages"] == list(language[1:])
        assert [split["pairs"] for split in known["splits"].values()] == [60, 60, 4]
        source = f"train.{'-'.join(language[1:])}.{language[1]}.bin"
        assert (data / "bin" / source).is_file()
    training = [f"--config-dir={ROOT / 'configs' / 'translation'}", "--config-name=multi30k"]
    own = ["task.source_lang=de", "task.target_lang=en", f"task.data={data / 'bin'}"]
    short = [
        "optimization.max_update=2",
        "dataset.max_tokens=400",
        f"checkpoint.save_dir={folder}",
        "common.cpu=true",
    ]
    run("fairseq_cli.hydra_train", *training, *own, *short, f"hydra.run.dir={tmp_path}")
    scored = [
        "--out",
        str(tmp_path / "scores.json"),
        "--splits",
        "test",
        "--average",
        "1",
        "--beam",
        "1",
    ]
    eval_mt.main([str(folder / "checkpoint_last.pt"), str(data), *scored])
    assert read_run(tmp_path / "scores.json")["metrics"]["test"]["beam"]["sentences"] == 4


def test_a_tokenizer_that_one_has_is_used(text, pairs, tmp_path, capsys):
    assert prepare(text, "--dest", tmp_path / "first", "--vocabulary", VOCABULARY) == 0
    model = tmp_path / "first" / "spm" / "spm.model"
    second = tmp_path / "second"
    assert prepare(text, "--dest", second, "--tokenizer", model) == 0
    for name in ("bin/train.bin", "bin/dict.txt", "spm/spm.model"):
        assert (second / name).read_bytes() == (tmp_path / "first" / name).read_bytes()
    capsys.readouterr()
    assert prepare(text, "--dest", second, "--vocabulary", VOCABULARY) == 2
    assert "choose another --dest" in capsys.readouterr().err
    assert prepare(*pairs, "--languages", "en", "de", "--dest", "x", "--tokenizer", model) == 2
    assert "has pieces of bytes" in capsys.readouterr().err
    for wrong in (text, tmp_path / "none"):
        assert prepare(text, "--dest", tmp_path / "third", "--tokenizer", wrong) == 2
        assert f"{wrong} is no model of SentencePiece" in capsys.readouterr().err
    assert not (tmp_path / "third").exists()


def test_lines_that_do_not_pair_up_are_refused_before_anything_is_written(pairs, tmp_path, capsys):
    german = pairs[1].with_suffix(".de")
    chosen = ("--dest", tmp_path / "data", "--vocabulary", 60, "--languages", "en")
    german.write_text(german.read_text() + "\n")
    assert prepare(*pairs, *chosen, "de") == 2
    assert "60 lines of en and 61 lines of de" in capsys.readouterr().err
    german.write_text("\n" + text_of(59))
    assert prepare(*pairs, *chosen, "de") == 2
    assert "valid.de, line 1, is empty" in capsys.readouterr().err
    assert prepare(*pairs, *chosen, "fr") == 2
    assert "train.fr is not a file" in capsys.readouterr().err
    assert prepare(pairs[0], *chosen, "de") == 2
    assert "--languages needs three texts" in capsys.readouterr().err
    assert prepare(*pairs, *chosen, "en") == 2
    assert "give a source and another target" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


def test_a_second_call_repeats_no_step(text, tmp_path, capsys):
    arguments = [text, "--dest", tmp_path / "data", "--vocabulary", VOCABULARY]
    prepare(*arguments)
    capsys.readouterr()
    prepare(*arguments)
    assert capsys.readouterr().out.count("already done") == 4


def test_data_of_another_text_or_vocabulary_are_not_overwritten(text, tmp_path, capsys):
    data = tmp_path / "data"
    prepare(text, "--dest", data, "--vocabulary", VOCABULARY)
    before = {path: path.read_bytes() for path in data.rglob("*") if path.is_file()}
    other = tmp_path / "other.txt"
    other.write_text(text_of(200, 5), encoding="utf-8")
    capsys.readouterr()
    assert prepare(other, "--dest", data, "--vocabulary", VOCABULARY) != 0
    assert "was made from another text: choose another --dest" in capsys.readouterr().err
    assert prepare(text, "--dest", data, "--vocabulary", VOCABULARY + 1) != 0
    assert "at bpe320 level, not data at bpe321 level: choose another" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in data.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("content", "files", "vocabulary", "sentence"),
    [
        (b"\xff\xfe", 1, VOCABULARY, "is not UTF-8 (invalid start byte at byte 0): convert it"),
        (b" \n\n", 1, VOCABULARY, "has no words: give a text"),
        (
            b"one line\n",
            1,
            VOCABULARY,
            "is too short to be split at line ends: its train split has no words",
        ),
        (
            b"text\n",
            2,
            VOCABULARY,
            "give one text file, or three in the order train, valid, test, not 2",
        ),
        (b"text\n", 1, 300, "--vocabulary 300 is too small: 256 pieces are bytes"),
        (
            text_of(60).encode(),
            1,
            9000,
            "cannot make 9000 pieces: choose --vocabulary at most",
        ),
    ],
)
def test_bad_input_gets_one_sentence(content, files, vocabulary, sentence, tmp_path, capsys):
    path = tmp_path / "mine.txt"
    path.write_bytes(content)
    chosen = ["--dest", tmp_path / "data", "--vocabulary", vocabulary]
    assert prepare(*[path] * files, *chosen) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1
    assert not (tmp_path / "data" / "bin").exists()


def test_a_vocabulary_that_was_too_large_does_not_keep_the_folder(text, tmp_path, capsys):
    data = tmp_path / "data"
    assert prepare(text, "--dest", data, "--vocabulary", 9000) == 2
    assert prepare(text, "--dest", data, "--vocabulary", VOCABULARY) == 0
    assert json.loads((data / "manifest.json").read_text())["level"] == f"bpe{VOCABULARY}"
    assert (data / "bin" / "train.bin").is_file()


def test_a_tokenizer_of_another_level_does_not_stay_behind_a_failed_preparation(tmp_path):
    model = tmp_path / "data" / "spm" / "spm.model"
    steps = corpus.Steps(tmp_path / "data", "it", "bpe")
    steps.run("train", {}, [model], lambda: corpus.write_lines(model, ["pieces"]))
    corpus.Steps(tmp_path / "data", "it", "word")
    assert not model.exists()


def test_a_missing_file_is_named(tmp_path, capsys):
    assert prepare(tmp_path / "none.txt", "--dest", tmp_path / "data") == 2
    assert "none.txt is not a file" in capsys.readouterr().err
