"""Prepare ImageNet-1k, or other images in class folders, for fairseq.

    python data-prep/imagenet/prepare.py --dest data/imagenet --from FOLDER

See the README in this folder for source, splits and files.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lrpe_fairseq.experiments.data import images
from lrpe_fairseq.experiments.data.corpus import say
from lrpe_fairseq.experiments.records.console import UserError, command


@command("data-prep/imagenet/prepare.py")
def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and prepare the images."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dest", type=Path, required=True, help="output folder")
    parser.add_argument(
        "--from",
        dest="from_dir",
        type=Path,
        help="folder with train/ and val/, each with one folder per class, or the three archives",
    )
    parser.add_argument(
        "--any-images", action="store_true", help="accept other images than ImageNet-1k's"
    )
    options = parser.parse_args(argv)
    if options.from_dir is None:
        raise UserError(
            "ImageNet has no public download: register at https://image-net.org/download, and pass "
            "the folder with its archives, or with train and val, with --from."
        )
    source = images.FOLDER if options.any_images else images.IMAGENET
    say(f"{source.name}, {source.level} -> {options.dest}")
    images.prepare_folders(options.dest, options.from_dir, source)


if __name__ == "__main__":
    sys.exit(main())
