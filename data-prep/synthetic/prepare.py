"""Generate a task of the synthetic suite for fairseq.

    python data-prep/synthetic/prepare.py --dest data/synthetic-copy-small --task copy

See the README in this folder for the tasks, the sizes and the files.
"""

import argparse
import sys
from collections.abc import Sequence

from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.data import synthetic
from lrpe_fairseq.experiments.data.synthetic import Recipe
from lrpe_fairseq.experiments.records.console import command


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = prep.parser(__doc__)
    parser.add_argument("--task", required=True, choices=list(synthetic.TASKS))
    parser.add_argument("--scale", default="small", choices=list(synthetic.SCALES))
    parser.add_argument(
        "--fillers", default="blank", choices=synthetic.FILLERS, help="of MQAR and MQRAR"
    )
    parser.add_argument("--seed", type=int, default=Recipe.seed, help="of the data")
    return parser.parse_args(argv)


@command("data-prep/synthetic/prepare.py")
def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and generate the data."""
    options = vars(arguments(argv))
    dest = options.pop("dest")
    recipe = Recipe(**options)
    prep.say(f"{recipe.name}, scale {recipe.scale}, seed {recipe.seed} -> {dest}")
    synthetic.prepare(dest, recipe)


if __name__ == "__main__":
    sys.exit(main())
