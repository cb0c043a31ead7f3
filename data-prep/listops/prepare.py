"""Generate ListOps for fairseq.

    python data-prep/listops/prepare.py --dest data/listops-20-100 --length 20-100

See the README in this folder for the grammar, the sizes and the statistics.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lrpe_fairseq.experiments.data import lra
from lrpe_fairseq.experiments.data.corpus import say
from lrpe_fairseq.experiments.records.console import command


@command("data-prep/listops/prepare.py")
def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and generate the expressions."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dest", type=Path, required=True, help="output folder")
    parser.add_argument(
        "--length", default="20-100", choices=list(lra.LENGTHS), help="bounds of the tokens"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the expressions")
    options = parser.parse_args(argv)
    say(f"ListOps {options.length}, seed {options.seed} -> {options.dest}")
    lra.prepare_listops(options.dest, options.length, options.seed)


if __name__ == "__main__":
    sys.exit(main())
