"""data-prep/: whole documents, whole files, verified counts, and nothing done twice."""

import contextlib
import dataclasses
import gzip
import hashlib
import http.server
import importlib.util
import io
import itertools
import lzma
import os
import random
import re
import shutil
import sys
import tarfile
import threading
import zipfile
from pathlib import Path

import pytest
import sentencepiece

from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.data import pieces
from lrpe_fairseq.experiments.data.pieces import SentencePiece
from lrpe_fairseq.experiments.records.console import UserError
from tests.end_to_end.commands import run_here

DATA_PREP = Path(__file__).resolve().parents[1] / "data-prep"


def load(name):
    """Import data-prep/<name>/prepare.py, which is a script and in no package."""
    spec = importlib.util.spec_from_file_location(
        f"prepare_{name}", DATA_PREP / name / "prepare.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


pydoc, wikitext = load("pydoc"), load("wikitext")
multi30k, newstest, wmt14 = load("multi30k"), load("newstest"), load("wmt14-en-de")


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def tar(members, mode="w"):
    """A tar archive; None stands for a link to a password file."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            if content is None:
                info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
            info.size = len(content or b"")
            archive.addfile(info, io.BytesIO(content or b""))
    return out.getvalue()


def unpacked(folder, members):
    for name, content in members.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def same_bytes(one, other):
    assert files(one) == files(other)
    for file in files(one):
        assert (one / file).read_bytes() == (other / file).read_bytes(), file


def counted(manifest, what):
    """What the manifest counts in each split."""
    return {split: counts[what] for split, counts in manifest["splits"].items()}


def refusal(call, *args, **kwargs):
    """Return the one sentence with which a call refuses its input."""
    with pytest.raises(UserError) as refused:
        call(*args, **kwargs)
    message = str(refused.value)
    assert "\n" not in message
    assert message.endswith(".")
    assert ". " not in message
    return message


def sentence(rng):
    words = ["".join(rng.choices(("ka", "lo", "mi", "re", "tu"), k=3)) for _ in range(12)]
    return " ".join(words) + "."


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A small standard library: 120 modules, each with one paragraph that all share."""
    stdlib, rng = tmp_path_factory.mktemp("stdlib"), random.Random(1)
    (stdlib / "test").mkdir()
    (stdlib / "test" / "support.py").write_text('"""A test suite does not belong here."""\n')
    for number in range(120):
        underlined = f"    {sentence(rng)}\n    ------------\n\n    >>> code()\n    'not English'\n"
        (stdlib / f"m{number}.py").write_text(
            f'"""{sentence(rng)}\n\nEvery module says this very sentence.\n"""\n\n'
            f'def f():\n    """{sentence(rng)}\n\n{underlined}    """\n'
        )
    return stdlib


@pytest.fixture(scope="module")
def topics():
    rng = random.Random(2)
    made = {f"t{number}": f"{sentence(rng)}\n\n   {sentence(rng)}\n" for number in range(40)}
    return {**made, "twice": made["t0"]}


@pytest.fixture(scope="module")
def embedded(library, topics, tmp_path_factory):
    dest = tmp_path_factory.mktemp("embedded") / "dest"
    pydoc.prepare(dest, 60, library, topics)
    return dest


def documents(dest, split):
    """Read name -> paragraphs back from text/ and documents/."""
    lines = list(prep.read_lines(dest / "text" / f"{split}.txt"))
    index = [row.split("\t") for row in (dest / "documents" / f"{split}.tsv").open()]
    starts = [int(number) for number, _ in index] + [len(lines)]
    bodies = [lines[a:b] for a, b in itertools.pairwise(starts)]
    return {name.strip(): body for (_, name), body in zip(index, bodies, strict=True)}


def test_every_document_of_pydoc_is_whole_and_in_one_split(embedded):
    splits = {split: documents(embedded, split) for split in prep.SPLITS}
    names = [name for found in splits.values() for name in found]
    assert len(names) == len(set(names)) == 160
    assert all(splits.values())
    for found in splits.values():
        for name, body in found.items():
            assert body[-1] == ""
            assert all(body[:-1])
            assert len(body) - 1 >= (3 if name.startswith("module:") else 2)


def test_no_paragraph_of_pydoc_occurs_twice(embedded):
    texts = [(embedded / "text" / f"{split}.txt").read_text() for split in prep.SPLITS]
    paragraphs = [line for text in texts for line in text.split("\n") if line]
    assert len(paragraphs) == len(set(paragraphs))
    assert paragraphs.count("Every module says this very sentence.") == 1


def test_the_text_of_pydoc_has_no_code_and_no_underlines(embedded):
    texts = [(embedded / "text" / f"{split}.txt").read_text() for split in prep.SPLITS]
    assert not re.search(r">>>|---|does not belong", "".join(texts))


def test_without_a_vocabulary_size_the_text_is_cut_into_characters(
    embedded, library, topics, tmp_path
):
    counts = pydoc.prepare(tmp_path / "dest", None, library, topics)["splits"]
    for split in prep.SPLITS:
        text = (embedded / "text" / f"{split}.txt").read_text()
        cut = (tmp_path / "dest" / "pieces" / f"{split}.txt").read_text()
        assert cut.replace(" ", "").replace("▁", " ") == text
        assert counts[split]["tokens"] == len(text)
        assert counts[split]["unknown"] == 0


def test_the_binary_form_is_that_of_fairseq_preprocess(embedded, tmp_path):
    texts = {split: embedded / "text" / f"{split}.txt" for split in prep.SPLITS}
    given = [part for split in texts for part in (f"--{split}pref", texts[split])]
    options = "--only-source --workers 1 --destdir"
    run_here("fairseq_cli.preprocess", options, tmp_path / "theirs", *given)
    (tmp_path / "theirs" / "preprocess.log").unlink()
    prep.write_binary(texts, tmp_path / "ours", workers=2)
    same_bytes(tmp_path / "ours", tmp_path / "theirs")
    assert prep.count_binary(tmp_path / "ours" / "valid")["unknown"] > 0


def article(rng, title):
    """Return an article as WikiText has it, a line that looks like a heading included."""
    text = "".join(f" {sentence(rng)[:-1]} <unk> @-@ {rng.randrange(9)} . \n" for _ in range(6))
    return f" \n = {title} = \n \n{text} = not a title = \n{text} \n = = Part = = \n \n{text}"


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("release"), random.Random(3)
    for split, count in (("train", 9), ("valid", 2), ("test", 2)):
        text = "".join(article(rng, f"Title {split} {number}") for number in range(count))
        (folder / f"wiki.{split}.tokens").write_text(text)
    with zipfile.ZipFile(folder / "small-v1.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for split in prep.SPLITS:
            archive.write(folder / f"wiki.{split}.tokens", f"small/wiki.{split}.tokens")
    return folder


@pytest.fixture(scope="module")
def table(release):
    """What the small release must be, counted here in another way than the script counts."""
    texts = {split: (release / f"wiki.{split}.tokens").read_text() for split in prep.SPLITS}
    types = len(set(texts["train"].split()))
    small = wikitext.WikiText(
        archive="small-v1.zip",
        archive_sha256=sha256((release / "small-v1.zip").read_bytes()),
        checksums={split: sha256(text.encode()) for split, text in texts.items()},
        tokens={split: len(text.replace("\n", " </s> ").split()) for split, text in texts.items()},
        word_types=types,
        dictionary_size=-(-(types + 3) // 8) * 8,
    )
    return {"small": small}


@pytest.fixture
def stored(release, tmp_path):
    """A folder for --from that a test may damage: one file plain, one .gz, one .zip."""
    folder = tmp_path / "stored"
    folder.mkdir()
    train, valid, test = (f"wiki.{split}.tokens" for split in prep.SPLITS)
    (folder / train).write_bytes((release / train).read_bytes())
    (folder / f"{valid}.gz").write_bytes(gzip.compress((release / valid).read_bytes()))
    with zipfile.ZipFile(folder / f"{test}.zip", "w") as archive:
        archive.write(release / test, test)
    return folder


def test_words_are_verified_against_the_table(stored, table, tmp_path):
    manifest = wikitext.prepare("small", "word", tmp_path / "w", from_dir=stored, corpora=table)
    assert counted(manifest, "tokens") == table["small"].tokens
    assert manifest["dictionary"]["size"] == table["small"].dictionary_size
    assert list(counted(manifest, "documents").values()) == [9, 2, 2]
    assert {"manifest.json", "bin/train.bin"} <= set(files(tmp_path / "w"))
    message = refusal(wikitext.prepare, "small", "bpe", tmp_path / "w", corpora=table)
    assert "word level" in message
    assert "--dest" in message


def test_counts_that_differ_from_the_table_are_refused_and_no_binary_is_left(
    stored, table, tmp_path
):
    tokens = {**table["small"].tokens, "valid": table["small"].tokens["valid"] + 1}
    other = {"small": dataclasses.replace(table["small"], tokens=tokens)}
    given = {"vocab_size": 60, "from_dir": stored, "corpora": other}
    message = refusal(wikitext.prepare, "small", "bpe", tmp_path / "w", **given)
    assert re.search(f"valid.*{tokens['valid']:,}", message)
    assert not (tmp_path / "w" / "bin").exists()


def test_pieces_encode_the_very_words_and_unk_is_one_piece(release, tmp_path):
    text, model, encoded = release / "wiki.train.tokens", tmp_path / "m", tmp_path / "pieces"
    pieces.train_sentencepiece(prep.read_lines(text), model, 60)
    pieces.encode(SentencePiece(model), text, encoded)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    rows = [line.split() for line in prep.read_lines(encoded)]
    assert [processor.decode(line) for line in rows] == list(prep.read_lines(text))
    assert sum(line.count("▁<unk>") for line in rows) == text.read_text().count("<unk>")


def test_a_piece_absent_from_the_encoded_train_split_is_still_in_the_dictionary(tmp_path):
    """BPE merges "ab" away in train, yet "a" alone must not become <unk> elsewhere."""
    pieces.train_sentencepiece(["ab ab cab cab dab"] * 9, tmp_path / "m", 9)
    (tmp_path / "train").write_text("ab ab\n")
    tokenizer = SentencePiece(tmp_path / "m")
    pieces.encode(tokenizer, tmp_path / "train", tmp_path / "pieces")
    pieces.write_dictionary(tokenizer, tmp_path / "pieces", tmp_path / "dict.txt")
    assert "a 0" in prep.read_lines(tmp_path / "dict.txt")
    assert "a" not in (tmp_path / "pieces").read_text().split()
    assert prep.count_types(tmp_path / "dict.txt") == {"size": 16, "symbols": 8}


@pytest.mark.parametrize("form", ["plain", "gz", "zip", "archive", "absent"])
def test_truncated_input_is_refused_in_one_sentence_and_nothing_is_left(
    form, release, table, tmp_path
):
    name, archive = "wiki.train.tokens", (release / "small-v1.zip").read_bytes()
    content = (release / name).read_bytes()
    file, packed = {
        "plain": (name, content),
        "gz": (f"{name}.gz", gzip.compress(content)),
        "zip": (f"{name}.zip", archive),
        "archive": ("small-v1.zip", archive),
        "absent": ("README", content),
    }[form]
    (tmp_path / file).write_bytes(packed[: len(packed) * 2 // 3])
    dest = tmp_path / "dest"
    given = {"from_dir": tmp_path, "corpora": table}
    assert name in refusal(wikitext.prepare, "small", "word", dest, **given)
    assert files(dest) == []


class Server(http.server.ThreadingHTTPServer):
    """Serves a folder on 127.0.0.1; may cut answers short and may know no ranges."""

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.cut, self.ranges = folder, 0, True
        self.asked: list[str | None] = []
        self.url = f"http://127.0.0.1:{self.server_port}/"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        """Announce everything, and send ``cut`` bytes less the first time."""
        content, wanted = (self.server.folder / self.path[1:]).read_bytes(), self.headers["Range"]
        self.server.asked.append(wanted)
        start = int(wanted[6:-1]) if wanted and self.server.ranges else 0
        self.send_response(416 if start > len(content) else 206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(content[start : len(content) - self.server.cut])
        self.server.cut = 0

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def serving(folder):
    running = Server(folder)
    thread = threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield running
    finally:
        running.shutdown()
        running.server_close()
        thread.join()


@pytest.fixture
def server(release):
    with serving(release) as running:
        yield running


def test_an_interrupted_download_is_resumed_by_the_next_run(
    server, release, table, tmp_path, monkeypatch
):
    name, checksum = "small-v1.zip", table["small"].archive_sha256
    size = (release / name).stat().st_size
    server.cut = 1000
    urls = [server.url + name]
    monkeypatch.setattr(prep, "ATTEMPTS", 1)
    message = refusal(prep.obtain, name, urls, checksum, tmp_path)
    assert "the connection closed 1,000 bytes before the end" in message
    assert "run the same command again to resume" in message
    assert files(tmp_path) == [f"{name}.part"]
    prep.obtain(name, urls, checksum, tmp_path)
    assert server.asked == [None, f"bytes={size - 1000}-"]
    assert files(tmp_path) == [name]


def test_a_download_is_unpacked_and_verified_and_the_archive_is_not_kept(
    server, table, tmp_path, monkeypatch
):
    monkeypatch.setattr(prep.time, "sleep", lambda seconds: None)
    server.cut = 1000
    mirrors = ["http://127.0.0.1:1/", server.url]
    texts = wikitext.obtain_splits(table["small"], tmp_path, None, mirrors)
    assert len(server.asked) == 2
    assert server.asked[1]
    assert files(tmp_path) == sorted(path.name for path in texts.values())


@pytest.mark.parametrize(("ranges", "size"), [(False, 700), (True, 10**6)])
def test_a_part_that_cannot_be_resumed_is_begun_anew(ranges, size, server, table, tmp_path):
    name, checksum = "small-v1.zip", table["small"].archive_sha256
    server.ranges = ranges
    (tmp_path / f"{name}.part").write_bytes(b"x" * size)
    prep.obtain(name, [server.url + name], checksum, tmp_path)
    assert files(tmp_path) == [name]
    assert sha256((tmp_path / name).read_bytes()) == checksum


@pytest.mark.parametrize("kind", ["folder", "download", "packed"])
def test_another_version_is_refused_and_not_kept(kind, tmp_path):
    """file:// addresses are served by urllib as http is; md5 and sha1 are understood too."""
    there, into, packed = tmp_path / "there", tmp_path / "into", kind == "packed"
    there.mkdir()
    file = there / ("text.gz" if packed else "text")
    file.write_bytes(gzip.compress(b"another") if packed else b"another")
    options = {"packed": packed, "from_dir": there if kind == "folder" else None}
    for name in ("md5", "sha1", "sha256"):
        wrong = hashlib.new(name, b"another!").hexdigest()
        refusal(prep.obtain, "text", [file.as_uri()], wrong, into / name, **options)
        assert not list((into / name).rglob("text"))
        known = hashlib.new(name, b"another").hexdigest()
        found = prep.obtain("text", [file.as_uri()], known, into / name, **options)
        assert found.read_bytes() == b"another"


def test_a_step_runs_again_when_its_input_or_its_output_changed_and_only_then(tmp_path):
    source, target, runs = tmp_path / "source", tmp_path / "target", []

    def run(setting):
        steps, reads = prep.Steps(tmp_path, "corpus", "word"), {"source": source, "at": setting}
        steps.run("copy", reads, [target], lambda: runs.append(shutil.copy(source, target)))
        steps.finish(lambda: {"splits": {}})
        return len(runs)

    source.write_text("one")
    assert (run(1), run(1)) == (1, 1)
    source.write_text("two")
    assert (run(1), run(1)) == (2, 2)
    assert (run(2), run(2)) == (3, 3)
    target.unlink()
    assert (run(2), run(2)) == (4, 4)


@pytest.fixture(scope="module")
def captions(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("captions"), random.Random(2)
    for split, name in multi30k.FILES.items():
        lines = [sentence(rng) for _ in range(300 if split == "train" else 20)]
        for language, text in (("en", lines), ("de", [line.upper() for line in lines])):
            content, packed = "".join(line + "\n" for line in text).encode(), split == "train"
            path = folder / f"{name}.{language}{'.gz' * packed}"
            path.write_bytes(gzip.compress(content) if packed else content)
    return folder


def plain_checksums(folder):
    packed = {p.stem: sha256(gzip.decompress(p.read_bytes())) for p in folder.glob("*.gz")}
    return packed | {p.name: sha256(p.read_bytes()) for p in folder.glob("*.[de][en]")}


PAIRS = {"train": 300, "valid": 20, "test": 20, "test1": 20}


def prepare_captions(dest, folder, **changed):
    given = {"sha256": plain_checksums(folder), "pairs": PAIRS, "vocab_size": 60}
    return multi30k.prepare(dest, from_dir=folder, **(given | changed))


def test_parallel_text_has_one_model_and_a_dictionary_for_each_language(captions, tmp_path):
    manifest = prepare_captions(tmp_path, captions)
    assert counted(manifest, "pairs") == PAIRS
    assert manifest["texts"]["test1"] == "raw/test_2017_flickr"
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spm" / "spm.model"))
    for language in ("en", "de"):
        raw = (tmp_path / "raw" / f"val.{language}").read_text().splitlines()
        cut = (tmp_path / "pieces" / f"valid.{language}").read_text().splitlines()
        assert [model.decode(line.split()) for line in cut] == raw
        assert manifest["splits"]["train"][language]["unknown"] == 0
        names = (f"{split}.en-de.{language}.{kind}" for split in PAIRS for kind in ("bin", "idx"))
        assert {*names, f"dict.{language}.txt"} <= set(os.listdir(tmp_path / "bin"))
    dictionaries = [(tmp_path / "bin" / f"dict.{name}.txt").read_text() for name in ("en", "de")]
    assert dictionaries[0] != dictionaries[1]


def test_parallel_text_that_is_prepared_again_is_left_as_it_is(captions, tmp_path, capsys):
    prepare_captions(tmp_path, captions)
    before = {path: (tmp_path / path).stat().st_mtime_ns for path in files(tmp_path)}
    capsys.readouterr()
    prepare_captions(tmp_path, captions)
    assert capsys.readouterr().out.count("already done") == 3
    assert before == {path: (tmp_path / path).stat().st_mtime_ns for path in files(tmp_path)}


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (lambda own: own[:-1], "20 lines of en and 19 lines of de"),
        (lambda own: [*own[:4], " \n", *own[5:]], "val.de, line 5, is empty"),
    ],
    ids=["shorter", "empty"],
)
def test_parallel_text_that_does_not_pair_up_is_refused(captions, tmp_path, lines, said):
    given = shutil.copytree(captions, tmp_path / "given")
    (given / "val.de").write_text("".join(lines((given / "val.de").open().readlines())))
    assert said in refusal(prepare_captions, tmp_path / "dest", given)
    assert not (tmp_path / "dest" / "bin").exists()


def test_the_held_out_years_are_in_no_training_text_and_odd_separators_cut_no_line(tmp_path):
    folder, dest, rng = tmp_path, tmp_path / "dest", random.Random(3)
    pairs = {"newstest2012": 150, "newstest2013": 10, "newstest2014": 10, "newstest2015": 150}
    for name, count in pairs.items():
        lines = [f"{sentence(rng)}\x85{sentence(rng)}" for _ in range(count)]
        for language in ("en", "de"):
            text = "".join(f"{line} {language}\n" for line in lines)
            (folder / f"{name}.{language}").write_text(text, newline="\n")
    given = {"sha256": plain_checksums(folder), "pairs": pairs, "vocab_size": 60}
    manifest = newstest.prepare(dest, from_dir=folder, **given)
    assert counted(manifest, "pairs") == {"train": 300, "valid": 10, "test": 10}
    train = (dest / "text" / "train.en").read_text()
    for name, kept in (("newstest2012", True), ("newstest2013", False), ("newstest2014", False)):
        assert ((folder / f"{name}.en").read_text() in train) == kept
    places = ["text/train", "raw/newstest2013", "raw/newstest2014"]
    assert list(manifest["texts"].values()) == places


def test_mixed_text_has_multi30k_tatoeba_and_the_longer_segments_of_software(captions, tmp_path):
    rng, source = random.Random(5), tmp_path / "given"
    for folder in newstest.FOLDERS:
        (source / folder).mkdir(parents=True)
    pairs = {"newstest2012": 20, "newstest2013": 5, "newstest2014": 5}
    places = {f"{newstest.NEWS}/{name}": count for name, count in pairs.items()}
    for place, count in (places | {f"{newstest.TATOEBA}/train": 200}).items():
        for language in newstest.LANGUAGES:
            text = "".join(f"{sentence(rng)} {language}\n" for _ in range(count))
            (source / f"{place}.{language}").write_text(text)
    for name in ("train", "test_2016_flickr"):
        for path in captions.glob(f"{name}.*"):
            shutil.copy(path, source / newstest.MULTI30K)
    rows = ["wesnoth\tone two three four\tkurz", "apt\tone two three\u2028 four five\tlang genug"]
    table = "".join(f"{row}\n" for row in rows).encode()
    (source / newstest.SOFTWARE / "train.tsv.xz").write_bytes(lzma.compress(table))
    (source / newstest.SOFTWARE / "README.md").write_text("licences")
    known = plain_checksums(source / newstest.NEWS)
    more = {"train.tsv": sha256(table), "README.md": sha256(b"licences")}
    more = {f"{newstest.SOFTWARE}/{name}": checksum for name, checksum in more.items()}
    for folder in (newstest.MULTI30K, newstest.TATOEBA):
        more |= {f"{folder}/{n}": c for n, c in plain_checksums(source / folder).items()}
    given = {"sha256": known, "pairs": pairs, "more": more, "mixed": True, "vocab_size": 60}
    made = newstest.prepare(tmp_path / "dest", from_dir=source, **given)
    sizes = {"train": 20 + 300 + 200 + 1, "valid": 5, "test": 5, "test1": 20}
    assert counted(made, "pairs") == sizes
    train = (tmp_path / "dest" / "text" / "train.de").read_bytes().decode().split("\n")
    assert train[-2:] == ["lang genug", ""]
    assert "--mixed needs --from" in refusal(newstest.prepare, tmp_path / "no", mixed=True)


@pytest.fixture(scope="module")
def wmt14_archives(tmp_path_factory):
    """Archives of the published form, with pairs that are not clean."""
    folder, rng = tmp_path_factory.mktemp("wmt14"), random.Random(4)
    made = []
    for archive in wmt14.ARCHIVES:
        members = {}
        for ours, theirs in archive.members.items():
            rng.seed(archive.file)
            lines = [sentence(rng) for _ in range(60)]
            lines = [line.upper() for line in lines] if ours.endswith("de") else lines
            if "europarl" in ours:
                lines[5] = "" if ours.endswith("de") else lines[5]
                lines[6] = lines[6] * 4 if ours.endswith("en") else lines[6]
                lines[7] = lines[7] * 90
            if theirs.endswith(".sgm"):
                lines = [f'<seg id="{n}">{line} &amp; so</seg>' for n, line in enumerate(lines)]
            members[f"some/folder/{theirs}"] = "".join(f"{line}\n" for line in lines).encode()
        content = tar(members, "w:gz")
        (folder / archive.file).write_bytes(content)
        made.append(dataclasses.replace(archive, checksum=sha256(content)))
    return folder, made


HELD_OUT = {"valid": ("newstest2013", 60), "test": ("newstest2014", 60)}


def test_wmt14_is_joined_cleaned_and_counted_at_every_step(wmt14_archives, tmp_path, capsys):
    folder, archives = wmt14_archives
    given = {"from_dir": folder, "archives": archives, "held_out": HELD_OUT, "vocab_size": 60}
    manifest = wmt14.prepare(tmp_path, **given)
    assert manifest["sources"]["europarl-v7"] == 60
    assert (manifest["joined"], manifest["clean"]) == (180, 177)
    assert manifest["splits"]["test"]["pairs"] == 60
    assert (tmp_path / "raw" / "newstest2014.en").read_text().splitlines()[0].endswith("&amp; so")
    joined = (tmp_path / "text" / "joined" / "train.de").read_text().splitlines()
    clean = (tmp_path / "text" / "clean" / "train.de").read_text().splitlines()
    assert clean == [*joined[:5], *joined[8:]]
    raw = {f"{name}.{language}" for name in manifest["sources"] for language in ("en", "de")}
    assert set(files(tmp_path / "raw")) == raw
    capsys.readouterr()
    wmt14.prepare(tmp_path, **given)
    assert capsys.readouterr().out.count("already done") == 6
