"""The rooms of experiments/ import one way, and no module imports a command."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from lrpe_fairseq.experiments.records.files import ROOT

ROOMS = ("records", "data", "runner", "families", "report", "commands")
"""Each may import from those before it."""
PACKAGE = "lrpe_fairseq.experiments"
HOUSE = ROOT / "lrpe_fairseq" / "experiments"


def modules() -> dict[str, Path]:
    """Dotted name -> file of every module of experiments/."""
    paths = HOUSE.rglob("*.py")
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    return {name.removesuffix(".__init__"): path for name, path in names.items()}


def imported(name: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules of ``known`` that a module imports anywhere, by any form of import."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: 1 - node.level or None] if node.level else []
            base = ".".join([*parents, *filter(None, [node.module])])
            found = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        yield from (target for target in found if target in known and target != package)


def room(name: str) -> str:
    return name.removeprefix(f"{PACKAGE}.").partition(".")[0]


def arrows() -> set[tuple[str, str]]:
    """(importing module, imported module), rooms themselves left out."""
    known = modules()
    pairs = {(a, b) for a, path in known.items() for b in imported(a, path, known)}
    return {(a, b) for a, b in pairs if PACKAGE not in (a, b)}


def test_every_module_is_in_a_room() -> None:
    assert {room(name) for name in modules() if name != PACKAGE} == set(ROOMS)


def test_rooms_import_one_way() -> None:
    upwards = [(a, b) for a, b in arrows() if ROOMS.index(room(a)) < ROOMS.index(room(b))]
    assert upwards == []


def test_no_command_is_imported_by_another_module() -> None:
    assert [(a, b) for a, b in arrows() if b.startswith(f"{PACKAGE}.commands.")] == []


TRAINING = """
import sys
libraries = ["matplotlib", "pandas", "seaborn", "jinja2"]
sys.modules |= dict.fromkeys(libraries)  # importing fails
from lrpe_fairseq.experiments.commands import (
    eval_classifier, eval_glue, eval_lm, eval_mt, run_table, score_lm, train_row
)
"""


def test_training_and_evaluation_import_no_library_for_pages() -> None:
    """A machine for training may lack them."""
    subprocess.run([sys.executable, "-c", TRAINING], cwd=ROOT, check=True)


DATA_ROOM = """
import sys, types
package = types.ModuleType("lrpe_fairseq")  # the room alone, without the plugin's registration
package.__path__ = ["lrpe_fairseq"]
sys.modules["lrpe_fairseq"] = package
from lrpe_fairseq.experiments.data import bitext, corpus, folders, glue, pieces
print(sorted({"fairseq", "torch", "omegaconf"} & sys.modules.keys()))
"""


def test_the_data_room_imports_neither_fairseq_nor_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", DATA_ROOM], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
