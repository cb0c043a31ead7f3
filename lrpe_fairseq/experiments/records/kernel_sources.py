"""The sources of each family of Triton kernels, and which measurements are of the present ones.

A file of measurements on a GPU has the hashes of the sources that it measured (:func:`hashes`). A
page shows a row only if those of the kernels that serve it are unchanged (:func:`is_current`), so
that no figure outlives the kernel that it is of. This needs no git.
"""

import ast
import functools
import hashlib
from collections.abc import Mapping
from typing import Any

from lrpe_fairseq.experiments.records.files import ROOT

_FLASH, _LINEAR = "lrpe_fairseq.kernels.flash", "lrpe_fairseq.kernels.linear"
SOURCES = {
    "flash": tuple(f"{_FLASH}.flash_{name}" for name in ("tiles", "kernels", "triton")),
    "stick": (
        f"{_FLASH}.stick_kernels",
        f"{_FLASH}.stick_triton",
        f"{_FLASH}.flash_tiles",
        f"{_FLASH}.flash_triton",
    ),
    "encode": ("lrpe_fairseq.kernels.encode.encode_triton",),
    "linear": (
        *(f"{_LINEAR}.{name}_triton" for name in ("causal", "sweep", "full")),
        "lrpe_fairseq.kernels.tiles_triton",
    ),
}
"""Family -> the modules from which its kernels are compiled and launched."""
FAMILY_OF = {
    "encode": "encode",
    "flash": "flash",
    "linear": "linear",
    "softmax": "flash",
    "stick-breaking": "stick",
}
"""First word of a form of attention, or of a check of the doctor -> the family that serves it."""
OF_ONE_FAMILY = {"attention": "contestant", "doctor": "check"}
"""Parts whose rows are of one family, and the key that names their form."""
WITHOUT_KERNELS = ("machine", "phases")
"""Parts that measure no kernel of ours."""


@functools.cache
def source_hash(family: str) -> str:
    """Return a hash of a family's code, without imports, comments, docstrings and layout."""
    digest = hashlib.sha256()
    for name in SOURCES[family]:
        tree = ast.parse((ROOT / (name.replace(".", "/") + ".py")).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list):
                node.body = [x for x in body if not _is_ignored(x)] or [ast.Pass()]
        digest.update(ast.unparse(tree).encode())
    return digest.hexdigest()[:16]


def _is_ignored(node: ast.AST) -> bool:
    """True for an import and for a docstring, which no kernel is compiled from."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return True
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return text and isinstance(node.value.value, str)


def hashes() -> dict[str, str]:
    """Return the hash of every family, for a file of measurements."""
    return {family: source_hash(family) for family in SOURCES}


def families_of(part: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the families of kernels that a row of a part measures on a GPU.

    Forms of other libraries have none, training steps and decoding all.
    """
    if part in WITHOUT_KERNELS:
        return ()
    if part not in OF_ONE_FAMILY:
        return tuple(SOURCES)
    form = row[OF_ONE_FAMILY[part]].replace(",", " ").split()[0]
    return (FAMILY_OF[form],) if form in FAMILY_OF else ()


def is_current(part: str, row: Mapping[str, Any], file: Mapping[str, Any]) -> bool:
    """True if the sources of the kernels that a row measures on a GPU are unchanged.

    row, file: either may have ``sources``; those of the row count. Without them it is False.
    """
    measured = row.get("sources", file.get("sources", {}))
    families = families_of(part, row)
    return all(measured.get(family) == source_hash(family) for family in families)
