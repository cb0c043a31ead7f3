"""Render the pages that show tables, after a training: two parts of ``make docs``."""

import sys

from lrpe_fairseq.experiments.report import docs


def main(arguments: list[str] | None = None) -> int:
    """Run :func:`docs.main` for the parts ``results`` and ``choosing``; return the exit status."""
    return docs.main(["results", "choosing", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    sys.exit(main())
