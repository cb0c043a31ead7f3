"""Read the picture of a file as red, green and blue of 8 bits each.

This module imports nothing of torch or fairseq, and Pillow only when a picture is read.
"""

import logging
from pathlib import Path
from typing import IO, Any

import numpy as np

from lrpe_fairseq.errors import ChoiceError

SIXTEEN_BITS = ("PNG", "PPM")
"""File formats whose pictures of Pillow's mode ``I`` have values from 0 to 65,535."""
STEPS = {"1": 255, "L;2": 85, "L;4": 17}
"""Factor by which Pillow brings gray values of a PNG with fewer than 8 bits to 0 to 255."""


def rows_and_columns(size: str | int) -> tuple[int, int]:
    """Return the rows and columns of pixels of ``size``, ``HxW`` or one number for both.

    Raises: ChoiceError for another text.

    >>> rows_and_columns("288x224"), rows_and_columns(224)
    ((288, 224), (224, 224))
    """
    sides = str(size).split("x")
    if len(sides) > 2 or not all(side.isdecimal() and int(side) for side in sides):
        raise ChoiceError(
            f"--image-size is rows x columns, such as 288x224, or one number for both, not {size!r}"
        )
    return int(sides[0]), int(sides[-1])


def read_image(file: Path | IO[bytes], name: str = "") -> Any:
    """Return the picture of a file as a PIL image of mode RGB.

    Values of 16 bits are scaled to 8. Transparent pixels are composited on white.

    name: the file's name in error messages; by default its path.

    Raises: ChoiceError without Pillow, for a file that is no picture or above Pillow's limit of
        pixels, and for values without a known white (int32 and float).
    """
    try:
        from PIL import Image
    except ImportError:
        raise ChoiceError("reading images needs Pillow: run pip install pillow") from None
    name = name or str(file)
    logging.getLogger("PIL").setLevel(logging.INFO)  # fairseq sets all to DEBUG
    try:
        with Image.open(file) as image:
            _scale_transparent_color(image)
            return in_eight_bits(image)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ChoiceError(
            f"{name} has more pixels than the {Image.MAX_IMAGE_PIXELS:,} that Pillow reads: make "
            "it smaller"
        ) from None
    except ChoiceError as error:
        raise ChoiceError(f"{name} {error}") from None
    except Exception as error:  # Pillow raises various types for a damaged file
        raise ChoiceError(
            f"{name} cannot be read as an image ({error}): prepare the data again"
        ) from None


def in_eight_bits(image: Any) -> Any:
    """Return a PIL image of any mode in mode RGB.

    Raises: ChoiceError for values without a known white. Its message lacks the file's name.
    """
    from PIL import Image

    if image.mode == "F" or (image.mode == "I" and image.format not in SIXTEEN_BITS):
        raise ChoiceError(
            f"has pixels of mode {image.mode}, whose white is unknown: convert it to 8 or 16 bits"
        )
    if image.mode.startswith("I"):
        image = _scaled(image)
    elif image.mode == "La":  # Pillow converts it to nothing else
        image = image.convert("LA")
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return image.convert("RGB")


def _scale_transparent_color(image: Any) -> None:
    """Scale the transparent color of a PNG as its pixels; Pillow scales only these."""
    color = image.info.get("transparency")
    if image.format != "PNG" or color is None:
        return
    stored = str(image.tile[0][3])
    if stored in STEPS:
        image.info["transparency"] = color * STEPS[stored]
    if stored == "RGB;16B":  # Pillow keeps the upper byte
        image.info["transparency"] = tuple(value >> 8 for value in color)


def _scaled(image: Any) -> Any:
    """Return gray values of 16 bits in mode L; Pillow's own conversion clips them at 255."""
    from PIL import Image

    values = np.asarray(image).astype(np.uint32)  # 65,535 x 255 has 24 bits
    gray = ((values * 255 + 32767) // 65535).astype(np.uint8)
    # white where the picture is transparent, as for the other modes
    if (transparent := image.info.get("transparency")) is not None:
        gray[values == transparent] = 255
    return Image.fromarray(gray)
