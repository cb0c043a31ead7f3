"""Generate a synthetic task of "Algebraic Positional Encodings" for fairseq.

    python data-prep/algebraic/prepare.py --dest data/reverse-small --task reverse
    python data-prep/algebraic/prepare.py --dest data/tree-ops-depth-small --task tree-ops \\
        --order depth

See the README in this folder for the tasks, the sizes and the files.
"""

import argparse
import sys
from collections.abc import Sequence

from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.data import transduction
from lrpe_fairseq.experiments.data.transduction import Recipe
from lrpe_fairseq.experiments.records.console import command


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = prep.parser(__doc__)
    parser.add_argument("--task", required=True, choices=transduction.TASKS)
    parser.add_argument(
        "--order",
        default="",
        choices=list(transduction.ORDERS),
        help="of a tree's target (trees only)",
    )
    parser.add_argument("--scale", default="small", choices=list(transduction.SCALES))
    parser.add_argument("--seed", type=int, default=Recipe.seed, help="of the data")
    return parser.parse_args(argv)


@command("data-prep/algebraic/prepare.py")
def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and generate the data."""
    options = vars(arguments(argv))
    dest = options.pop("dest")
    recipe = Recipe(**options)
    prep.say(f"{recipe.name}, scale {recipe.scale}, seed {recipe.seed} -> {dest}")
    transduction.prepare(dest, recipe)


if __name__ == "__main__":
    sys.exit(main())
