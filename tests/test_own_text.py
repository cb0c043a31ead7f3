"""``prepare``: a user's own text becomes pieces without unknown tokens."""

import json

import pytest

from lrpe_fairseq.experiments.__main__ import main
from lrpe_fairseq.experiments.data import corpus, own_text

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
