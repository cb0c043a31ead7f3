"""docs/moving.md: what it calls old is gone, and what it calls new can be imported."""

import pkgutil
import re
from pathlib import Path

import pytest

from lrpe_fairseq.encodings import options_of_encodings
from lrpe_fairseq.experiments.data import corpus  # noqa: F401  (a package with modules)

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "moving.md").read_text(encoding="utf-8")
OPTIONS, MODULES = PAGE.split("## Modules")
ROWS = [re.findall(r"`([^`]+)`", line) for line in MODULES.splitlines() if line.startswith("| `")]
ROWS += [
    ["", *re.findall(r"`([^`]+)`", line)]
    for line in MODULES.splitlines()
    if line.startswith("| the package")
]
MOVED = {}
for first, *others in ROWS:
    if len(others) == 1:
        MOVED[f"lrpe_fairseq.{first}"] = others[0]
    else:
        *names, home = others
        before = f"lrpe_fairseq.{first}".rstrip(".")
        MOVED |= {f"{before}.{name}": f"{home}.{name}" for name in names}


def test_the_page_lists_all_folders():
    assert len(MOVED) > 50
    assert MOVED["lrpe_fairseq.encodings.fox"] == "lrpe_fairseq.encodings.wrappers.fox"
    assert MOVED["lrpe_fairseq.run_state"] == "lrpe_fairseq.compat.run_state"


@pytest.mark.parametrize("old", MOVED)
def test_a_module_that_moved_is_where_the_page_says_and_nowhere_else(old):
    pkgutil.resolve_name(MOVED[old])
    path = Path(__file__).resolve().parents[1] / old.replace(".", "/")
    assert not path.with_suffix(".py").exists()


def test_the_options_that_the_page_calls_old_are_gone_and_the_new_ones_exist():
    known = options_of_encodings()
    rows = [line.split("|")[1:3] for line in OPTIONS.splitlines() if line.startswith("| `")]
    old = {name for before, _ in rows for name in re.findall(r"`([a-z_0-9]+)`", before)}
    assert {"score_decay", "t5_buckets", "spe_code", "fire_width"} <= old
    assert old & known.keys() == set()
    assert {"ape_decay", "lrpe_householder_start", "context_scaling"} <= known.keys()
    assert "yarn-printed" in known["context_scaling"].metadata["choices"]
