"""data-prep/wikibook, books and gutenberg: shards that fairseq reads, and books split by name."""

import json
import lzma
import random
import shutil

import numpy as np
import pytest

from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.data import folders
from lrpe_fairseq.experiments.data.folders import data_home, joined_shards
from lrpe_fairseq.experiments.data.pieces import SPM, SentencePiece, obtain_gpt2, write_dictionary
from lrpe_fairseq.experiments.families import lm
from lrpe_fairseq.experiments.records.console import UserError
from lrpe_fairseq.experiments.records.files import first_shard, shards_of
from tests.test_data_prep import counted, load, refusal, same_bytes, sentence, serving, unpacked
from tests.test_glue import gpt2_files

wikibook, books, shelves = load("wikibook"), load("books"), load("gutenberg")
TYPES = 264  # of the 259 pieces of gpt2_files
SHARDS = 3


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """A small release of WikiBook, with GPT-2's files beside the shards."""
    folder = gpt2_files(tmp_path_factory.mktemp("wikibook") / "release")
    known = {file: prep.digest(folder / file) for file in ("encoder.json", "vocab.bpe")}
    tokenizer = obtain_gpt2(folder.parent / "pieces", folder, known)
    rng = np.random.default_rng(0)
    for number in range(SHARDS):
        shard = folder / f"bin-shard{number}-8"
        shard.mkdir()
        (shard / "empty").write_text("")
        write_dictionary(tokenizer, shard / "empty", shard / "dict.txt")
        for split, lines in (("train", 5), ("valid", 2)):
            rows = [[*rng.integers(4, TYPES, 10 + number), prep.FAIRSEQ_EOS] for _ in range(lines)]
            prep.write_indexed(rows, shard / split, np.uint16)
        (shard / "empty").unlink()
    return folder


@pytest.fixture
def prepare(release, tmp_path):
    """Prepare the small release in ``tmp_path / "data"``."""

    def made(count=SHARDS, from_dir=release, **keywords):
        chosen = {**known(release), "types": TYPES, **keywords}
        return wikibook.prepare(tmp_path / "data", count, from_dir, **chosen)

    return made


def test_shards_are_in_numeric_order_and_data_without_them_are_bin(tmp_path):
    assert shards_of(tmp_path) == [tmp_path / "bin"]
    assert data_home(joined_shards(tmp_path)) == tmp_path
    for number in (10, 9, 0):
        (tmp_path / "bin" / f"shard{number}").mkdir(parents=True)
    (tmp_path / "bin" / "shards-old").mkdir()
    assert [path.name for path in shards_of(tmp_path)] == ["shard0", "shard9", "shard10"]
    assert data_home(joined_shards(tmp_path)) == tmp_path
    assert first_shard(tmp_path).name == "shard0"


def same_shards(data, release):
    for number in range(SHARDS):
        same_bytes(data / "bin" / f"shard{number}", release / f"bin-shard{number}-8")


def test_the_published_shards_are_copied_verified_and_counted(prepare, release, tmp_path, capsys):
    made = prepare()
    same_shards(tmp_path / "data", release)
    assert made["splits"]["train"]["tokens_by_shard"] == [55, 60, 65]
    assert made["splits"]["train"]["tokens"] == 180
    assert made["splits"]["valid"]["tokens"] == 22  # of the first shard
    assert made["dictionary"]["size"] == TYPES
    assert folders.dataset_name(tmp_path / "data") == "wikibook-gpt2"
    capsys.readouterr()
    assert prepare() == made
    assert "obtain: already done" in capsys.readouterr().out


def test_until_every_shard_is_there_nothing_is_prepared(prepare, release, tmp_path):
    part = shutil.copytree(release, tmp_path / "part")
    shutil.move(part / "bin-shard2-8", tmp_path / "later")
    assert "bin-shard2-8/dict.txt does not exist" in refusal(prepare, from_dir=part)
    assert not folders.is_prepared(tmp_path / "data")
    shutil.move(tmp_path / "later", part / "bin-shard2-8")
    prepare(from_dir=part)
    assert folders.is_prepared(tmp_path / "data")
    path = tmp_path / "data" / "manifest.json"
    path.write_text(path.read_text().replace("splits", "unread"))  # as if it had been killed
    assert not folders.is_prepared(tmp_path / "data")


@pytest.mark.parametrize(
    ("file", "damage", "said"),
    [
        ("bin-shard1-8/train.bin", lambda b: b[:-2], "bytes instead of the 120 of its index"),
        ("bin-shard0-8/train.idx", lambda b: b"x" + b[1:], "is not a fairseq index"),
        ("bin-shard2-8/dict.txt", lambda b: b[:-1] + b"7\n", "differs from"),
        ("bin-shard0-8/dict.txt", lambda b: b + b"other 1\n", "not the dictionary of GPT-2's"),
        ("bin-shard0-8/valid.bin", lambda b: b[:-2] + b"\x08\x01", "has the token 264, but"),
    ],
)
def test_a_damaged_file_is_named_and_nothing_is_prepared(
    prepare, release, tmp_path, file, damage, said
):
    source = shutil.copytree(release, tmp_path / "source")
    (source / file).write_bytes(damage((source / file).read_bytes()))
    assert said in refusal(prepare, from_dir=source)
    assert not (tmp_path / "data" / "bin").exists()


@pytest.fixture
def server(release):
    """A server of the release, with the publisher's list of checksums."""
    for number in range(SHARDS):
        name = f"bin-shard{number}-8"
        entries = [{"path": f"{name}/dict.txt", "oid": "0" * 40}]
        for path in [*(release / name).glob("*.bin"), *(release / name).glob("*.idx")]:
            entries.append({"path": f"{name}/{path.name}", "lfs": {"oid": prep.digest(path)}})
        (release / f"{name}.list").write_text(json.dumps(entries))
    with serving(release) as running:
        yield running


def test_downloads_are_verified_by_the_publishers_checksums_and_resumed(
    prepare, server, release, tmp_path
):
    source = wikibook.Source(f"{server.url}{{}}/", f"{server.url}{{}}.list")
    obtain_gpt2(tmp_path / "data", release, **known(release))
    target = tmp_path / "data" / "raw" / "shard0" / "train.bin.part"
    target.parent.mkdir(parents=True)
    target.write_bytes((release / "bin-shard0-8" / "train.bin").read_bytes()[:20])
    prepare(from_dir=None, source=source)
    assert "bytes=20-" in server.asked
    same_shards(tmp_path / "data", release)


def known(folder):
    """The keyword with the checksums of the small GPT-2's files."""
    return {"sha256": {file: prep.digest(folder / file) for file in ("encoder.json", "vocab.bpe")}}


def test_books_are_split_by_their_names_and_cut_into_pieces(tmp_path):
    """Two hundred books of two lines, in folders, and later one more."""
    shelf, data = gpt2_files(tmp_path / "shelf"), tmp_path / "data"
    texts = {f"{'abc'[n % 3]}/book{n}.txt": b"The  %dth book\nthe end\n" % n for n in range(200)}
    made = books.prepare("books", data, unpacked(shelf, texts), **known(shelf))
    counts = counted(made, "documents")
    assert sum(counts.values()) == 200
    assert counts["train"] > 190
    assert min(counts.values()) > 0
    titles = (data / "documents" / "valid.tsv").read_text().splitlines()
    first = titles[0].partition("\tbook")[2]
    expected = f"The {first}th book\nthe end\n\n"
    assert (data / "text" / "valid.txt").read_text().startswith(expected)
    assert folders.dataset_name(data) == "books-gpt2"
    (shelf / "a" / "book-more.txt").write_text("one more\n")
    now = counted(books.prepare("books", data, shelf, **known(shelf)), "documents")
    assert sum(now.values()) == 201
    assert all(now[split] >= counts[split] for split in counts)


def test_pg19_is_read_from_a_folder_or_downloaded_and_a_part_has_its_own_name(tmp_path):
    gutenberg, official = gpt2_files(tmp_path / "gutenberg"), {"train": 4, "valid": 2, "test": 1}
    for split, theirs in books.PUBLISHED.items():
        names = [f"{theirs}/{number}.txt" for number in range(official[split])]
        unpacked(gutenberg, {name: f"Text of {name}\n\nthe end\n".encode() for name in names})
        (gutenberg / f"{theirs}_files.txt").write_text("\n".join(reversed(names)) + "\n")
    options = {"official": official, **known(gutenberg)}
    made = books.prepare("pg19", tmp_path / "from", gutenberg, **options)
    assert counted(made, "documents") == official
    assert folders.dataset_name(tmp_path / "from") == "pg19-gpt2"

    obtain_gpt2(tmp_path / "web", gutenberg, options["sha256"])
    with serving(gutenberg) as running:
        source = books.Source(f"{running.url}{{}}_files.txt", f"{running.url}{{}}/")
        part = books.prepare("pg19", tmp_path / "web", None, limit=3, source=source, **options)
    assert part["splits"]["train"]["documents"] == 3
    assert part["splits"]["valid"] == made["splits"]["valid"]
    assert folders.dataset_name(tmp_path / "web") == "pg19-first-3-gpt2"


def small_books(folder):
    """Write compressed books, and return the checksums; test has letters that train lacks."""
    rng, sha256 = random.Random(0), {}
    for name, count in {"train-00": 4, "train-01": 3, "valid": 2, "test": 3}.items():
        lines = []
        for number in range(count):
            lines += [f"<|book|> Title {number} — Author", "", "  CHAPTER  I ", *([""] * number)]
            lines += [sentence(rng) for _ in range(40)]
        lines += ["λόγος, naïve"] * (name == "test")
        file = folder / f"{name}.txt.xz"
        file.write_bytes(lzma.compress("\n".join(lines).encode() + b"\n"))
        sha256[name] = prep.digest(file)
    return sha256


def test_books_keep_their_marks_and_titles_and_no_text_is_unknown(tmp_path):
    """Compressed files in 300 pieces, of which 256 are bytes."""
    dest, sha256 = tmp_path / "data", small_books(tmp_path)
    made = shelves.prepare(dest, tmp_path, 1, vocab_size=300, sha256=sha256)
    assert folders.dataset_name(dest) == "gutenberg-first-1-bpe300"
    for split, books_ in {"train": 4, "valid": 2, "test": 3}.items():
        text = (dest / "text" / f"{split}.txt").read_text().splitlines()
        counts, index = made["splits"][split], (dest / "documents" / f"{split}.tsv").read_text()
        starts = [row.split("\t") for row in index.splitlines()]
        assert [title for _, title in starts] == [f"Title {n} — Author" for n in range(books_)]
        places = [str(place) for place, line in enumerate(text) if line == shelves.BOOK]
        assert places == [first for first, _ in starts]
        assert (counts["documents"], counts["lines"], counts["unknown"]) == (books_, len(text), 0)
        assert counts["words"] == sum(len(line.split()) for line in text) - books_
        assert counts["words_with_eos"] == counts["words"] + counts["lines"]
    lines = (dest / "pieces" / "test.txt").read_text().splitlines()
    assert lines[0] == f"▁{shelves.BOOK}"
    decoded = SentencePiece(dest / SPM)._processor.decode(lines[-1].split())
    assert decoded == "λόγος, naïve"
    found = lm.with_words({"loss": 2.0, "tokens": 100}, dest, "test")["word_ppl"]
    assert found == pytest.approx(2 ** (200 / made["splits"]["test"]["words"]))


def test_the_first_held_out_books_are_a_data_set_of_their_own(tmp_path):
    sha256 = small_books(tmp_path)
    usual = {"vocab_size": 300, "sha256": sha256}
    whole = shelves.prepare(tmp_path / "whole", tmp_path, 1, **usual)
    part = shelves.prepare(tmp_path / "part", tmp_path, 1, held_out=(1, 2), **usual)
    assert folders.dataset_name(tmp_path / "part") == "gutenberg-first-1-bpe300-valid1-test2"
    assert part["splits"]["train"] == whole["splits"]["train"]
    found = {split: own["documents"] for split, own in part["splits"].items()}
    assert found == {"train": 4, "valid": 1, "test": 2}
    for split in ("valid", "test"):
        texts = [
            (tmp_path / name / "text" / f"{split}.txt").read_text() for name in ("whole", "part")
        ]
        assert texts[0].startswith(texts[1])
        assert texts[0] != texts[1]
    with pytest.raises(UserError, match="at least one book"):
        shelves.prepare(tmp_path / "none", tmp_path, 1, held_out=(0, 2), **usual)
