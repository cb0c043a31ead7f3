"""data-prep/imagenet: class folders or the official archives become an index of files."""

import hashlib
import io
import json

import numpy as np
import pytest

from tests.test_data_prep import load, refusal, tar, unpacked

imagenet = load("imagenet")
Archives, Source = imagenet.Archives, imagenet.Source
NAMES = ["n00000001", "n00000002"]
VALID_CLASSES = [NAMES[1], NAMES[0], NAMES[0], NAMES[1]]
TINY = Source("imagenet", "tiny", {"train": 6, "valid": 4}, 2)


def train_images(name):
    return {f"{name}_{n}.JPEG": f"{name} {n}".encode() for n in range(3)}


def archives_in(folder, **changed):
    """Small archives with the names of the official ones, and their own checksums."""
    contents = {
        "train": tar({f"{name}.tar": tar(train_images(name)) for name in NAMES}),
        "val": tar({f"ILSVRC2012_val_{n:08}.JPEG": b"%d" % n for n in range(1, 5)}),
        "devkit": b"not read",
    } | changed
    folder.mkdir()
    known = {}
    for part, content in contents.items():
        name = getattr(Archives(), part)[0]
        (folder / name).write_bytes(content)
        known[part] = (name, hashlib.md5(content).hexdigest())
    return Archives(**known)


@pytest.fixture
def folders(tmp_path):
    """Class folders with the same images as the archives."""
    members = {f"train/{n}/{file}": own for n in NAMES for file, own in train_images(n).items()}
    for number, name in enumerate(VALID_CLASSES, 1):
        members[f"val/{name}/ILSVRC2012_val_{number:08}.JPEG"] = b"%d" % number
    return unpacked(tmp_path / "given", members)


KNOWN = imagenet.validation_classes


@pytest.fixture(autouse=True)
def classes(monkeypatch):
    """The classes of the validation images, without the devkit's table, which is MATLAB's."""
    monkeypatch.setattr(imagenet, "validation_classes", lambda devkit: VALID_CLASSES)


def index_of(dest):
    return {path.name: path.read_text() for path in sorted((dest / "bin").glob("*.*"))}


def test_folders_and_archives_give_the_same_index(folders, tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    found = imagenet.prepare(one, folders, TINY)
    packed = archives_in(tmp_path / "packed")
    assert imagenet.prepare(other, tmp_path / "packed", TINY, packed)["splits"] == found["splits"]
    assert index_of(one) == index_of(other)
    first = index_of(one)["train.tsv"].splitlines()[0]
    assert first == "0\t11\timages/train/n00000001/n00000001_0.JPEG"
    for line in index_of(one)["valid.tsv"].splitlines():
        label, size, path = line.split("\t")
        assert (one / path).read_bytes() == (other / path).read_bytes()
        assert (one / path).stat().st_size == int(size)
        assert NAMES[int(label)] in path
    assert (one / "images" / "train").is_symlink()
    assert found["splits"]["train"]["examples"] == 6
    assert (one / "bin" / "label" / "dict.txt").read_text() == "0 1\n1 1\n"


def test_an_interrupted_unpacking_keeps_whole_classes(tmp_path, monkeypatch):
    packed, copy, copied = archives_in(tmp_path / "packed"), imagenet._copy, []

    def failing(stream, path):
        if len(copied) == 4:
            raise KeyboardInterrupt
        copied.append(path.name)
        copy(stream, path)

    monkeypatch.setattr(imagenet, "_copy", failing)
    with pytest.raises(KeyboardInterrupt):
        imagenet.prepare(tmp_path / "dest", tmp_path / "packed", TINY, packed)
    train = tmp_path / "dest" / "images" / "train"
    assert [path.name for path in train.iterdir()] == NAMES[:1]
    monkeypatch.setattr(imagenet, "_copy", lambda s, p: (copied.append(p.name), copy(s, p)))
    imagenet.prepare(tmp_path / "dest", tmp_path / "packed", TINY, packed)
    assert copied.count(f"{NAMES[0]}_0.JPEG") == 1


EVIL = ["../n00000009.tar", "/tmp/n00000009.tar", "sub/n00000009.tar", "n00000009.txt"]


@pytest.mark.parametrize("name", EVIL)
def test_nothing_is_written_outside_for_a_malicious_member(name, tmp_path):
    image = NAMES[0]
    members = {f"../{image}_1.JPEG": b"evil", f"/{image}_2.JPEG": b"evil", f"{image}_3.JPEG": None}
    packed = archives_in(tmp_path / "packed", train=tar({name: tar(members)}))
    refusal(imagenet.prepare, tmp_path / "dest", tmp_path / "packed", TINY, packed)
    found = {path for path in tmp_path.rglob("*") if path.suffix in (".JPEG", ".tar")}
    inside = {path for path in found if path.is_relative_to(tmp_path / "dest" / "images")}
    assert {path.parent for path in found - inside} == {tmp_path / "packed"}
    assert not any(path.is_symlink() for path in inside)


def test_other_images_are_refused_unless_they_are_asked_for(folders, tmp_path):
    said = refusal(imagenet.prepare, tmp_path / "dest", folders)
    assert "2 classes instead of 1,000" in said
    assert "--any-images" in said
    given = ["--dest", str(tmp_path / "any"), "--from", str(folders), "--any-images"]
    assert imagenet.main(given) == 0
    known = json.loads((tmp_path / "any" / "manifest.json").read_text())
    assert (known["corpus"], known["level"], known["classes"]) == ("images", "folders", 2)
    own = folders.rename(tmp_path / "images")
    assert "lies in --dest" in refusal(imagenet.prepare, tmp_path, own)
    for name, said in (("zzz", "zzz has no images: remove it"), ("a\tb", "'a\\tb' of ")):
        own.joinpath("train", name).mkdir(), own.joinpath("val", name).mkdir()
        assert said in refusal(imagenet.prepare, tmp_path / "dest", own)


def test_the_devkit_gives_the_class_of_every_validation_image(tmp_path):
    matlab = pytest.importorskip("scipy.io", reason="scipy (extra [vision]) is not installed")
    kinds = [("ILSVRC2012_ID", "i4"), ("WNID", "O"), ("words", "O"), ("gloss", "O"), ("n", "i4")]
    rows = [(1, NAMES[1], "a", "b", 0), (2, NAMES[0], "c", "d", 0), (3, "n9", "e", "f", 2)]
    matlab.savemat(table := io.BytesIO(), {"synsets": np.array(rows, dtype=kinds)})
    devkit, home = tmp_path / "devkit.tar", "ILSVRC2012_devkit_t12/data/"
    truth = {f"{home}{imagenet.GROUND_TRUTH}": b"2\n1\n1\n2\n"}
    devkit.write_bytes(tar({**truth, f"{home}{imagenet.SYNSETS}": table.getvalue()}))
    assert KNOWN(devkit) == [NAMES[0], NAMES[1], NAMES[1], NAMES[0]]
    devkit.write_bytes(tar({"../meta.mat": b""}))
    with pytest.raises(ValueError, match="lacks"):
        KNOWN(devkit)
