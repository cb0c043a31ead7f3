"""data-prep/cifar10: the published batches or JPEG files become images and an index of them."""

import hashlib
import io

import numpy as np
import pytest
from PIL import Image

from lrpe_fairseq.experiments.records.console import UserError
from tests.test_data_prep import load, refusal, tar, unpacked

cifar = load("cifar10")
SIZES = cifar.Sizes(train=50, test=10, held_out=10)
RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (60, 32, 32, 3), dtype=np.uint8)
LABELS = [n % 10 for n in range(60)]


def batch(numbers):
    """A batch of the official archive: class, then all red, green and blue values."""
    rows = [bytes([LABELS[n]]) + PIXELS[n].transpose(2, 0, 1).tobytes() for n in numbers]
    return b"".join(rows)


@pytest.fixture
def official(tmp_path):
    """A folder with a small archive under the official name, and its md5."""
    members = {
        f"cifar-10-batches-bin/data_batch_{n + 1}.bin": batch(range(10 * n, 10 * n + 10))
        for n in range(5)
    }
    members["cifar-10-batches-bin/test_batch.bin"] = batch(range(50, 60))
    content = tar(members, "w:gz")
    return unpacked(tmp_path / "given", {cifar.BINARY: content}), hashlib.md5(content).hexdigest()


def jpeg(number):
    out = io.BytesIO()
    Image.fromarray(PIXELS[number]).save(out, "JPEG")
    return out.getvalue()


def jpegs(folder, count=60, name=cifar.ARCHIVES[0]):
    """A folder with a small archive of JPEG files."""
    members = {}
    for n in range(count):
        part = "train" if n < 50 else "test"
        members[f"top/{part}/{cifar.CLASSES[LABELS[n]]}/{n:04}.jpg"] = jpeg(n)
    return unpacked(folder, {name: tar(members, "w:xz")})


def rows_of(dest, split):
    lines = (dest / "bin" / f"{split}.tsv").read_text().splitlines()
    return [line.split("\t") for line in lines]


def test_the_published_images_lose_nothing_and_keep_their_classes(official, tmp_path):
    given, md5 = official
    dest = tmp_path / "out"
    found = cifar.prepare(dest, given, sizes=SIZES, md5=md5)
    assert {split: known["examples"] for split, known in found["splits"].items()} == {
        "train": 40, "valid": 10, "test": 10,
    }  # fmt: skip
    seen = []
    for split in ("train", "valid", "test"):
        for label, size, path in rows_of(dest, split):
            content = (dest / path).read_bytes()
            assert len(content) == int(size)
            pixels = np.array(Image.open(io.BytesIO(content)))
            [number] = [n for n in range(60) if np.array_equal(PIXELS[n], pixels)]
            assert LABELS[number] == int(label)
            assert (number >= 50) == (split == "test")
            seen.append(number)
    assert sorted(seen) == list(range(60))
    classes = [label for label, *_ in rows_of(dest, "valid")]
    assert sorted(classes) == sorted(map(str, range(10)))  # an equal share of every class


def test_jpeg_files_keep_their_content_and_are_another_data_set(tmp_path):
    dest = tmp_path / "out"
    found = cifar.prepare(dest, jpegs(tmp_path / "given"), jpeg=True, sizes=SIZES)
    assert (found["corpus"], found["level"]) == ("cifar10", "jpeg")
    for _, _, path in rows_of(dest, "test"):
        number = int(path.split("/")[-1].removesuffix(".jpg"))
        assert (dest / path).read_bytes() == jpeg(number)
    again = cifar.prepare(dest, tmp_path / "given", jpeg=True, sizes=SIZES)
    assert again["splits"] == found["splits"]


def test_a_truncated_archive_and_an_empty_folder_are_refused(tmp_path, official):
    short = jpegs(tmp_path / "short", count=59)
    said = refusal(cifar.prepare, tmp_path / "a", short, jpeg=True, sizes=SIZES)
    assert "has 9 images in test instead of 10" in said
    said = refusal(cifar.prepare, tmp_path / "b", official[0], jpeg=True, sizes=SIZES)
    assert "has neither cifar10-jpeg.tar.xz nor CIFAR-10-images" in said
    said = refusal(cifar.prepare, tmp_path / "c", official[0], sizes=SIZES, md5="0" * 32)
    assert cifar.BINARY in said
    with pytest.raises(UserError, match="ends within an image"):
        list(cifar.records(batch([1, 2])[:-1]))
