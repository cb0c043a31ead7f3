"""``lrpe_images``: one class for one image in color, read from files.

The data are a folder ``bin/`` with ``label/dict.txt`` and an index ``<split>.tsv``: on each line a
class, the size of a file in bytes, and its path relative to the parent of ``bin/``. It is written
by data-prep/imagenet. Images are decoded by Pillow. Augmentation is timm's, the extra [vision].

All random choices depend on the seed, the epoch and the place in the epoch only, and those of mixup
and cutmix on the batch. They are the same for every number of workers, for every number of
processes that trains on the same batches, and after a resumption.
"""

import math
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any, Optional

import numpy as np
import torch
from fairseq.data import Dictionary
from fairseq.dataclass import FairseqDataclass
from fairseq.distributed.utils import get_global_world_size
from fairseq.tasks import register_task
from omegaconf import II
from torch import Tensor
from torch.utils.data import get_worker_info

from lrpe_fairseq.encodings.core.options import option
from lrpe_fairseq.errors import one_sentence_errors, refuse
from lrpe_fairseq.image_files import read_image, rows_and_columns
from lrpe_fairseq.tasks.classification import ClassTask, check_classes
from lrpe_fairseq.tasks.datasets import EpochDataset
from lrpe_fairseq.tasks.missing_data import single_folder

NAME = "lrpe_images"
MEAN = (0.485, 0.456, 0.406)
"""Of the pixels of ImageNet, from 0 to 1: red, green, blue."""
STD = (0.229, 0.224, 0.225)
"""Standard deviations of the same."""
SMALL = 32
"""Images of at most this many rows and columns, stored at that size, are not resized, as in DeiT's
datasets.py (facebookresearch/deit, commit 012a1007, build_transform)."""
PADDING = 4
"""Pixels around a small image in training, of which a crop of its size is drawn."""
CIFAR10 = "cifar10"
"""``--auto-augment``: torchvision's AutoAugment policy of CIFAR-10, for small images."""
CROP = 224 / 256
"""Side of the central crop in evaluation, relative to the shorter side of the image."""
ROUND = 256
"""An epoch of repeated augmentation has a multiple of this number of images, as in DeiT."""

Transform = Callable[[Any], Tensor]


@dataclass
class ImagesConfig(FairseqDataclass):
    """Options of the task. The defaults of augmentation are DeiT's."""

    data: str = option("", "folder with label/dict.txt and train.tsv, as of data-prep/imagenet")
    num_classes: int = option(0, "number of classes, as in label/dict.txt")
    image_size: str = option(
        "224", "pixels that the model reads: rows x columns, as 288x224, or one number for both"
    )
    no_augmentation: bool = option(False, "train on central crops, without timm")
    color_jitter: float = option(0.4, "brightness, contrast and saturation; not with RandAugment")
    auto_augment: str = option(
        "rand-m9-mstd0.5-inc1",
        "timm's policy, or cifar10: torchvision's AutoAugment of CIFAR-10, for images of at most "
        "32 x 32; empty: none",
    )
    random_erasing: float = option(0.25, "probability to erase a rectangle")
    mixup: float = option(0.8, "alpha of mixup; 0: none")
    cutmix: float = option(1.0, "alpha of cutmix, half of the batches if there is mixup; 0: none")
    repeats: int = option(
        1, "repeated augmentation: copies of an image in one update, in different batches"
    )
    seed: int = II("common.seed")
    batch_size: Optional[int] = II("dataset.batch_size")
    required_batch_size_multiple: int = II("dataset.required_batch_size_multiple")
    curriculum: int = II("dataset.curriculum")
    update_freq: list[int] = II("optimization.update_freq")


@register_task(NAME, dataclass=ImagesConfig)
class LRPEImagesTask(ClassTask):
    """Classification of images.

    A batch has ``net_input`` with ``src_tokens``, normalized images (B, 3, R, C); and ``target``,
    classes int64 (B,), or after mixup and cutmix probabilities, float64 (B, classes), which
    training in half precision leaves as they are. A pixel counts as one token.

    The split ``train`` is augmented; the others are resized and cropped.

    Raises: Refusal for incomplete data, for options that contradict each other, and for
        augmentation without timm.
    """

    pairs = False
    ordered_by_updates = True  # see compat.resumed_place.resume_where_the_data_were_left

    def __init__(self, cfg: ImagesConfig, dictionary: Dictionary) -> None:
        super().__init__(cfg)
        self.dictionary = dictionary

    @classmethod
    def setup_task(cls, cfg: ImagesConfig, **keywords: Any) -> "LRPEImagesTask":
        """Check the data; called by fairseq."""
        folder = single_folder(cfg.data, NAME)
        if not (folder / "label" / "dict.txt").is_file():
            refuse(f"{folder} has no label/dict.txt: prepare the data first")
        check_classes(folder / "label" / "dict.txt", cfg.num_classes)
        if cfg.repeats < 1:
            refuse("--repeats must be at least 1")
        with one_sentence_errors():
            rows_and_columns(cfg.image_size)
        return cls(cfg, Dictionary())

    def load_dataset(self, split: str, combine: bool = False, **keywords: Any) -> None:
        """Load the index of a split; called by fairseq."""
        cfg = self.cfg
        augmented = split == "train" and not cfg.no_augmentation
        files, labels = read_index(Path(cfg.data) / f"{split}.tsv", cfg.num_classes)
        transform = augmentation(cfg) if augmented else Crop(*rows_and_columns(cfg.image_size))
        mixing = mixing_of(cfg) if augmented else None
        order = None  # of a permutation, without mixing and repeats
        if split == "train" and (mixing or cfg.repeats > 1):
            order = self._order(len(files), mixing is not None)
        self.datasets[split] = ImageDataset(
            Path(cfg.data).parent,
            files,
            labels,
            transform,
            pixels=self.max_positions(),
            seed=cfg.seed,
            order=order,
            mixing=mixing,
        )

    def _order(self, images: int, mixed: bool) -> "UpdateOrder":
        """Return the order of an epoch.

        Raises: Refusal for options that do not give batches of one size in this order.
        """
        cfg = self.cfg
        batches = cfg.update_freq[0] * get_global_world_size()
        # timm mixes pairs of a batch, and an order of updates needs batches of one size
        if not cfg.batch_size or (mixed and cfg.batch_size % 2):
            refuse(
                "mixup, cutmix and --repeats need --batch-size, an even number with the first two"
            )
        multiple = cfg.required_batch_size_multiple
        if cfg.batch_size > multiple and cfg.batch_size % multiple:
            refuse(
                f"fairseq cuts batches of {cfg.batch_size} to a multiple of {multiple}: set "
                "--required-batch-size-multiple 1"
            )
        order = UpdateOrder(cfg.repeats, cfg.batch_size, batches)
        if cfg.repeats > batches:
            refuse(
                f"--repeats {cfg.repeats} needs as many batches per update, not {batches}: raise "
                "--update-freq and lower --batch-size"
            )
        if cfg.repeats > 1 and not cfg.curriculum:
            refuse(
                "--repeats needs the batches in their order: set --curriculum to the number of "
                "epochs, so that fairseq does not shuffle them"
            )
        if images < order.update:
            refuse(f"{images} images are less than one update of {order.update}: train on more")
        return order

    def begin_epoch(self, epoch: int, model: Any) -> None:
        """Refuse an epoch whose repeated images fairseq would shuffle over the updates."""
        super().begin_epoch(epoch, model)
        if self.cfg.repeats > 1 and epoch > self.cfg.curriculum:
            refuse(
                f"epoch {epoch} is beyond --curriculum {self.cfg.curriculum}: set it to the number "
                "of epochs, so that fairseq does not shuffle the repeated images"
            )

    def max_positions(self) -> int:
        """Return the number of pixels of an image."""
        return math.prod(rows_and_columns(self.cfg.image_size))

    @property
    def image_size(self) -> str:
        """Rows and columns of an image, as the option has them."""
        return self.cfg.image_size


def read_index(path: Path, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the files, bytes (N,), and the classes, int64 (N,), of an index.

    Raises: Refusal if it is absent, empty or not an index of these classes.
    """
    if not path.is_file():
        refuse(f"{path} does not exist: prepare this split, or choose another one")
    lines = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
    # the size of a file is for the step that writes the index
    if not lines or any(len(line) != 3 or not line[0].isdigit() for line in lines):
        refuse(f"{path} is not a list of classes, sizes and files: prepare the data again")
    labels = np.array([int(line[0]) for line in lines], dtype=np.int64)
    if labels.max() >= classes:
        refuse(f"{path} has the class {labels.max()}, but there are {classes}: prepare it again")
    return np.array([line[2].encode() for line in lines]), labels


# --- the order of an epoch ---------------------------------------------------------------------


@dataclass(frozen=True)
class UpdateOrder:
    """The order of an epoch with whole updates, and with repeated augmentation.

    As in DeiT every image of a permutation is there ``repeats`` times in a row, and the sequence is
    cut at a multiple of 256 not above the number of images. Here it ends with a whole update. Batch
    k of an update has its entries k, k + batches, ...: the copies of an image are in one
    update, unless a boundary separates them, and never in one batch.

    repeats: copies of an image. batch: images in a batch. batches: of an update, over all
    processes.
    """

    repeats: int
    batch: int
    batches: int

    @property
    def update(self) -> int:
        """Images in an update."""
        return self.batch * self.batches

    def __call__(self, permutation: np.ndarray) -> np.ndarray:
        """Return the order of a permutation of N images, int64: copy c of image i is i + N c."""
        count = len(permutation)
        copies = permutation[:, None] + count * np.arange(self.repeats)  # images copies
        kept = count // ROUND * ROUND if count >= ROUND else count
        # at least one update: an epoch may be shorter than it
        whole = kept // self.update * self.update or self.update
        return (
            copies.flatten()[:whole].reshape(-1, self.batch, self.batches).swapaxes(1, 2).flatten()
        )


class ImageDataset(EpochDataset):
    """Images of one split.

    Args:
        folder: of the files. files: bytes (N,). labels: int64 (N,).
        transform: PIL image -> (3, R, C). pixels: R C.
        seed: of all random choices.
        order: permutation -> order of an epoch; None for the permutation.
        mixing: (images, classes) -> (images, probabilities); None for none.
    """

    def __init__(
        self,
        folder: Path,
        files: np.ndarray,
        labels: np.ndarray,
        transform: Transform,
        *,
        pixels: int,
        seed: int = 1,
        order: UpdateOrder | None = None,
        mixing: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        super().__init__()
        self.folder = folder
        self.files = files
        self.labels = labels
        self.transform = transform
        self.pixels = pixels
        self.seed = seed
        self.order = order
        self.mixing = mixing
        self.epoch = 1
        self.sizes = np.full(len(files), self.pixels)

    def __getitem__(self, index: int) -> dict:
        """Return copy ``index // N`` of image ``index % N``."""
        path = self.folder / self.files[index % len(self)].decode()
        # the index is that of a copy, so that copies of an image are augmented differently
        with _refusals(), seeded(self.seed, self.epoch, index):
            return {"id": index, "image": self.transform(read_image(path))}

    def num_tokens_vec(self, indices: np.ndarray) -> np.ndarray:
        """Return the pixels of copies of images, for ``--max-tokens``."""
        return self.sizes[np.asarray(indices) % len(self)]

    def ordered_indices(self) -> np.ndarray:
        """Return the order in which copies of images are put into batches, int64."""
        draw = np.random.default_rng([self.seed, self.epoch]).permutation(len(self))
        return draw if self.order is None else self.order(draw)

    def collater(self, samples: list[dict]) -> dict:
        """Return a batch, mixed in training; {} for no samples, as in fairseq."""
        if not samples:
            return {}
        ids = torch.tensor([sample["id"] for sample in samples])
        images = torch.stack([sample["image"] for sample in samples])
        target = torch.from_numpy(self.labels[ids.numpy() % len(self)])
        if self.mixing is not None:
            # by the ids of the batch, which are the same in every worker and process
            with seeded(self.seed, self.epoch, *ids.tolist()):
                images, target = self.mixing(images, target)
        return {
            "id": ids,
            "net_input": {"src_tokens": images},
            "target": target,
            "nsentences": len(samples),
            "ntokens": len(samples) * self.pixels,
        }


def _refusals() -> AbstractContextManager[None]:
    """Return a context in which a bad image ends the program with one sentence.

    It has no effect outside the main thread: fairseq would wait for ever for a thread or worker
    that exits. Other errors reach the main process.
    """
    outside = get_worker_info() is not None or current_thread() is not main_thread()
    return nullcontext() if outside else one_sentence_errors()


@contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Seed random, numpy and torch on the CPU within the context: timm draws from all three."""
    torch_cpu = torch.default_generator  # torch.manual_seed would also seed GPUs
    before_random = random.getstate()
    before_numpy = np.random.get_state()
    before_torch = torch_cpu.get_state()
    seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch_cpu.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before_random)
        np.random.set_state(before_numpy)
        torch_cpu.set_state(before_torch)


# --- from an image to a tensor -----------------------------------------------------------------


@dataclass(frozen=True)
class Crop:
    """Evaluation: resize, bicubic, take the center and normalize.

    The center of R rows and C columns has 224 / 256 of the height or of the width. A small image of
    R rows and C columns is taken as it is.
    """

    rows: int
    columns: int

    def __call__(self, image: Any) -> Tensor:
        """Return (3, R, C) of an image."""
        return normalized(image if self._is_whole(image) else self._center(image))

    def _is_whole(self, image: Any) -> bool:
        return image.size == (self.columns, self.rows) and max(image.size) <= SMALL

    def _center(self, image: Any) -> Any:
        least_width = int(self.columns / CROP)
        least_height = int(self.rows / CROP)
        width, height = image.size
        # the side that is shorter, relative to the crop, becomes the least one
        if least_width * height >= least_height * width:
            new_width = least_width
            new_height = int(least_width * height / width)
        else:
            new_width = int(least_height * width / height)
            new_height = least_height
        left = round((new_width - self.columns) / 2)
        top = round((new_height - self.rows) / 2)
        image = image.resize((new_width, new_height), resample=3)  # bicubic
        return image.crop((left, top, left + self.columns, top + self.rows))


def normalized(image: Any) -> Tensor:
    """Return (3, R, C) of a PIL image."""
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255
    return (pixels - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


def augmentation(cfg: Any) -> Transform:
    """Return the augmentation of one image: timm's, or that of CIFAR-10."""
    if cfg.auto_augment == CIFAR10:
        return small_augmentation(*rows_and_columns(cfg.image_size))
    return _timm().create_transform(
        rows_and_columns(cfg.image_size),
        is_training=True,
        interpolation="bicubic",
        color_jitter=cfg.color_jitter or None,
        auto_augment=cfg.auto_augment or None,
        re_prob=cfg.random_erasing,
        re_mode="pixel",
        mean=MEAN,
        std=STD,
    )


def small_augmentation(rows: int, columns: int) -> Transform:
    """Return crops of images with a border of 4 pixels, flips, and AutoAugment of CIFAR-10.

    Raises: Refusal for images above 32 x 32, and without torchvision.
    """
    if max(rows, columns) > SMALL:
        refuse(f"--auto-augment {CIFAR10} is for images of at most {SMALL} x {SMALL} pixels")
    try:
        transforms = import_module("torchvision.transforms")
    except ImportError:
        refuse(
            f"--auto-augment {CIFAR10} needs torchvision, of the extra [vision]: run pip install "
            "-e '.[vision]', or train with --no-augmentation (task.no_augmentation=true)"
        )
    return transforms.Compose(
        [
            transforms.RandomCrop((rows, columns), padding=PADDING),
            transforms.RandomHorizontalFlip(),
            transforms.AutoAugment(transforms.AutoAugmentPolicy.CIFAR10),
            normalized,
        ]
    )


def mixing_of(cfg: Any) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """Return mixup and cutmix of a batch with the batch in reverse order; None for none.

    Label smoothing is the criterion's: its effect on mixed probabilities is the same.
    """
    if not (cfg.mixup or cfg.cutmix):
        return None
    timm = _timm()
    mix = timm.Mixup(
        mixup_alpha=cfg.mixup,
        cutmix_alpha=cfg.cutmix,
        label_smoothing=0.0,
        num_classes=cfg.num_classes,
    )

    def mixed(images: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        images, probabilities = mix(images, target)
        # float64, because fairseq rounds float32 tensors of a batch under --fp16
        return images, probabilities.double()

    return mixed


def _timm() -> Any:
    """Return the module timm.data. Raises: Refusal if it is not installed."""
    try:
        return import_module("timm.data")
    except ImportError:
        refuse(
            "augmentation needs timm and torchvision, the extra [vision]: run pip install -e "
            "'.[vision]', or train with --no-augmentation (task.no_augmentation=true)"
        )
