"""Public functions and classes are documented and typed, and functions are short."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted((ROOT / "lrpe_fairseq").rglob("*.py"))
Function = ast.FunctionDef | ast.AsyncFunctionDef
LONGEST = 50


def public(node: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, ast.stmt]]:
    """Yield the public functions and classes of a module, and the public methods of the latter."""
    for inner in node.body:
        if isinstance(inner, Function | ast.ClassDef) and not inner.name.startswith("_"):
            yield prefix + inner.name, inner
            if isinstance(inner, ast.ClassDef):
                yield from public(inner, f"{inner.name}.")


def untyped(function: ast.stmt) -> bool:
    """True if the result or a parameter, other than ``self`` or ``cls``, has no annotation."""
    if not isinstance(function, Function):
        return False
    given = function.args
    names = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    named = [name for name in names if name and name.arg not in ("self", "cls")]
    return function.returns is None or any(name.annotation is None for name in named)


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return {str(p.relative_to(ROOT)): ast.parse(p.read_text("utf-8")) for p in MODULES}


def test_every_public_function_and_class_has_a_docstring(trees):
    bare = [
        f"{path}: {name}"
        for path, tree in trees.items()
        for name, node in [("module", tree), *public(tree)]
        if not ast.get_docstring(node)
    ]
    assert not bare, "\n".join(bare)


def test_every_public_function_is_typed(trees):
    found = [
        f"{path}: {name}"
        for path, tree in trees.items()
        for name, node in public(tree)
        if untyped(node)
    ]
    assert not found, "\n".join(found)


def test_no_function_is_longer_than_50_lines(trees):
    found = [
        f"{path}: {node.name}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, Function) and node.end_lineno - node.lineno >= LONGEST
    ]
    assert not found, "\n".join(found)
