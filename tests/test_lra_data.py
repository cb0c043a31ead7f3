"""Data of the Long-Range Arena: reviews, pairs of papers, paths and images, from small archives."""

import io
import itertools
import json
import lzma
import math
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.families import classification
from lrpe_fairseq.experiments.families.classification import ClassificationRun
from lrpe_fairseq.experiments.records.console import UserError
from tests.test_classification_data import stored
from tests.test_data_prep import counted, load, refusal, same_bytes, sha256, tar, unpacked
from tests.trial import trial

lra, pathfinder = load("lra"), load("pathfinder")


def packed(folder, name, members):
    """Write a tar archive, compressed with gzip, and return its sha256."""
    content = tar(members, "w:gz")
    unpacked(folder, {name: content})
    return sha256(content)


def small(task, checksum="", **sizes):
    return replace(task, archive=replace(task.archive, checksum=checksum), sizes=sizes)


def splits(dest, end):
    return {split: stored(dest / "bin", split, end) for split in prep.SPLITS}


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


@pytest.fixture(scope="module")
def prepared(text, tmp_path_factory):
    """What the archive gives."""
    source, task = text
    dest = tmp_path_factory.mktemp("prepared")
    lra.prepare(task, dest, source)
    return dest


def test_every_review_is_in_one_split_as_bytes_that_are_cut(prepared, reviews):
    found = splits(prepared, end=True)
    assert [len(examples.labels) for examples in found.values()] == [36, 4, 40]
    train, valid = (
        {bytes(row).decode(errors="ignore") for row in found[split].inputs}
        for split in ("train", "valid")
    )
    assert train.isdisjoint(valid)
    expected = {body[:4095].decode(errors="ignore") for n, body in reviews.items() if "train/" in n}
    assert train | valid == expected - {"not labeled"}
    manifest = json.loads((prepared / "manifest.json").read_text())
    assert manifest["splits"]["test"]["longest"] == 4096
    assert (manifest["corpus"], manifest["level"]) == ("lra", "text")


def test_every_tenth_review_of_a_class_is_held_out(prepared):
    valid = splits(prepared, end=True)["valid"].inputs
    names = sorted(f"{n}_7.txt" for n in range(20))[9::10]
    held_out = {f"train {f} {n.split('_')[0]} é" for f in ("pos", "neg") for n in names}
    texts = [bytes(row).decode(errors="ignore") for row in valid]
    assert {text.partition("é")[0] + "é" for text in texts} == held_out


def test_a_review_has_the_class_of_its_folder(prepared):
    for examples in splits(prepared, end=True).values():
        for row, label in zip(examples.inputs, examples.labels, strict=True):
            assert bytes(row).split()[1] == (b"pos" if label else b"neg")


def test_a_folder_of_files_gives_the_bytes_of_the_archive_and_steps_are_skipped(
    text, prepared, reviews, tmp_path, capsys
):
    folder, dest = unpacked(tmp_path / "from", reviews), tmp_path / "dest"
    (folder / "aclImdb/test/pos/99_7.txt").symlink_to("/etc/passwd")
    lra.prepare(text[1], dest, folder)
    same_bytes(prepared / "bin", dest / "bin")
    lra.prepare(text[1], dest, folder)
    assert "binarize: already done" in capsys.readouterr().out
    (folder / "aclImdb/test/pos/1_7.txt").write_text("edited")
    lra.prepare(text[1], dest, folder)
    assert "already done" not in capsys.readouterr().out


def test_tables_of_reviews_give_the_bytes_of_the_archive(text, prepared, reviews, tmp_path):
    task = text[1]
    rows = {"train": "", "test": ""}
    for member, body in reviews.items():
        if found := re.search(task.archive.wanted, member):
            number, rating = found[3].removesuffix(".txt").split("_")
            rows[found[1]] += f"{found[2]}\t{rating}\t{number}\t{body.decode()}\n"
    tables = {f"{part}.tsv.xz": lzma.compress(own.encode()) for part, own in rows.items()}
    folder = unpacked(tmp_path / "from", tables)
    known = {name: sha256(content) for name, content in tables.items()}
    own = replace(task, archive=replace(task.archive, tables=known))
    lra.prepare(own, tmp_path / "dest", folder)
    same_bytes(prepared / "bin", tmp_path / "dest" / "bin")
    (folder / "test.tsv.xz").write_bytes(b"cut")
    assert "is truncated" in refusal(lra.prepare, own, tmp_path / "dest", folder)


def test_the_published_splits_validate_on_the_test_set(text, tmp_path):
    source, task = text
    manifest = lra.prepare(task, tmp_path, source, published_splits=True)
    found = splits(tmp_path, end=True)
    assert found["valid"] == found["test"]
    assert len(found["train"].labels) == 40
    assert manifest["level"] == "text-published-splits"
    said = classification.protocol(tmp_path, 4096, 0)
    assert said.endswith("Valid is the test split: the accuracy on it also selects the checkpoint.")


def papers(name, count):
    rows = (
        f'{n % 2}.0\tP{n}\tQ{n}\t"an {name} quote {n}\tsecond {n} “text' + "x" * (5000 * (n == 1))
        for n in range(count)
    )
    return "".join(f"{row}\n" for row in rows).encode()


def test_pairs_have_two_inputs_and_quotes_are_bytes(tmp_path):
    folder, counts = "lra_release/lra_release/tsv_data/", {"train": 6, "eval": 3, "test": 2}
    tables = {f"{folder}new_aan_pairs.{n}.tsv": papers(n, c) for n, c in counts.items()}
    packed(tmp_path / "from", lra.RELEASE, {f"{folder}other.tsv": b"1", **tables})
    task = small(lra.RETRIEVAL, **counts)
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
    assert counted(manifest, "examples")["train"] == 6
    both = [prep.row_lengths(bin_dir / part / "train").sum() for part in ("input0", "input1")]
    assert counted(manifest, "tokens")["train"] == sum(both)


def png(pixels):
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


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


def test_paths_have_the_labels_of_the_metadata_and_empty_files_are_left_out(tmp_path, capsys):
    packed(tmp_path / "from", lra.RELEASE, paths())
    lra.prepare(lra.PATHFINDER, tmp_path / "dest", tmp_path / "from")
    assert "imgs/1/sample_4.png is empty and left out" in capsys.readouterr().out
    found = splits(tmp_path / "dest", end=False)
    assert [len(own.labels) for own in found.values()] == [23, 3, 3]
    shades = []
    for own in found.values():
        for row, label in zip(own.inputs, own.labels, strict=True):
            assert row == [row[0]] * 32 * 32
            assert label == (row[0] >= 100)
            shades.append(row[0])
    expected = [100 * (number % 2) + number for number in range(15)]
    assert sorted([*shades, 4]) == sorted(2 * expected)


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
    for row in np.concatenate(list(batches.values())):
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


def test_an_archive_that_is_absent_truncated_or_incomplete_is_refused(text, tmp_path):
    source, task = text
    dest = tmp_path / "dest"
    said = refusal(lra.prepare, task, dest, tmp_path / "nowhere")
    assert "contains neither aclImdb_v1.tar.gz nor the files of that archive" in said
    content = (source / task.archive.file).read_bytes()
    (tmp_path / task.archive.file).write_bytes(content[:20])
    assert "its checksum is not" in refusal(lra.prepare, task, dest, tmp_path)
    unknown = replace(task, archive=replace(task.archive, checksum=""))
    assert "truncated or not" in refusal(lra.prepare, unknown, dest, tmp_path)
    (tmp_path / task.archive.file).write_bytes(content)
    more = replace(task, sizes={"train": 41, "test": 40})
    said = refusal(lra.prepare, more, dest, tmp_path)
    assert "has 40 reviews in train instead of 41" in said
    assert not (dest / "bin").exists()


def test_the_label_says_whether_both_markers_are_at_the_tips_of_one_path():
    for number in range(30):
        made = pathfinder.scene(pathfinder.RECIPES[16], np.random.RandomState([7, 0, number]))
        tips = [{path.tail, path.head} for path in made.paths]
        far = [math.dist(*pair) for pair in itertools.combinations(set.union(*tips), 2)]
        assert len(far) == 6
        assert min(far) > 2.9  # markers have a radius of 1.5
        assert made.label == any(set(made.marked) <= own for own in tips)
        assert made.marked[0] in {path.tail for path in made.paths}
        assert made.marked[1] in {path.head for path in made.paths}


def test_images_depend_on_the_seed_and_their_number_only():
    recipe = replace(pathfinder.RECIPES[16], sizes={"train": 3, "valid": 1, "test": 1})
    more = replace(recipe, sizes={"train": 4, "valid": 1, "test": 1})
    one, other = (pathfinder.generate(chosen, 1) for chosen in (recipe, more))
    assert other["train"].inputs[:3] == one["train"].inputs
    assert other["test"] == one["test"]
    assert pathfinder.generate(recipe, 2)["train"].inputs != one["train"].inputs


def test_generated_paths_are_prepared_with_a_manifest_and_not_again(tmp_path, capsys):
    given = ["--dest", str(tmp_path), "--images", "10", "--contour", "3"]
    assert pathfinder.main(given) == 0
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["level"] == "16x16-contour3"
    assert manifest["splits"]["test"]["tokens"] == 256
    assert pathfinder.main(given) == 0
    assert "binarize: already done" in capsys.readouterr().out


def test_a_model_is_also_evaluated_on_other_data_that_are_verified(prepared, tmp_path):
    for name in ("text", "other"):
        shutil.copytree(prepared, tmp_path / name)
    asked = (("test", "accuracy"), ("valid", "accuracy-on-other"), ("test", "accuracy-on-other"))
    given = {"config": "lra-text", "evaluations": asked, "data": tmp_path / "text"}
    made = trial(tmp_path, ClassificationRun, **given)
    made.folder.mkdir()
    commands: list[list[str]] = []

    def run(command, log):
        commands.append(command)
        score = {"accuracy": {"accuracy": float(len(log.stem))}}
        said = {"metrics": {"valid": score, "test": score}, "protocol": {"accuracy": "Said."}}
        log.with_suffix(".json").write_text(json.dumps(said))

    found = made.measure(run)
    assert [command[5] for command in commands] == [str(tmp_path / n) for n in ("text", "other")]
    chosen = [
        command[command.index("--splits") + 1 : command.index("--out")] for command in commands
    ]
    assert chosen == [["test"], ["valid", "test"]]
    assert found["metrics"]["test"] == {
        name: {"accuracy": float(len(f"eval-{name}"))} for name in ("accuracy", "accuracy-on-other")
    }
    assert set(found["metrics"]["valid"]) == {"accuracy-on-other"}
    assert "Said. On lra-text. The checkpoint" in found["protocol"]["accuracy-on-other"]
    made.require_inputs()
    (tmp_path / "other" / "bin" / "label" / "test.bin").write_bytes(b"damaged!")
    with pytest.raises(UserError, match="is not the file that data-prep wrote"):
        made.require_inputs()
    with pytest.raises(ValueError, match="'blocks' is no protocol"):
        made.data_of("blocks")
