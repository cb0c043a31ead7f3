"""Build the site (``make site``): ``python docs/site/make_site.py [--output build/site]``.

It needs no network: DataTables is taken from the package itables, Plotly from plotly.
"""

import argparse
import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

import explorer_data  # noqa: E402
import staging  # noqa: E402

from lrpe_fairseq.experiments.report.results import Results  # noqa: E402

NUMBERS = "results/results.csv.gz"
"""All measured numbers, which the explorer links."""
EXPORT = re.compile(r"export\s*\{([^{}]*)\};?")


def main(arguments: list[str] | None = None) -> int:
    """Build the site; return the exit status, which is not 0 after a warning."""
    parser = argparse.ArgumentParser(description="Build the site.")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "site")
    parser.add_argument("--source", type=Path, default=ROOT / "build" / "site-source")
    options = parser.parse_args(arguments)
    prepare(ROOT, options.source)
    status = build(options.source, options.output)
    if not status:
        print(f"open {options.output / 'index.html'}")
    return status


def build(source: Path, output: Path) -> int:
    """Build what :func:`prepare` wrote; return the status of Sphinx, not 0 after a warning."""
    from sphinx.cmd.build import main as sphinx_build

    doctrees = source.with_name(f"{source.name}-doctrees")
    for folder in (output, doctrees):
        shutil.rmtree(folder, ignore_errors=True)
    flags = ["-W", "--keep-going", "-q", "-b", "html", "-d", str(doctrees)]
    return sphinx_build([*flags, str(source), str(output)])


def prepare(root: Path, source: Path) -> None:
    """Write the source of the site: pages, configuration, data and scripts."""
    pages = staging.stage(root, source)
    shutil.copyfile(root / NUMBERS, source / "files" / NUMBERS)
    for name in ("conf.py", "mathml.py"):
        shutil.copyfile(HERE / name, source / name)
    shutil.copytree(HERE / "pages", source, dirs_exist_ok=True)
    shutil.copytree(HERE / "static", source / "static")
    content = explorer_data.data(Results(root), pages)
    (source / "static" / "results.js").write_text(explorer_data.script(content), encoding="utf-8")
    _bundle(source / "static")


def _bundle(static: Path) -> None:
    """Copy DataTables and Plotly from their Python packages."""
    tables, plots = _folder("itables") / "html", _folder("plotly") / "package_data"
    module = (tables / "dt_bundle.js").read_text(encoding="utf-8")
    (static / "datatables.js").write_text(classic(module), encoding="utf-8")
    shutil.copyfile(tables / "dt_bundle.css", static / "datatables.css")
    shutil.copyfile(plots / "plotly.min.js", static / "plotly.min.js")


def _folder(package: str) -> Path:
    return Path(find_spec(package).origin).parent


def classic(module: str) -> str:
    """Return a module as a script that sets ``window.DataTable`` to its default export.

    Browsers refuse modules of local files, but the site can also be opened without a server.
    Raises: ValueError if the module has no default export.

    >>> classic("const a = 1; export { a as default, b as c };")
    '(() => {const a = 1; window.DataTable = a;})();'
    """
    names = re.search(r"([\w$]+) as default\b", " ".join(EXPORT.findall(module)))
    if not names:
        raise ValueError("the bundle of itables has no default export")
    return f"(() => {{{EXPORT.sub(f'window.DataTable = {names[1]};', module, count=1)}}})();"


if __name__ == "__main__":
    sys.exit(main())
