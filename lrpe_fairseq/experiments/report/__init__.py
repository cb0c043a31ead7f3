"""Pages, tables and pictures from the run files."""

from collections.abc import Iterable
from pathlib import Path

from lrpe_fairseq.experiments.records.files import ROOT


def render(table: str, new: Iterable[Path] = ()) -> int:
    """Write the pages of all tables, and the pictures of one; return the exit status.

    A picture depends on the versions of the libraries that draw it, so those of other tables are
    drawn only if they show a run file of ``new``. ``make docs`` draws all.

    Training needs none of the libraries of this package, so without them one line says what is
    missing.
    """
    try:
        from lrpe_fairseq.experiments.report import docs
    except ImportError as error:
        print(f"no pages: {error.name} is not installed (pip install -e '.[experiments]')")
        return 0
    home = ROOT / "results" / "runs"
    names = {path.relative_to(home).as_posix() for path in new if path.is_relative_to(home)}
    return docs.main_of_table(table, names)
