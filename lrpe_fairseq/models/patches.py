"""The inputs of a classifier that are no symbols: pixels, and images in color.

Axes: B batch, T tokens, C width, N numbers per token.
"""

import math
from numbers import Real
from typing import Any

import torch
from fairseq.modules import LearnedPositionalEmbedding
from torch import Tensor, nn
from torch.nn import functional as F

from lrpe_fairseq.encodings.core.options import check_number, flag_of
from lrpe_fairseq.encodings.rotations.lie import BlockRotation
from lrpe_fairseq.errors import ChoiceError, refuse
from lrpe_fairseq.image_files import rows_and_columns

BLACK = 4
"""The id of the symbol ``0``: ids 0 to 3 are fairseq's special symbols."""
COLORS = 3
OF_PIXELS = {"pixel_mean": 0.5, "pixel_std": 0.5}
"""Options of ``--input pixels`` that other inputs do not read, with their defaults."""
LINEAR, CONVOLUTION = "linear", "convolution"
"""Values of ``--patch-embedding``."""
KERNEL = 3
BORDER = KERNEL - 1
"""Rows and columns that a convolution without padding takes off an image."""
STD = 0.02
"""Of learned absolute positions."""


class Patches(nn.Module):
    """Embed patches of p x p pixels by one linear map, in place of an embedding of tokens.

    A subclass defines ``cells`` (the numbers of every patch in raster order, (B, T, N)), ``shape``
    (token ids (B, T); only padding is distinguished) and ``forward`` (cells -> (B, T, C)).

    Args:
        width: C. pad: the id of padding.
        patch: p; 1 for single pixels. columns: patches in a row of the image.
        channels: numbers per pixel.
    """

    def __init__(self, width: int, pad: int, patch: int, columns: int, channels: int) -> None:
        super().__init__()
        self.embedding_dim = width
        self.padding_idx = pad
        self.patch = patch
        self.columns = columns
        self.channels = channels
        self.linear = nn.Linear(channels * patch * patch, width)


class Pixels(Patches):
    """Symbols 0 to 255 as numbers: Linear of (value / 255 - mean) / std.

    The numbers of a pixel follow each other, and pixels are in raster order. Images of different
    heights may be in one batch. mean, std: of pixels from 0 to 1.
    """

    def __init__(
        self,
        width: int,
        pad: int,
        patch: int,
        columns: int,
        mean: float,
        std: float,
        channels: int = 1,
    ) -> None:
        super().__init__(width, pad, patch, columns, channels)
        self.mean = mean
        self.std = std

    def cells(self, inputs: Tensor) -> Tensor:
        """Return the ids (B, T, N) of ``inputs``, ids (B, numbers).

        Raises: ChoiceError if an image does not consist of whole patches.
        """
        p = self.patch
        columns = self.columns
        channels = self.channels
        # one row of patches; single pixels need no rows, so that images of any width are read
        band = channels * (columns * p * p if p > 1 else 1)
        real = inputs.ne(self.padding_idx).sum(1)
        if inputs.shape[1] % band or (real % band).any():
            raise ChoiceError(
                f"an image of {int(real.max())} pixels is not made of rows of {columns} patches of "
                f"{p} x {p}"
                + (f" in {channels} channels" if channels > 1 else "")
                + ": change --grid-width or --patch"
            )
        if p == 1:
            return inputs.view(len(inputs), -1, channels)
        rows = inputs.view(len(inputs), -1, p, columns, p * channels)  # B rows p columns (p N)
        return rows.transpose(2, 3).flatten(3).flatten(1, 2)

    def shape(self, cells: Tensor) -> Tensor:
        """Return the ids of the first numbers of patches, 0 where they are not padding."""
        return cells[..., 0].masked_fill(cells[..., 0] != self.padding_idx, 0)

    def forward(self, cells: Tensor) -> Tensor:
        """Embed the ids of :meth:`cells`."""
        # ids are in the order of the values, as data-prep writes the dictionary
        value = (cells - BLACK).to(self.linear.weight.dtype) / 255
        return self.linear((value - self.mean) / self.std)


class Images(Patches):
    """Normalized images in color, (B, 3, R, C), of one size: no padding."""

    def cells(self, inputs: Tensor) -> Tensor:
        """Return the numbers (B, T, 3 p p) of each patch, channel by channel; see Pixels.

        Raises: ChoiceError if the image does not consist of whole patches.
        """
        p = self.patch
        height, width = inputs.shape[-2:]
        if height % p or width != p * self.columns:
            raise ChoiceError(
                f"an image of {width} x {height} pixels is not made of rows of {self.columns} "
                f"patches of {p} x {p}: change --grid-width or --patch"
            )
        rows = inputs.unflatten(3, (-1, p)).unflatten(2, (-1, p))  # B 3 rows p columns p
        return rows.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)

    def shape(self, cells: Tensor) -> Tensor:
        """Return zeros (B, T), which are not padding."""
        return torch.zeros(cells.shape[:2], dtype=torch.long, device=cells.device)

    def forward(self, cells: Tensor) -> Tensor:
        """Embed the patches."""
        return self.linear(cells.to(self.linear.weight.dtype))


class Convolved(Images):
    """The tokenizer of a compact convolutional transformer, in place of the linear map of patches.

    A convolution of 3 x 3 pixels without padding and bias, ReLU, and the maximum over p x p places
    (Hassani et al., 2021; ``004_…`` Table 3). A token depends on (p + 2) x (p + 2) pixels.
    """

    def __init__(self, width: int, pad: int, patch: int, columns: int, channels: int) -> None:
        super().__init__(width, pad, patch, columns, channels)
        del self.linear
        self.conv = nn.Conv2d(channels, width, KERNEL, bias=False)
        nn.init.kaiming_normal_(self.conv.weight)

    def cells(self, inputs: Tensor) -> Tensor:
        """Return the numbers (B, T, 3 (p + 2) (p + 2)) of each window; see Images.

        Raises: ChoiceError if the places of the convolution are not made of whole cells.
        """
        p = self.patch
        height, width = (side - BORDER for side in inputs.shape[-2:])
        if height < p or height % p or width != p * self.columns:
            raise ChoiceError(
                f"a convolution of {inputs.shape[-1]} x {inputs.shape[-2]} pixels has {width} x "
                f"{height} places, not rows of {self.columns} cells of {p} x {p}: change --patch"
            )
        # windows overlap by the border of the convolution
        return F.unfold(inputs, p + BORDER, stride=p).transpose(1, 2)

    def forward(self, cells: Tensor) -> Tensor:
        """Embed the windows: (B, T, N) -> (B, T, C)."""
        side = self.patch + BORDER
        windows = cells.to(self.conv.weight.dtype).reshape(-1, self.channels, side, side)
        return F.relu(self.conv(windows)).amax((2, 3)).view(*cells.shape[:2], -1)


def build_patches(options: Any, width: int, pad: int) -> Patches:
    """Return the embedding of ``--input pixels`` or ``--input image``."""
    if str(options.input) == "image":
        kind = Convolved if str(options.patch_embedding) == CONVOLUTION else Images
        images = kind(width, pad, options.patch, options.grid_width, channels=COLORS)
        grid = torch.tensor([options.grid_height, options.grid_width])
        images.register_buffer("grid", grid)  # that of learned positions, for other sizes
        return images
    return Pixels(
        width,
        pad,
        options.patch,
        options.grid_width,
        mean=options.pixel_mean,
        std=options.pixel_std,
        channels=options.channels,
    )


def init_positions(positions: nn.Module | None) -> None:
    """Draw learned absolute positions of images anew, truncated at two deviations, as in DeiT."""
    if isinstance(positions, LearnedPositionalEmbedding):
        nn.init.trunc_normal_(positions.weight, std=STD, a=-2 * STD, b=2 * STD)
        nn.init.zeros_(positions.weight[positions.padding_idx])


def fit_positions(encoder: nn.Module, state: dict[str, Tensor], prefix: str) -> None:
    """Fit learned positions of ``state`` to the encoder: those of images are interpolated to its
    grid, bicubic, as in DeiT; of those of texts the first ones are taken.

    state: of a checkpoint, changed in place; names begin with ``prefix``. If it is too old to
        contain its grid, the grid is square.
    Raises: Refusal if it has fewer positions than a text may have tokens.
    """
    embedder = encoder.embed_tokens
    positions = f"{prefix}embed_positions.weight"
    if not hasattr(embedder, "grid"):
        embedding = encoder.embed_positions
        if positions in state and isinstance(embedding, LearnedPositionalEmbedding):
            state[positions] = _first(state[positions], embedding)
        return
    grid = embedder.grid
    name = f"{prefix}embed_tokens.grid"
    _fit_rotations(encoder, state, prefix)  # before the grid of the state is replaced
    if (table := state.get(positions)) is not None:
        first = encoder.embed_positions.padding_idx + 1
        side = math.isqrt(len(table) - first)
        saved = state.get(name, grid.new_tensor([side, side]))
        if saved.tolist() != grid.tolist():
            # rows H W C -> an image C H W, whose channels are interpolated
            cells = table[first:].float().unflatten(0, saved.tolist()).movedim(-1, 0)
            fitted = F.interpolate(cells[None], grid.tolist(), mode="bicubic")[0]
            rows = fitted.flatten(1).T.to(table.dtype)
            state[positions] = torch.cat([table[:first], rows])
    state[name] = grid


def _fit_rotations(encoder: nn.Module, state: dict[str, Tensor], prefix: str) -> None:
    """Note the grid of the training for rotations by fractions of it, if ``state`` is too old to.

    It is that of the images, or square if the state is too old for this, too.
    """
    trained = state.get(f"{prefix}embed_tokens.grid")
    table = state.get(f"{prefix}embed_positions.weight")
    if trained is None and table is not None:
        side = math.isqrt(len(table) - encoder.embed_positions.padding_idx - 1)
        trained = encoder.embed_tokens.grid.new_tensor([side, side])
    if trained is None:
        return
    for name, module in encoder.named_modules():
        if isinstance(module, BlockRotation) and module.axes == 2:
            state.setdefault(f"{prefix}{name}.grid", trained)


def _first(table: Tensor, embedding: nn.Embedding) -> Tensor:
    """Return as many learned positions of ``table`` as ``embedding`` has."""
    rows = len(embedding.weight)
    first = embedding.padding_idx + 1
    if len(table) < rows:
        refuse(
            f"the checkpoint has learned positions for {len(table) - first} tokens, and inputs of "
            f"{rows - first} are asked for: use inputs of at most {len(table) - first}"
        )
    return table[:rows]


def fit_grid(options: Any, task: Any) -> None:
    """Set ``grid_width`` and ``grid_height`` of a model of images to the patches of an image.

    Raises: ChoiceError if the image is not made of patches, or the options say another grid.
    """
    # pixels of other inputs have no size that the task knows
    if str(options.input) != "image" or getattr(task, "image_size", None) is None:
        return
    sides = rows_and_columns(task.image_size)
    patch = options.patch
    border = BORDER if str(options.patch_embedding) == CONVOLUTION else 0
    grid = [(side - border) // patch for side in sides]
    if any((side - border) % patch for side in sides):
        after = f" after the convolution, which takes off {border}," if border else ""
        raise ChoiceError(
            f"images of {sides[0]} x {sides[1]} pixels are not made of patches of {patch} x "
            f"{patch}{after}: change --image-size or --patch"
        )
    # a checkpoint has the grid of its training, which may be given again
    if options.grid_width not in (0, grid[1]) or options.grid_height not in (0, grid[0]):
        raise ChoiceError(
            f"images of {sides[0]} x {sides[1]} pixels have {grid[0]} rows of {grid[1]} patches: "
            "leave --grid-width and --grid-height out"
        )
    options.grid_height, options.grid_width = grid


def check_patches(options: Any, task: Any) -> None:
    """Raise ChoiceError if the options of pixels and images contradict each other or the task."""
    kind = str(options.input)
    if (kind == "image") != (getattr(task, "image_size", None) is not None):
        raise ChoiceError("--input image and the task lrpe_images need each other")
    if kind != "image" and str(options.patch_embedding) != LINEAR:
        raise ChoiceError("--patch-embedding is an option of --input image: leave it out")
    if kind == "pixels":
        _check_pixels(options, task.source_dictionary)
        return
    for name, usual in OF_PIXELS.items():
        if getattr(options, name) != usual:
            raise ChoiceError(f"{flag_of(name)} is an option of --input pixels: leave it out")
    if kind == "tokens" and options.patch != 1:
        raise ChoiceError("--patch is an option of --input pixels and image: leave it out")
    if options.channels != 1:
        raise ChoiceError("--channels is an option of --input pixels: leave it out")


def _check_pixels(options: Any, dictionary: Any) -> None:
    """Check that symbol v of the dictionary is the number v, and the options of pixels."""
    if options.patch > 1 and not options.grid_width:
        raise ChoiceError("--patch needs --grid-width, the number of patches in a row")
    check_number("--pixel-mean", options.pixel_mean, Real)
    check_number("--pixel-std", options.pixel_std, Real, above=0)
    # ids are used as numbers
    if dictionary.symbols[BLACK:] != [str(value) for value in range(256)]:
        raise ChoiceError(
            "--input pixels needs a dictionary of the symbols 0 to 255 in this order: prepare the "
            "data with a script for images, or use --input tokens"
        )
