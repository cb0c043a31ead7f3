"""Render only ``results/``, after a training: the part ``results`` of ``make docs``."""

import sys

from lrpe_fairseq.experiments.report import docs


def main(arguments: list[str] | None = None) -> int:
    """Run :func:`docs.main` for the part ``results``; return the exit status."""
    return docs.main(["results", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    sys.exit(main())
