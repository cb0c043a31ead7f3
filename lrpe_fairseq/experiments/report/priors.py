"""The priors of a release: ``results/priors/<release>.json``.

A prior is fitted to all rows of a measurement, so new rows would move it, and with it verdicts on
pairs that have not changed. A release freezes the priors: from then on a verdict depends on the
runs of its pair only. Measurements that are newer than the release have fitted priors until the
next one.

    python -m lrpe_fairseq.experiments.report.priors RELEASE
"""

import argparse
import re
from pathlib import Path

from lrpe_fairseq.experiments.records.console import UserError, command
from lrpe_fairseq.experiments.records.files import ROOT, read_json, relative, write_json
from lrpe_fairseq.experiments.report.orders import Prior

FOLDER = Path("results", "priors")
RELEASE = re.compile(r"\d+(\.\d+)*")


def load(root: Path) -> dict[str, Prior]:
    """Return the priors of the last release, by the text of the measurement's key."""
    # Older releases stay: their pages can be made again.
    files = sorted((root / FOLDER).glob("*.json"), key=_order)
    listed = read_json(files[-1])["priors"] if files else {}
    return {key: Prior(*values) for key, values in listed.items()}


def _order(path: Path) -> list[int]:
    # As numbers: 0.10 comes after 0.9.
    return [int(number) for number in path.stem.split(".")]


def freeze(root: Path, release: str, *, replace: bool = False) -> Path:
    """Fit the priors of all measurements to their runs, and write them as those of a release.

    A measurement without a prior, because it has too few repeated rows, is left out. Raises:
    UserError for a release that is no version number, or that has its priors already.
    """
    from lrpe_fairseq.experiments.report import measurements
    from lrpe_fairseq.experiments.report.results import Results

    path = root / FOLDER / f"{release}.json"
    if not RELEASE.fullmatch(release):
        raise UserError(f"a release is a version number such as 0.2.0, not {release!r}")
    if path.exists() and not replace:
        raise UserError(
            f"{relative(path)} exists: name another release, or pass --replace to fit it again"
        )
    # Otherwise the fit would read the priors that it replaces.
    path.unlink(missing_ok=True)
    every = measurements.gathered(root, Results(root).views(), frozen={})
    frozen = {key.text(): list(one.prior) for key, one in every.items() if one.prior.strength}
    write_json(path, {"release": release, "priors": dict(sorted(frozen.items()))})
    return path


@command("priors")
def main(arguments: list[str] | None = None) -> None:
    """Freeze the priors of a release."""
    parser = argparse.ArgumentParser(prog="priors", description="Freeze the priors of a release.")
    parser.add_argument("release", help="its version number")
    parser.add_argument("--replace", action="store_true", help="fit those of this release again")
    options = parser.parse_args(arguments)
    path = freeze(ROOT, options.release, replace=options.replace)
    print(f"written to {relative(path)}")


if __name__ == "__main__":
    raise SystemExit(main())
