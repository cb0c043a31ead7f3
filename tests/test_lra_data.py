"""Data of the Long-Range Arena: reviews, pairs of papers, paths and images, from small archives."""

from __future__ import annotations

import io
import itertools
import json
import lzma
import math
import re
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.families import classification
from lrpe_fairseq.experiments.families.classification import ClassificationRun
from lrpe_fairseq.experiments.records.console import UserError
from tests.test_classification_data import same_bytes, stored
from tests.test_data_prep import load, refusal, sha256
from tests.trial import trial

lra, pathfinder = load("lra"), load("pathfinder")


def packed(folder: Path, name: str, members: Mapping[str, bytes]) -> str:
    """Write a tar archive, compressed with gzip, and return its sha256."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / name, "w:gz") as archive:
        for member, content in members.items():
            info = tarfile.TarInfo(member)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return sha256((folder / name).read_bytes())


def unpacked(folder: Path, members: Mapping[str, bytes]) -> Path:
    for name, content in members.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def small(task: object, checksum: str = "", **sizes: int) -> object:
    return replace(task, archive=replace(task.archive, checksum=checksum), sizes=sizes)


def splits(dest: Path, end: bool) -> dict:
    return {split: stored(dest / "bin", split, end) for split in prep.SPLITS}


# --- text --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reviews():
    """Twenty reviews of each class and part, of any order, some of them long and not ASCII."""
    members = {"aclImdb/README": b"", "aclImdb/train/unsup/0_0.txt": b"not labeled"}
    for number in reversed(range(20)):
        for part in ("train", "test"):
            for feeling in ("pos", "neg"):
                body = f"{part} {feeling} {number} é" + "long " * (1000 if number == 3 else 0)
                members[f"aclImdb/{part}/{feeling}/{number}_7.txt"] = body.encode()
    return members


@pytest.fixture(scope="module")
def text(reviews, tmp_path_factory):
    source = tmp_path_factory.mktemp("text")
    checksum = packed(source, lra.TEXT.archive.file, reviews)
    return source, small(lra.TEXT, checksum, train=40, test=40)


def test_reviews_are_bytes_and_every_tenth_of_a_class_is_held_out(text, reviews, tmp_path):
    source, task = text
    manifest = lra.prepare(task, tmp_path / "dest", source)
    found = splits(tmp_path / "dest", end=True)
    known = {
        split: {bytes(row).decode(errors="ignore") for row in own.inputs}
        for split, own in found.items()
    }
    assert {split: len(own.labels) for split, own in found.items()} == {
        "train": 36, "valid": 4, "test": 40
    }  # fmt: skip
    assert known["train"].isdisjoint(known["valid"])
    expected = {body[:4095].decode(errors="ignore") for n, body in reviews.items() if "train/" in n}
    assert known["train"] | known["valid"] == expected - {"not labeled"}
    names = sorted(f"{n}_7.txt" for n in range(20))[9::10]
    held_out = {f"train {f} {n.split('_')[0]} é" for f in ("pos", "neg") for n in names}
    assert {review.partition("é")[0] + "é" for review in known["valid"]} == held_out
    for own in found.values():
        for row, label in zip(own.inputs, own.labels, strict=True):
            assert bytes(row).split()[1] == (b"pos" if label else b"neg")
    assert manifest["splits"]["test"]["longest"] == 4096
    assert (manifest["corpus"], manifest["level"]) == ("lra", "text")


def test_a_folder_of_files_gives_the_bytes_of_the_archive_and_steps_are_skipped(
    text, reviews, tmp_path, capsys
):
    source, task = text
    lra.prepare(task, tmp_path / "one", source)
    folder = unpacked(tmp_path / "from", reviews)
    (folder / "aclImdb/test/pos/99_7.txt").symlink_to("/etc/passwd")
    lra.prepare(task, tmp_path / "other", folder)
    same_bytes(tmp_path / "one" / "bin", tmp_path / "other" / "bin")
    lra.prepare(task, tmp_path / "other", folder)
    assert "binarize: already done" in capsys.readouterr().out
    (folder / "aclImdb/test/pos/1_7.txt").write_text("edited")
    lra.prepare(task, tmp_path / "other", folder)
    assert "already done" not in capsys.readouterr().out


def test_tables_of_reviews_give_the_bytes_of_the_archive(text, reviews, tmp_path):
    source, task = text
    lra.prepare(task, tmp_path / "one", source)
    rows = {"train": "", "test": ""}
    for member, body in reviews.items():
        if found := re.search(task.archive.wanted, member):
            number, rating = found[3].removesuffix(".txt").split("_")
            rows[found[1]] += f"{found[2]}\t{rating}\t{number}\t{body.decode()}\n"
    tables = {f"{part}.tsv.xz": lzma.compress(own.encode()) for part, own in rows.items()}
    folder = unpacked(tmp_path / "from", tables)
    known = {name: sha256(content) for name, content in tables.items()}
    own = replace(task, archive=replace(task.archive, tables=known))
    lra.prepare(own, tmp_path / "other", folder)
    same_bytes(tmp_path / "one" / "bin", tmp_path / "other" / "bin")
    (folder / "test.tsv.xz").write_bytes(b"cut")
    assert "is truncated" in refusal(lra.prepare, own, tmp_path / "other", folder)


def test_the_published_splits_validate_on_the_test_set(text, tmp_path):
    source, task = text
    manifest = lra.prepare(task, tmp_path, source, published_splits=True)
    found = splits(tmp_path, end=True)
    assert found["valid"] == found["test"]
    assert len(found["train"].labels) == 40
    assert manifest["level"] == "text-published-splits"
    said = classification.protocol(tmp_path, 4096, 0)
    assert said.endswith("Valid is the test split: the accuracy on it also selects the checkpoint.")


# --- retrieval ---------------------------------------------------------------------------------


def papers(name: str, count: int) -> bytes:
    rows = (
        f'{n % 2}.0\tP{n}\tQ{n}\t"an {name} quote {n}\tsecond {n} “text' + "x" * (5000 * (n == 1))
        for n in range(count)
    )
    return "".join(f"{row}\n" for row in rows).encode()


@pytest.fixture(scope="module")
def release():
    """The wanted files of the release and another one."""
    folder = "lra_release/lra_release/tsv_data/"
    counts = {"train": 6, "eval": 3, "test": 2}
    tables = {f"{folder}new_aan_pairs.{n}.tsv": papers(n, c) for n, c in counts.items()}
    return {f"{folder}other.tsv": b"1", **tables}


def test_pairs_have_two_inputs_and_quotes_are_bytes(release, tmp_path):
    packed(tmp_path / "from", lra.RELEASE, release)
    task = small(lra.RETRIEVAL, train=6, eval=3, test=2)
    manifest = lra.prepare(task, tmp_path / "dest", tmp_path / "from")
    first = splits(tmp_path / "dest", end=True)["train"]
    assert first.labels == [0, 1, 0, 1, 0, 1]
    assert bytes(first.inputs[0]) == b'"an train quote 0'
    bin_dir = tmp_path / "dest" / "bin"
    ids = np.fromfile(bin_dir / "input1" / "train.bin", dtype=np.uint16)
    lengths = prep.row_lengths(bin_dir / "input1" / "train")
    assert lengths[1] == 4001
    last = bytes((ids[-lengths[-1] : -1] - prep.FAIRSEQ_SPECIALS).astype(np.uint8)).decode()
    assert last == "second 5 “text"
    counts = manifest["splits"]["train"]
    assert counts["examples"] == 6
    stored_tokens = sum(
        prep.row_lengths(bin_dir / part / "train").sum() for part in ("input0", "input1")
    )
    assert counts["tokens"] == stored_tokens


# --- pathfinder of the release -----------------------------------------------------------------


def png(pixels: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


@pytest.fixture(scope="module")
def paths():
    """Thirty images whose brightness is their class, in two folders, and an empty one."""
    members, home = {}, "lra_release/lra_release/pathfinder32/"
    for folder in (0, 1):
        rows = []
        for number in range(15):
            image = np.full((32, 32), 100 * (number % 2) + number, np.uint8)
            content = b"" if (folder, number) == (1, 4) else png(image)
            members[f"{home}curv_contour_length_14/imgs/{folder}/sample_{number}.png"] = content
            rows.append(f"imgs/{folder} sample_{number}.png {number} {number % 2} 1 2 3\n")
        members[f"{home}curv_contour_length_14/metadata/{folder}.npy"] = "".join(rows).encode()
    return {**members, f"{home}curv_baseline/imgs/0/sample_1.png": png(np.zeros((32, 32), "u1"))}


def test_paths_have_the_labels_of_the_metadata_and_empty_files_are_left_out(
    paths, tmp_path, capsys
):
    packed(tmp_path / "from", lra.RELEASE, paths)
    lra.prepare(lra.PATHFINDER, tmp_path / "dest", tmp_path / "from")
    assert "imgs/1/sample_4.png is empty and left out" in capsys.readouterr().out
    found = splits(tmp_path / "dest", end=False)
    assert [len(own.labels) for own in found.values()] == [23, 3, 3]
    shades = []
    for own in found.values():
        for row, label in zip(own.inputs, own.labels, strict=True):
            assert len(row) == 32 * 32
            assert len(set(row)) == 1
            assert label == (row[0] >= 100)
            shades.append(row[0])
    assert sorted(shades) == sorted(
        [100 * (n % 2) + n for n in [*range(15), *range(15)] if n != 4] + [4]
    )


# --- image -------------------------------------------------------------------------------------


def test_images_are_gray_as_in_pillow_and_validation_is_part_of_training(tmp_path):
    rng = np.random.RandomState(0)
    parts = [f"data_batch_{n}" for n in range(1, 6)] + ["test_batch"]
    batches = {name: rng.randint(0, 256, (20, 3073)).astype(np.uint8) for name in parts}
    for rows in batches.values():
        rows[:, 0] = np.arange(20) % 10
    members = {f"cifar-10-batches-bin/{n}.bin": r.tobytes() for n, r in batches.items()}
    checksum = packed(tmp_path / "from", lra.IMAGE.archive.file, members)
    task = small(lra.IMAGE, checksum, train=100, test=20)
    lra.prepare(task, tmp_path / "dest", tmp_path / "from")
    known = {}
    for rows in batches.values():
        for row in rows:
            color = Image.fromarray(row[1:].reshape(3, 32, 32).transpose(1, 2, 0))
            known[color.convert("L").tobytes()] = row[0]
    found = splits(tmp_path / "dest", end=False)
    assert [len(own.labels) for own in found.values()] == [90, 10, 20]
    drawn = {bytes(row) for own in found.values() for row in own.inputs}
    assert drawn == set(known)
    for own in found.values():
        assert [known[bytes(row)] for row in own.inputs] == own.labels
    cut = {**members, "cifar-10-batches-bin/test_batch.bin": b"1234"}
    folder = unpacked(tmp_path / "cut", cut)
    assert "images in test instead of 20" in refusal(lra.prepare, task, tmp_path / "no", folder)


# --- archives ----------------------------------------------------------------------------------


def test_an_archive_that_is_absent_truncated_or_incomplete_is_refused(text, tmp_path):
    source, task = text
    said = refusal(lra.prepare, task, tmp_path / "dest", tmp_path / "nowhere")
    assert "contains neither aclImdb_v1.tar.gz nor the files of that archive" in said
    content = (source / task.archive.file).read_bytes()
    (tmp_path / task.archive.file).write_bytes(content[: len(content) // 2])
    assert "its checksum is not" in refusal(lra.prepare, task, tmp_path / "dest", tmp_path)
    unknown = replace(task, archive=replace(task.archive, checksum=""))
    assert "truncated or not" in refusal(lra.prepare, unknown, tmp_path / "dest", tmp_path)
    (tmp_path / task.archive.file).write_bytes(content)
    more = replace(task, sizes={"train": 41, "test": 40})
    assert "has 40 reviews in train instead of 41" in refusal(
        lra.prepare, more, tmp_path / "dest", tmp_path
    )
    assert not (tmp_path / "dest" / "bin").exists()


# --- pathfinder, generated ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def scenes():
    return [drawn_scene(number) for number in range(60)]


def drawn_scene(number: int) -> pathfinder.Scene:
    return pathfinder.scene(pathfinder.RECIPES[16], np.random.RandomState([7, 0, number]))


def test_the_label_says_whether_both_markers_are_at_the_tips_of_one_path(scenes):
    for made in scenes:
        tips = [{path.tail, path.head} for path in made.paths]
        far = [math.dist(*pair) for pair in itertools.combinations(set.union(*tips), 2)]
        assert len(far) == 6
        assert min(far) > 2.9  # markers have a radius of 1.5
        assert made.label == any(set(made.marked) <= own for own in tips)
        assert made.marked[0] in {path.tail for path in made.paths}
        assert made.marked[1] in {path.head for path in made.paths}


def test_images_depend_on_the_seed_and_their_number_only():
    recipe = replace(pathfinder.RECIPES[16], sizes={"train": 6, "valid": 2, "test": 2})
    more = replace(recipe, sizes={"train": 8, "valid": 2, "test": 2})
    one, other = (pathfinder.generate(chosen, 1) for chosen in (recipe, more))
    assert other["train"].inputs[:6] == one["train"].inputs
    assert other["test"] == one["test"]
    assert pathfinder.generate(recipe, 2)["train"].inputs != one["train"].inputs


def test_generated_paths_are_prepared_with_a_manifest_and_not_again(tmp_path, capsys):
    given = ["--dest", str(tmp_path), "--images", "10", "--contour", "3"]
    assert pathfinder.main(given) == 0
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["level"] == "16x16-contour3"
    assert manifest["splits"]["test"] == {
        "examples": 1, "tokens": 256, "longest": 256, "majority": 100.0
    }  # fmt: skip
    assert pathfinder.main(given) == 0
    assert "binarize: already done" in capsys.readouterr().out


# --- evaluation on other data ------------------------------------------------------------------


def test_a_model_is_also_evaluated_on_other_data_that_are_verified(text, tmp_path, monkeypatch):
    source, task = text
    for name in ("text", "other"):
        lra.prepare(task, tmp_path / name, source)
    asked = (("test", "accuracy"), ("valid", "accuracy-on-other"), ("test", "accuracy-on-other"))
    places = {"folder": tmp_path, "data": tmp_path / "text"}
    given = {"config": "lra-text", "evaluations": asked, **places}
    made = trial(tmp_path, ClassificationRun, **given)
    commands: list[list[str]] = []

    def read(path: Path) -> dict:
        score = {"accuracy": {"accuracy": float(len(path.name))}}
        return {"metrics": {"valid": score, "test": score}, "protocol": {"accuracy": "Said."}}

    monkeypatch.setattr(classification, "read_run", read)
    found = made.measure(lambda command, log: commands.append(command))
    assert [command[5] for command in commands] == [str(tmp_path / n) for n in ("text", "other")]
    assert [c[c.index("--splits") + 1 : c.index("--out")] for c in commands] == [
        ["test"], ["valid", "test"]
    ]  # fmt: skip
    assert found["metrics"]["test"] == {
        "accuracy": {"accuracy": float(len("eval-accuracy.json"))},
        "accuracy-on-other": {"accuracy": float(len("eval-accuracy-on-other.json"))},
    }
    assert set(found["metrics"]["valid"]) == {"accuracy-on-other"}
    assert "Said. On lra-text. The checkpoint" in found["protocol"]["accuracy-on-other"]
    made.require_inputs()
    (tmp_path / "other" / "bin" / "label" / "test.bin").write_bytes(b"damaged!")
    with pytest.raises(UserError, match="is not the file that data-prep wrote"):
        made.require_inputs()
    with pytest.raises(ValueError, match="'blocks' is no protocol"):
        made.data_of("blocks")
