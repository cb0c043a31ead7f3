"""lrpe_vit and the task lrpe_images: parameters, patches, the order of an epoch, augmentation."""

import copy
import importlib.util
import io
import math
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fairseq.data import Dictionary
from omegaconf import OmegaConf
from PIL import Image
from torch import nn

from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.errors import ChoiceError, Refusal
from lrpe_fairseq.image_files import in_eight_bits, read_image, rows_and_columns
from lrpe_fairseq.models.patches import Convolved, Images, Pixels
from lrpe_fairseq.models.resumption import check_resumed, check_unfinished
from lrpe_fairseq.models.vit import LRPEViT, LRPEViTConfig, LRPEViTTinyConfig
from lrpe_fairseq.tasks import images
from lrpe_fairseq.tasks.images import Crop, ImagesConfig, LRPEImagesTask, UpdateOrder
from tests.end_to_end.cases import each_encoding_once, sampled, serves
from tests.test_classifier import BOTH, PAD, same
from tests.test_data_prep import unpacked

FEW = [("linear", "rope-2d-mixed"), ("softmax", "lrpe-type2")]
needs_timm = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("timm", "torchvision")),
    reason="timm or torchvision (extra [vision]) is not installed",
)


def task_of_images(size=32, classes=5):
    return SimpleNamespace(
        source_dictionary=Dictionary(),
        num_classes=classes,
        pairs=False,
        image_size=size,
        max_positions=lambda: math.prod(rows_and_columns(size)),
    )


def model_of(size=32, **options):
    """The tiny model in float64 and in evaluation."""
    torch.manual_seed(1)
    config = OmegaConf.structured(LRPEViTTinyConfig(**options))
    return LRPEViT.build_model(config, task_of_images(size)).double().eval()


SPARE_ROW = 384  # fairseq's learned positions have 198 rows, the authors' 197


@pytest.mark.parametrize(
    ("encoding", "normalizer", "grid", "parameters"),
    [  # TMLR LRPE, Table 3, prints them in millions
        ("none", "rotated", "sum", 22_036_456),
        ("rope", "content", "axial", 22_036_456),
        ("permuteformer", "content", "sum", 22_036_456),
        ("lrpe-tmlr-type3", "layernorm", "sum", 22_045_672),
        ("lrpe-tmlr-type2", "layernorm", "axial", 22_046_056),
        ("lrpe-tmlr-type1", "layernorm", "axial", 22_046_440),
    ],
)
def test_the_model_has_the_parameters_of_the_paper(encoding, normalizer, grid, parameters):
    names = ("position_encoding", "attention_normalizer", "position_grid")
    given = dict(zip(names, (encoding, normalizer, grid), strict=True))
    with torch.device("meta"):
        config = OmegaConf.structured(LRPEViTConfig(**given))
        model = LRPEViT.build_model(config, task_of_images(224, 1000))
    assert sum(p.numel() for p in model.parameters()) - SPARE_ROW == parameters


def test_repeated_images_are_not_shuffled_after_the_last_epoch_of_the_curriculum(written):
    task = task_with(written, repeats=3, curriculum=2)
    task.begin_epoch(2, None)
    with pytest.raises(Refusal, match="epoch 3 is beyond --curriculum 2"):
        task.begin_epoch(3, None)


@pytest.mark.parametrize(
    ("attention", "encoding"),
    sampled([pair for pair in each_encoding_once() if serves(pair[1], "encoder-only")], FEW),
)
def test_an_image_has_one_output_alone_and_anywhere_in_a_batch(attention, encoding):
    model = model_of(attention_type=attention, position_encoding=encoding)
    batch = torch.randn(3, 3, 32, 32).double()
    with torch.no_grad():
        alone = torch.cat([model(image[None]) for image in batch])
        same(model(batch), alone)
        same(model(batch.flip(0)), alone.flip(0))


@BOTH
@pytest.mark.parametrize("encoding", ["rope-2d", "liere", "lrpe-type2"])
def test_a_trained_model_reads_images_of_another_size(attention, encoding):
    options = {"attention_type": attention, "position_encoding": encoding}
    trained, image = model_of(**options), torch.randn(2, 3, 40, 24).double()
    state = trained.state_dict()
    table = trained.encoder.embed_positions.weight.data
    rows, columns = torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij")
    table[2:, 0], table[2:, 1] = 5.0, (rows + 10 * columns).flatten()
    wide = model_of("40x24", **options)
    wide.load_state_dict(copy.deepcopy(state))
    grid = wide.encoder.embed_positions.weight.data[2:].unflatten(0, (5, 3))
    assert grid[..., 0].tolist() == pytest.approx(np.full((5, 3), 5.0))
    center = (4 - 1) / 2 * 11  # of the ramp, which bicubic interpolation keeps there
    assert grid[2, 1, 1].item() == pytest.approx(center)
    assert (grid[:, 1:, 1] > grid[:, :-1, 1]).all()
    for module in (m for m in wide.modules() if isinstance(m, MultiheadAttention)):
        chosen = module.encoding.spec.options
        assert (chosen.grid_height, chosen.grid_width) == (5, 3)
    with torch.no_grad():
        assert wide(image).isfinite().all()
    state.pop("encoder.embed_tokens.grid")  # as in older checkpoints
    again = model_of("40x24", **options)
    again.load_state_dict(copy.deepcopy(state))
    assert torch.equal(again.encoder.embed_positions.weight, wide.encoder.embed_positions.weight)
    back = model_of(**options)
    back.load_state_dict(wide.state_dict())  # its grid is not square
    assert back.encoder.embed_positions.weight.shape == table.shape


@BOTH
@pytest.mark.parametrize("age", ["new", "without the grid of rotations", "without any grid"])
@pytest.mark.parametrize("encoding", ["liere", "comrope-ld"])
def test_rotations_stay_as_they_are_in_images_of_another_size(attention, encoding, age):
    """Whatever is known of the training: the cells at an offset turn as they did."""
    options = {"attention_type": attention, "position_encoding": encoding}
    trained = model_of("40x24" if age != "without any grid" else 32, **options)
    state = {
        name: x
        for name, x in trained.state_dict().items()
        if not name.endswith("grid" if age == "without any grid" else GRIDS[age])
    }
    wide = model_of("64x48", **options)
    wide.load_state_dict(copy.deepcopy(state))
    own, other = (
        [m.encoding for m in model.modules() if isinstance(m, MultiheadAttention)]
        for model in (trained, wide)
    )
    rows, columns = torch.tensor([0, 2, 3, 1]), torch.tensor([0, 1, 2, 2])
    for ours, theirs in zip(own, other, strict=True):
        at, there = (
            encoding.coordinates(encoding.spec.options.grid_width * rows + columns)
            for encoding in (ours, theirs)
        )
        torch.testing.assert_close(there, at)
        assert theirs.coordinates(torch.tensor([47])).min() > 1  # the last of 8 x 6 cells


GRIDS = {"new": "nothing", "without the grid of rotations": "encoding.grid"}
"""What the names of the parts end with that a checkpoint of this age lacks."""


def test_patches_of_images_are_those_of_a_convolution_in_raster_order():
    embed = Images(7, PAD, patch=4, columns=3, channels=3)
    convolution = nn.Conv2d(3, 7, 4, 4)
    convolution.weight.data = embed.linear.weight.data.unflatten(1, (3, 4, 4))
    convolution.bias.data = embed.linear.bias.data
    image = torch.randn(2, 3, 8, 12)
    expected = convolution(image).flatten(2).transpose(1, 2)
    torch.testing.assert_close(embed(embed.cells(image)), expected)
    with pytest.raises(ValueError, match="not made of rows of 3 patches of 4 x 4"):
        embed.cells(torch.randn(1, 3, 8, 16))


def test_the_tokenizer_of_a_compact_transformer_is_a_convolution_relu_and_max_pooling():
    embed = Convolved(7, PAD, patch=3, columns=10, channels=3)
    image = torch.randn(2, 3, 32, 32)
    places = nn.functional.relu(nn.functional.conv2d(image, embed.conv.weight))
    expected = nn.functional.max_pool2d(places, 3).flatten(2).transpose(1, 2)
    found = embed(embed.cells(image))
    assert found.shape == (2, 100, 7)
    torch.testing.assert_close(found, expected)
    with pytest.raises(ChoiceError, match="not rows of 10 cells of 3 x 3"):
        embed.cells(torch.randn(1, 3, 32, 35))


def test_a_compact_transformer_has_one_token_per_pooled_cell_and_trains_all_its_weights():
    options = {
        "patch_embedding": "convolution",
        "patch": 3,
        "pooling": "gate",
        "final_norm": "before",
    }
    model = model_of(**options)
    assert model.encoder.embed_tokens.grid.tolist() == [10, 10]
    model(torch.randn(2, 3, 32, 32).double()).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    alone = model(torch.zeros(1, 3, 32, 32).double())
    assert alone.shape == (1, 5)


def test_small_images_of_the_right_size_are_not_resized_or_cropped():
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    found = Crop(32, 32)(Image.fromarray(pixels)).permute(1, 2, 0)
    expected = (pixels / 255 - np.array(images.MEAN)) / np.array(images.STD)
    torch.testing.assert_close(found.double(), torch.from_numpy(expected), rtol=0, atol=1e-6)
    # a larger image of the right size is cropped as all others are
    large = Image.fromarray(np.kron(pixels, np.ones((2, 2, 1), np.uint8)))
    assert Crop(64, 64)(large).shape == (3, 64, 64)
    assert not torch.equal(Crop(64, 64)(large), images.normalized(large))


def test_the_augmentation_of_cifar10_needs_small_images_and_torchvision(monkeypatch):
    with pytest.raises(Refusal, match="at most 32 x 32 pixels"):
        images.small_augmentation(64, 64)
    monkeypatch.setitem(sys.modules, "torchvision.transforms", None)
    with pytest.raises(Refusal, match="needs torchvision"):
        images.small_augmentation(32, 32)


def test_pixels_in_color_are_patches_too():
    embed = Pixels(7, PAD, 2, 3, 0.0, 1.0, channels=3)
    image = torch.randint(4, 260, (1, 4, 6, 3))
    cells = embed.cells(image.flatten(1))[0]
    assert cells[4].tolist() == image[0, 2:4, 2:4].flatten().tolist()
    assert embed(embed.cells(image.flatten(1))).shape == (1, 6, 7)
    single = Pixels(7, PAD, 1, 0, 0.0, 1.0, channels=3)
    assert single.cells(image.flatten(1))[0, 5].tolist() == image[0, 0, 5].tolist()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"input": "pixels"}, "need each other"),
        ({"patch": 12}, "images of 32 x 32 pixels are not made of patches of 12 x 12"),
        ({"grid_width": 5}, "have 4 rows of 4 patches: leave --grid-width and --grid-height out"),
        ({"channels": 3}, "--channels is an option of --input pixels: leave it out"),
        (
            {"patch_embedding": "convolution", "patch": 4},
            "not made of patches of 4 x 4 after the convolution, which takes off 2",
        ),
    ],
)
def test_options_that_contradict_the_images_are_refused(options, sentence):
    config = OmegaConf.structured(LRPEViTTinyConfig(**options))
    with pytest.raises(Refusal, match=sentence):
        LRPEViT.build_model(config, task_of_images())


def test_copies_of_an_image_are_in_different_batches_of_one_update():
    order = UpdateOrder(repeats=3, batch=10, batches=4)
    found = order(np.random.default_rng(0).permutation(1000)).reshape(768 // 40, 4, 10)
    assert len(np.unique(found)) == found.size
    for update in found % 1000:
        for batch in update:
            assert len(np.unique(batch)) == len(batch)
    updates_of = {image: set(np.nonzero(found % 1000 == image)[0]) for image in range(1000)}
    assert max(map(len, updates_of.values())) <= 2  # a boundary may separate copies
    assert sum(len(updates) == 2 for updates in updates_of.values()) <= len(found)


def repeated(permutation, ranks, rank):
    """The images of one process in an epoch of DeiT's repeated augmentation with three copies."""
    copies = np.repeat(permutation, 3)
    copies = np.append(copies, copies[: -len(copies) % ranks])
    return copies[rank::ranks][: len(permutation) // 256 * 256 // ranks].tolist()


def test_an_epoch_has_the_images_of_deit_s_sampler():
    ranks, count = 4, 1000
    permutation = torch.randperm(count, generator=torch.Generator().manual_seed(0)).numpy()
    ours = UpdateOrder(repeats=3, batch=2, batches=ranks)(permutation)  # 768: a multiple of 8
    for rank in range(ranks):
        found = (ours.reshape(-1, ranks, 2)[:, rank] % count).flatten().tolist()
        assert found == repeated(permutation, ranks, rank)
        if importlib.util.find_spec("timm"):
            from timm.data.distributed_sampler import RepeatAugSampler

            assert found == list(RepeatAugSampler(range(count), num_replicas=ranks, rank=rank))


def bright_image(label, generator):
    """A noisy image with one bright color, its class."""
    pixels = generator.integers(0, 128, (40, 48, 3))
    pixels[..., label] += 127
    return Image.fromarray(pixels.astype(np.uint8))


def write_class_folders(folder, count=24, classes=2):
    """Write images, whose classes take turns, in the layout of ImageNet: train|val/<class>."""
    generator = np.random.default_rng(0)
    for split, number in product(("train", "val"), range(count)):
        label = number % classes
        path = folder / split / f"n{label:08}" / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        bright_image(label, generator).save(path)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder ``bin`` of such images, whose number is the place in the index."""
    folder = tmp_path_factory.mktemp("images")
    write_class_folders(folder)
    (folder / "val").rename(folder / "valid")
    unpacked(folder, {"bin/label/dict.txt": b"0 1\n1 1\n"})
    for split in ("train", "valid"):
        paths = sorted((folder / split).glob("*/*.png"), key=lambda path: path.name)
        lines = (
            f"{int(path.parent.name[1:])}\t{path.stat().st_size}\t{path.relative_to(folder)}\n"
            for path in paths
        )
        (folder / "bin" / f"{split}.tsv").write_text("".join(lines))
    return folder / "bin"


def task_with(bin_dir, **options):
    given = {"data": str(bin_dir), "num_classes": 2, "image_size": 32, "seed": 1, "curriculum": 9}
    batches = {"batch_size": 4, "update_freq": [3], "required_batch_size_multiple": 1}
    chosen = {**given, **batches, **options}
    return LRPEImagesTask.setup_task(OmegaConf.structured(ImagesConfig(**chosen)))


def batches_in(task, epoch=1, workers=0):
    task.load_dataset("train")
    iterator = task.get_batch_iterator(
        task.dataset("train"), max_sentences=4, epoch=epoch, num_workers=workers
    )
    return list(iterator.next_epoch_itr(shuffle=False))


def test_validation_images_are_resized_cropped_and_normalized(written):
    task = task_with(written, no_augmentation=True)
    task.load_dataset("valid")
    sample = task.dataset("valid")[0]
    with Image.open(written.parent / "valid" / "n00000000" / "00.png") as image:
        resized = np.array(image.resize((43, 36), Image.Resampling.BICUBIC))[2:34, 6:38]
    expected = (resized / 255 - np.array(images.MEAN)) / np.array(images.STD)
    found = sample["image"].permute(1, 2, 0).double()
    torch.testing.assert_close(found, torch.from_numpy(expected), rtol=0, atol=1e-6)
    batch = task.dataset("valid").collater([task.dataset("valid")[n] for n in (0, 1)])
    assert batch["target"].tolist() == [0, 1]
    assert batch["ntokens"] == 2 * 32 * 32


@needs_timm
@pytest.mark.parametrize("size", [(300, 400), (400, 300), (256, 256), (500, 333)])
def test_the_crop_of_evaluation_is_timm_s(size):
    from timm.data import create_transform

    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    timm = create_transform(224, is_training=False, interpolation="bicubic", crop_pct=224 / 256)
    torch.testing.assert_close(Crop(224, 224)(image), timm(image), rtol=0, atol=1e-6)


def test_repeated_images_come_in_order_and_every_epoch_has_others(written):
    task = task_with(written, no_augmentation=True, repeats=3)
    first, again, second = (batches_in(task, epoch) for epoch in (1, 1, 2))
    ids = [[batch["id"].tolist() for batch in epoch] for epoch in (first, again, second)]
    assert ids[0] == ids[1] != ids[2]
    assert [len(batch) for batch in ids[0]] == [4] * 6
    update = sorted(image % 24 for batch in ids[0][:3] for image in batch)
    assert update == sorted(np.repeat(np.unique(update), 3))
    for batch in first:
        assert batch["target"].tolist() == [image % 24 % 2 for image in batch["id"].tolist()]


@needs_timm
def test_augmentation_depends_on_seed_epoch_and_place_only(written):
    def images_of(epoch=1, workers=0, seed=1):
        task = task_with(written, repeats=3, seed=seed)
        return torch.cat([b["net_input"]["src_tokens"] for b in batches_in(task, epoch, workers)])

    first = images_of()
    assert torch.equal(first, images_of(workers=2))
    assert not torch.equal(first, images_of(epoch=2))
    assert not torch.equal(first, images_of(seed=2))


@needs_timm
def test_copies_of_an_image_differ_and_other_random_numbers_are_not_touched(written):
    task = task_with(written, repeats=3)
    task.load_dataset("train")
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    one, two = (task.dataset("train")[index] for index in (5, 5 + 24))
    assert not torch.equal(one["image"], two["image"])
    assert task.dataset("train").collater([one, two])["target"].shape == (2, 2)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (np.random.get_state()[1].tolist(), random.getstate())


@needs_timm
def test_mixed_targets_are_probabilities_of_the_batch_and_its_reverse(written):
    seen = set()
    for batch in batches_in(task_with(written, repeats=3)):
        target = batch["target"]
        assert target.dtype == torch.float64
        torch.testing.assert_close(target.sum(1), torch.ones(4).double())
        labels = torch.nn.functional.one_hot(batch["id"] % 24 % 2, 2).double()
        mixed = labels != labels.flip(0)
        seen |= set(target[mixed].flatten().tolist())
        torch.testing.assert_close(target[~mixed], labels[~mixed])
    assert len(seen) > 2


REFUSED = {
    "label/dict.txt": {"data": "nowhere"},
    "lists 2 classes: set --num-classes 2, not 3": {"num_classes": 3},
    "an even number": {"batch_size": 3},
    "--repeats 4 needs as many batches per update, not 3": {"repeats": 4},
    "set --curriculum": {"repeats": 3, "curriculum": 0},
    "cuts batches of 10 to a multiple of 8": {"batch_size": 10, "required_batch_size_multiple": 8},
    "24 images are less than one update of 36": {"repeats": 3, "batch_size": 12},
    "--repeats must be at least 1": {"repeats": 0},
    "such as 288x224, or one number for both, not '32x'": {"image_size": "32x"},
    "such as 288x224, or one number for both, not '0'": {"image_size": "0"},
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_options_that_cannot_work_are_refused_in_one_sentence(sentence, written, monkeypatch):
    monkeypatch.setattr(images, "augmentation", lambda cfg: None)
    monkeypatch.setattr(images, "mixing_of", lambda cfg: lambda x, y: (x, y))
    with pytest.raises(Refusal, match=sentence):
        task_with(written, **REFUSED[sentence]).load_dataset("train")


def test_without_timm_augmentation_is_refused_in_one_sentence(written, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm.data", None)
    with pytest.raises(Refusal, match=r"the extra \[vision\]"):
        task_with(written).load_dataset("train")
    task_with(written).load_dataset("valid")


@pytest.mark.parametrize("line", ["", "x\t1\ta.png\n", "0\ta.png\n", "2\t1\ta.png\n"])
def test_a_damaged_index_is_refused(line, tmp_path):
    (tmp_path / "train.tsv").write_text(line)
    with pytest.raises(Refusal, match="prepare"):
        images.read_index(tmp_path / "train.tsv", 2)


RAMP = np.arange(256, dtype=np.uint8).reshape(16, 16)
HALF = Image.fromarray(np.full_like(RAMP, 128))
WITH_ALPHA = ["LA", "La", "PA", "RGBA", "RGBa"]


def in_mode(mode, alpha=255):
    """The ramp in a mode of Pillow, over its whole range."""
    ramp = Image.fromarray(RAMP)
    if mode == "LAB":
        return Image.merge(mode, (ramp, HALF, HALF))
    if mode.startswith("I;16"):
        values = (RAMP.astype(np.uint16) * 257).astype(">u2" if mode == "I;16B" else "<u2")
        return Image.frombytes(mode, ramp.size, values.tobytes())
    plain = ramp.convert({"La": "LA", "RGBa": "RGBA"}.get(mode, mode))
    if alpha < 255:
        plain.putalpha(alpha)
    return plain.convert(mode)


@pytest.mark.parametrize("mode", sorted({*Image.MODES} - {"I", "F"}))
def test_the_values_of_an_image_of_any_mode_keep_their_range(mode):
    image = in_mode(mode)
    expected = np.asarray(image) * 255 if mode == "1" else RAMP
    found = np.asarray(in_eight_bits(image)).astype(int)
    atol = 10 if mode == "LAB" else 0  # its lightness is not the gray of sRGB
    np.testing.assert_allclose(found, np.stack([expected] * 3, axis=-1), rtol=0, atol=atol)


@pytest.mark.parametrize("mode", WITH_ALPHA)
def test_an_image_of_any_mode_with_alpha_is_shown_on_white(mode):
    found = np.asarray(in_eight_bits(in_mode(mode, alpha=128))).astype(int)
    expected = np.stack([RAMP * (128 / 255) + 127] * 3, axis=-1)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1.01)


KEYS = {  # mode of an image whose first pixel has the transparent color -> pixels, the color
    "L": (np.array([[7, 51]], np.uint8), 7),
    "I;16": (np.array([[7 * 256 + 9, 51 * 257]], np.uint16), 7 * 256 + 9),
    "RGB": (np.array([[[1, 2, 3], [51] * 3]], np.uint8), (1, 2, 3)),
    "P": (np.array([[0, 51]], np.uint8), b"\0"),
}


@pytest.mark.parametrize("mode", KEYS)
def test_a_transparent_color_of_a_png_is_white(mode):
    pixels, color = KEYS[mode]
    image, file = Image.fromarray(pixels), io.BytesIO()
    if mode == "P":
        image.putpalette(np.repeat(np.arange(256, dtype=np.uint8), 3).tobytes())
    assert image.mode == mode
    image.save(file, "PNG", transparency=color)
    assert np.asarray(read_image(file)).tolist() == [[[255] * 3, [51] * 3]]


@pytest.fixture
def bad_image(request, tmp_path):
    """A file that is no image, or one that cannot be shown in 8 bits."""
    path, ramp = tmp_path / f"0.{request.param.partition(' ')[0]}", Image.fromarray(RAMP)
    ramp.save(file := io.BytesIO(), "PNG")
    content = file.getvalue()
    match request.param:
        case "tif F" | "tif I":
            ramp.convert(request.param[-1]).save(path)
        case "png above the limit":
            ramp.resize((2001, 1)).save(path)
        case "png cut":
            path.write_bytes(content[:-26])
        case "png with a wrong checksum":
            path.write_bytes(content.replace(b"IDAT", b"IDAU"))
        case "png text":
            path.write_bytes(b"no image")
    return path


UNREADABLE = r"0\.png cannot be read as an image"
LARGE = r"0\.png has more pixels than the 1,000 that Pillow reads: make it"


@pytest.mark.parametrize(
    ("bad_image", "sentence"),
    [
        *((f"png {x}", UNREADABLE) for x in ("text", "cut", "with a wrong checksum", "absent")),
        ("png above the limit", LARGE),
        ("tif I", r"0\.tif has pixels of mode I, whose white is unknown: convert it"),
        ("tif F", r"0\.tif has pixels of mode F, whose white is unknown: convert it"),
    ],
    indirect=["bad_image"],
)
def test_a_bad_image_is_refused_in_one_sentence(bad_image, sentence, written, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    task = task_with(written)
    task.load_dataset("valid")
    data = task.dataset("valid")
    data.files = np.array([str(bad_image).encode()] * len(data))
    with pytest.raises(Refusal, match=sentence) as refused:
        data[0]
    assert "\n" not in str(refused.value)
    with ThreadPoolExecutor() as pool, pytest.raises(ChoiceError, match=sentence):
        pool.submit(data.__getitem__, 0).result()  # in fairseq's thread an exit would be lost


def test_a_criterion_of_texts_and_another_image_size_in_one_training_are_refused(written):
    with pytest.raises(Refusal, match="is for texts: pass --criterion lrpe_classification"):
        task_with(written).build_criterion(SimpleNamespace(_name="cross_entropy"))
    learned = {"encoder_learned_pos": True, "max_positions": None}
    for model, name, old, new in (
        ({}, "image_size", 32, "48x32"),
        (learned, "tokens_per_sample", 32, 16),
    ):
        before, now = ({"model": model, "task": {name: size}} for size in (old, new))
        with pytest.raises(Refusal, match=f"={old}; this training has .*={new}"):
            check_resumed("last.pt", before, now)


@pytest.mark.parametrize(("seed", "updates", "refused"), [(2, 5, 0), (1, 4, 0), (2, 4, 1)])
def test_a_training_that_has_ended_does_not_stand_for_one_of_another_seed(seed, updates, refused):
    before, now = ({"common": {"seed": n}, "optimization": {"lr": [1]}} for n in (1, seed))
    now["optimization"]["max_update"] = updates
    state = {"optimizer_history": [{"num_updates": 4}], "cfg": before}
    with pytest.raises(Refusal, match=r"with common\.seed=1") if refused else nullcontext():
        check_unfinished("last.pt", state, now)
