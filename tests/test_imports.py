"""Who may import whom, and what an import changes."""

import ast
import subprocess
import sys
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "lrpe_fairseq"
ROOMS = ("kernels", "encodings", "attention", "models", "criterions", "optim", "tasks")
"""Each room may import itself and those before it."""
PURE = ("kernels", "encodings", "attention")
"""Rooms of PyTorch alone."""
NEUTRAL = {"lrpe_fairseq", "lrpe_fairseq.errors", "lrpe_fairseq.image_files"}
"""Modules that import nothing of the package but each other."""


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    paths = {p.relative_to(ROOT).with_suffix(""): p for p in PACKAGE.rglob("*.py")}
    return {".".join(p.parts).removesuffix(".__init__"): path for p, path in paths.items()}


MODULES = modules()


def imported(name: str, source: str, known: dict[str, Path] = MODULES) -> set[str]:
    """All modules that the source of module ``name`` imports, in functions too.

    A name of a module in a string counts, because a loader may import it.
    """
    package = name if known[name].name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and node.value in known:
            found.add(node.value)
    return {module for module in found if module in known or not module.startswith(PACKAGE.name)}


def room(module: str) -> str:
    return ".".join(module.split(".")[1:2])


def of_rooms(*rooms: str) -> list[str]:
    return [name for name in MODULES if room(name) in rooms]


@pytest.mark.parametrize(
    "line",
    [
        "import lrpe_fairseq.models.options",
        "import lrpe_fairseq.models.options as o",
        "from lrpe_fairseq.models.options import defaults",
        "from lrpe_fairseq import encodings, models",
        "from .. import models",
        "from ..models import options",
        "def f():\n    from lrpe_fairseq import models",
        "loader.load('lrpe_fairseq.models')",
    ],
)
def test_every_form_of_an_import_is_resolved(line):
    found = imported("lrpe_fairseq.encodings.base", line)
    assert any(module.startswith("lrpe_fairseq.models") for module in found)


@pytest.mark.parametrize("name", of_rooms(*ROOMS))
def test_imports_run_from_models_to_attention_to_encodings_to_kernels(name):
    found = imported(name, MODULES[name].read_text(encoding="utf-8"))
    allowed = ROOMS[: ROOMS.index(room(name)) + 1]
    if room(name) not in PURE:
        allowed = (*ROOMS, "compat", "preemption")  # glue is one layer
    own = {m for m in found if m.startswith("lrpe_fairseq")} - NEUTRAL
    assert {m for m in own if room(m) not in allowed} == set()


@pytest.mark.parametrize("name", of_rooms(*PURE))
def test_encodings_attention_and_kernels_import_nothing_of_fairseq(name):
    found = imported(name, MODULES[name].read_text(encoding="utf-8"))
    assert {m for m in found if m.partition(".")[0] in ("fairseq", "fairseq_cli")} == set()


def run(code: str) -> str:
    """What Python code prints in a process of its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_an_encoding_loads_and_patches_nothing_of_fairseq_or_numpy():
    code = (
        "import sys, numpy as np; names = set(dir(np))\n"
        "import lrpe_fairseq.encodings, lrpe_fairseq.attention.multihead\n"
        "from lrpe_fairseq.experiments.data import bitext, corpus, glue, pieces\n"
        "print(names == set(dir(np)), [m for m in sys.modules if m.split('.')[0] == 'fairseq'])"
    )
    assert run(code) == "True []"


USED_BY_FAIRSEQ = (
    "import numpy as np, fairseq.models, fairseq.tasks\n"
    "print('lrpe_lm' in fairseq.models.MODEL_REGISTRY, hasattr(np, 'int'),\n"
    "    'lrpe_truncated_bptt_lm' in fairseq.tasks.TASK_REGISTRY)"
)
USER_DIR = (
    "from argparse import Namespace; from fairseq import utils\n"
    "from fairseq_cli import train\n"
    "utils.import_user_module(Namespace(user_dir='lrpe_fairseq'))\n"
    "assert hasattr(train.validate_and_save, 'func')\n"  # it saves on a signal
)


@pytest.mark.parametrize(
    "first",
    [
        "from lrpe_fairseq import models",
        "import lrpe_fairseq.compat\nfrom lrpe_fairseq import models, tasks",
        USER_DIR,
        f"import lrpe_fairseq.encodings\n{USER_DIR}",
    ],
    ids=["models alone", "compat first", "user-dir", "encodings, then user-dir"],
)
def test_the_models_are_registered_and_fairseq_is_mended_in_any_order(first):
    assert run(f"{first}\n{USED_BY_FAIRSEQ}").splitlines()[-1] == "True True True"


def test_encodings_and_attention_work_where_fairseq_is_not_installed():
    code = (
        "import sys; sys.modules['fairseq'] = None\n"
        "import torch\n"
        "from lrpe_fairseq.encodings import build_encoding\n"
        "from lrpe_fairseq.attention.multihead import MultiheadAttention\n"
        "enc = build_encoding('lrpe-type2', head_dim=64, num_heads=8)\n"
        "q = torch.rand(2, 8, 10, 64); p = torch.arange(10)\n"
        "print(tuple(enc(q, q, p, p)[0].shape))\n"
    )
    assert run(code) == "(2, 8, 10, 64)"
