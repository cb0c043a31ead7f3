"""Generate Pathfinder for fairseq.

    python data-prep/pathfinder/prepare.py --dest data/pathfinder16 --size 16

See the README in this folder for the rules and the sizes.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from lrpe_fairseq.experiments.data import pathfinder
from lrpe_fairseq.experiments.data.corpus import say
from lrpe_fairseq.experiments.records.console import UserError, command

SIZE = pathfinder.RECIPES[16].sizes


@command("data-prep/pathfinder/prepare.py")
def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and generate the images."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dest", type=Path, required=True, help="output folder")
    parser.add_argument(
        "--size", type=int, default=16, choices=list(pathfinder.RECIPES), help="pixels in a row"
    )
    parser.add_argument("--contour", type=int, help="paddles of a path (default: 4, or 14 of 32)")
    parser.add_argument(
        "--images",
        type=int,
        default=SIZE["train"],
        help="of training; a tenth as many for validation and for the test each",
    )
    parser.add_argument("--seed", type=int, default=1, help="of the images")
    options = parser.parse_args(argv)
    if options.seed < 0 or options.images < 10 or (options.contour or 3) < 3:
        raise UserError(
            "--seed must not be negative, --images at least 10 and --contour at least 3."
        )
    recipe = pathfinder.RECIPES[options.size]
    tenth = options.images // 10
    sizes = {"train": options.images, "valid": tenth, "test": tenth}
    recipe = dataclasses.replace(recipe, paddles=options.contour or recipe.paddles, sizes=sizes)
    say(f"Pathfinder, {options.size} x {options.size} pixels -> {options.dest}")
    pathfinder.prepare(options.dest, recipe, options.seed)


if __name__ == "__main__":
    sys.exit(main())
