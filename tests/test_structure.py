"""What an import loads and changes, and the length of functions; `make lint` checks the rest."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from lrpe_fairseq.encodings import ENCODINGS, FAMILIES, encoding_class
from lrpe_fairseq.encodings.fidelity import DEPARTURES

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 50


def test_no_function_is_longer_than_50_lines():
    found = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for path in (ROOT / "lrpe_fairseq").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= LONGEST
    ]
    assert not found, "\n".join(found)


def test_no_kernel_assigns_to_a_tuple_within_a_tuple():
    """The interpreter and newer releases run it, Triton 3.6 does not compile it."""
    for path in (ROOT / "lrpe_fairseq" / "kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if "triton.jit" in "".join(map(ast.unparse, getattr(node, "decorator_list", []))):
                targets = [x for x in ast.walk(node) if isinstance(x, ast.Tuple)]
                stored = [x for x in targets if isinstance(x.ctx, ast.Store)]
                inner = [y for x in stored for y in x.elts if isinstance(y, ast.Tuple)]
                assert not inner, f"{path.name}: {node.name}"


def words_of(path):
    """The names and the strings of a module, without its docstrings."""
    tree = ast.parse(path.read_text("utf-8"))
    texts = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            found.add(node.value)
        found.add(getattr(node, "id", None) or getattr(node, "attr", ""))
        found |= {a.name for a in node.names} if isinstance(node, ast.ImportFrom) else set()
    return found


def test_attention_names_no_method_and_no_departure():
    classes = {encoding_class(name).__name__ for name in ENCODINGS}
    names = {*ENCODINGS, *FAMILIES, *DEPARTURES, *classes} - {"none"}
    for path in (ROOT / "lrpe_fairseq" / "attention").glob("*.py"):
        assert not words_of(path) & names, path.name


def run(code):
    """What Python code prints in a process of its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


WITHOUT_FAIRSEQ = """
import sys, numpy as np, torch
names = set(dir(np))
sys.modules["fairseq"] = None  # importing fails
import lrpe_fairseq.attention.multihead
from lrpe_fairseq.encodings import build_encoding
from lrpe_fairseq.experiments.data import bitext, corpus, glue, pieces
encoding = build_encoding("lrpe-type2", head_dim=64, num_heads=8)
q, positions = torch.rand(2, 8, 10, 64), torch.arange(10)
print(tuple(encoding(q, q, positions, positions)[0].shape), names == set(dir(np)))
"""


def test_encodings_and_attention_work_without_fairseq_and_leave_numpy_as_it_is():
    assert run(WITHOUT_FAIRSEQ) == "(2, 8, 10, 64) True"


USER_DIR = """
from argparse import Namespace
from fairseq import utils
from fairseq_cli import train
utils.import_user_module(Namespace(user_dir="lrpe_fairseq"))
assert hasattr(train.validate_and_save, "func")  # it saves on a signal
"""
USED_BY_FAIRSEQ = """
import sys, numpy as np, fairseq.models, fairseq.tasks
sys.modules |= dict.fromkeys(["matplotlib", "pandas", "jinja2"])  # a machine for training
from lrpe_fairseq.experiments.commands import eval_lm, eval_mt, run_table, train_row
print("lrpe_lm" in fairseq.models.MODEL_REGISTRY, hasattr(np, "int"),
    "lrpe_truncated_bptt_lm" in fairseq.tasks.TASK_REGISTRY,
    [name for name in sys.modules if name.startswith("lrpe_fairseq.experiments.report.")])
"""


@pytest.mark.parametrize(
    "first",
    [
        "from lrpe_fairseq import models",
        pytest.param(f"import lrpe_fairseq.encodings\n{USER_DIR}", marks=pytest.mark.exhaustive),
    ],
    ids=["models alone", "encodings, then user-dir"],
)
def test_the_models_are_registered_and_fairseq_is_mended_in_any_order(first):
    """The commands that train and evaluate import no library for pages."""
    assert run(first + USED_BY_FAIRSEQ).splitlines()[-1] == "True True True []"


DATA_ROOM = """
import sys, types
package = types.ModuleType("lrpe_fairseq")  # the room alone, without the plugin's registration
package.__path__ = ["lrpe_fairseq"]
sys.modules["lrpe_fairseq"] = package
from lrpe_fairseq.experiments.data import bitext, corpus, folders, glue, pieces
print(sorted({"fairseq", "torch", "omegaconf"} & sys.modules.keys()))
"""


def test_the_data_room_imports_neither_fairseq_nor_torch():
    assert run(DATA_ROOM) == "[]"
