"""Compare this tree with an earlier commit: ``python -m tests.frozen [COMMIT]``.

A worktree of the commit runs beside this tree. Compared are outputs, gradients and a decoding step
of every encoding in both attentions, causal and not, with and without padding; the metrics and
options of all run files; and the numbers of all pages. CHANGED names what differs on purpose.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = "822b1a28fd"
WIDTH, HEADS, LENGTH = 32, 4, 9
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-9}
CHANGED = {
    "fope": "the coefficients start from the authors' distribution",
    "kerple-log": "the parameters are r1 and r2 themselves",
    "kerple-power": "the parameters are r1 and r2 themselves",
    "cape-kerple": "the parameters of KERPLE are r1 and r2 themselves",
    "liere@3": "the coordinates of a grid are linspace(0, 1)",
}
"""Encodings whose outputs differ from the reference, with the reason."""
MORE = ("gated:rope", "gated:lrpe-type2", "ape:tree3+sequence", "lrpe:fourier:permutation")
GRIDS = ("rope-2d@3", "rope-2d-mixed@3", "liere@3", "comrope-ap@3", "comrope-ld@3", "rope@3:axial")


# --- outputs and gradients ---------------------------------------------------------------------


def dump(path: str) -> None:
    """Write the results of every case of the tree that is imported."""
    torch.set_num_threads(1)
    torch.save(dict(results()), path)


def results() -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield a name and the tensors of every case."""
    from lrpe_fairseq.encodings import ENCODINGS, encoding_class

    for name in (*ENCODINGS, *MORE, *GRIDS):
        kind = encoding_class(name.partition("@")[0])
        gated = name.startswith("gated")
        for attention in ("linear", "softmax") if kind.serves_linear else ("softmax",):
            for causal in (True,) if kind.causal_only or gated else (True, False):
                for dtype in TOLERANCE:
                    case = f"{name} {attention} {'causal' if causal else 'full'} {dtype}"
                    yield case, result(name, attention, causal, dtype)


def result(name: str, attention: str, causal: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return outputs for three masks, the gradients of their sum, and a decoding step."""
    from lrpe_fairseq.attention.multihead import MultiheadAttention
    from lrpe_fairseq.encodings import EncodingOptions

    name, _, grid = name.partition("@")
    width, _, kind = grid.partition(":")
    own = EncodingOptions(grid_width=int(width or 0), position_grid=kind or "flat")
    torch.manual_seed(1)
    given = {"attention_type": attention, "position_encoding": name, "options": own}
    module = MultiheadAttention(WIDTH, HEADS, causal=causal, **given).to(dtype).eval()
    for order, parameter in enumerate(module.parameters()):
        noise = torch.Generator().manual_seed(order)
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=noise).to(parameter)
    x = torch.randn(2, LENGTH, WIDTH, dtype=dtype, requires_grad=True)
    weights = torch.randn(2, LENGTH, WIDTH, dtype=dtype)
    right = torch.arange(LENGTH).expand(2, -1) >= torch.tensor([[LENGTH], [LENGTH - 3]])
    found, loss = {}, 0
    for label, mask in (("no padding", None), ("right", right), ("left", right.flip(1))):
        out = module.attend(x, mask)[0]
        real = torch.ones_like(right) if mask is None else ~mask
        found[label] = out.detach() * real[..., None]
        loss = loss + (found[label] * 0 + out * real[..., None] * weights).sum()
    loss.backward()
    found["gradient of x"] = x.grad
    learned = [(n, p.grad) for n, p in module.named_parameters() if p.grad is not None]
    found |= {f"gradient of {n}": grad for n, grad in learned}
    if causal:
        state = module.attend(x[:, :-1], None, None, True)[1]
        found["decoding step"] = module.attend(x[:, -1:], None, state, True)[0].detach()
    return found


def differences(one: dict[str, Any], other: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each case that differs between two dumps, and how."""
    for case in sorted(one.keys() | other.keys()):
        if case not in one or case not in other:
            yield case, "missing in " + ("the reference" if case not in one else "this tree")
            continue
        limit = TOLERANCE[torch.float32 if "float32" in case else torch.float64]
        parts = one[case].keys() | other[case].keys()
        errors = {part: error(one[case].get(part), other[case].get(part)) for part in parts}
        worst = max(errors, key=errors.get)
        if errors[worst] > limit:
            yield case, f"{worst} by {errors[worst]:.1e}"


def error(expected: Tensor | None, found: Tensor | None) -> float:
    """Return the largest difference relative to the largest entry, inf if they do not match."""
    if expected is None or found is None or expected.shape != found.shape:
        return float("inf")
    scale = expected.abs().max().clamp_min(1e-3)
    return float(((expected - found).abs().max() / scale).nan_to_num(float("inf")))


# --- runs and pages ----------------------------------------------------------------------------


def recorded(root: Path) -> dict[str, Any]:
    """Return every run file of a tree with its whole configuration, by path below results/."""
    from lrpe_fairseq.experiments.records import bases

    folder = root / "results"
    paths = [*folder.glob("runs/*/*.json"), *folder.glob("quickstart/runs/*.json")]
    return {
        str(path.relative_to(folder)): bases.unpacked(json.loads(path.read_text()), path)
        for path in paths
        if not bases.is_base(path)
    }


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """Return options by the names of the reference: those of the command line, without a section.

    Of equal names the last value counts that is not None.
    """
    from lrpe_fairseq.experiments.records.checkpoints import SECTIONS

    if not any("." in key for key in config):
        return {k: v for k, v in config.items() if v is not None or k not in SECTIONS}
    found: dict[str, Any] = {}
    for key in sorted(config, key=lambda key: SECTIONS.index(key.split(".")[0])):
        section, *parts = key.split(".")
        chosen = {"model": "arch", "lr_scheduler": "lr-scheduler"}.get(section, section)
        name = chosen if parts == ["_name"] else "-".join(parts).replace("_", "-")
        if config[key] is not None or name not in found:
            found[name] = config[key]
    return found


def numbers(root: Path) -> dict[str, set[str]]:
    """Return the numbers with a decimal point on every page of results, docs and README."""
    pages = [*root.glob("results/**/*.md"), *root.glob("docs/*.md"), root / "README.md"]
    return {
        str(page.relative_to(root)): set(re.findall(r"\d[\d,]*\.\d+", page.read_text()))
        for page in pages
    }


# --- the command -------------------------------------------------------------------------------


def dump_of(tree: Path, path: Path) -> dict[str, Any]:
    """Dump the cases of a tree in a process of its own and return them."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    command = [sys.executable, str(Path(__file__).resolve()), "--dump", str(path)]
    subprocess.run(command, check=True, cwd=tree, env=environment)
    return torch.load(path)


def main(commit: str = REFERENCE) -> int:
    """Print what differs from ``commit``; return the number of unexpected differences."""
    with tempfile.TemporaryDirectory() as folder:
        tree, unexpected = Path(folder) / "tree", 0
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "-q", "--detach", str(tree), commit], check=True)
        try:
            dumps = [dump_of(t, Path(folder) / f"{n}.pt") for n, t in enumerate((tree, ROOT))]
            for case, text in differences(*dumps):
                reason = CHANGED.get(case.partition(" ")[0])
                unexpected += reason is None
                print(f"{case}: {text}" + (f" (intended: {reason})" if reason else ""))
            unexpected += compare_records(tree)
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)
    print(f"{len(dumps[1])} cases of encodings, {unexpected} unexpected differences")
    return unexpected


def compare_records(tree: Path) -> int:
    """Print how runs and pages differ from ``tree``; return the number of runs that changed."""
    old, new = recorded(tree), recorded(ROOT)
    shared = sorted(old.keys() & new.keys())
    changed = {
        "metrics": [name for name in shared if old[name]["metrics"] != new[name]["metrics"]],
        "options": [n for n in shared if flat(old[n]["config"]) != flat(new[n]["config"])],
    }
    unexpected = 0
    for field, names in changed.items():
        for name in names:
            known = any(run_name(encoding) in name for encoding in CHANGED)
            unexpected += not known
            print(f"{field} of {name} differ" + (" (intended)" if known else ""))
        print(f"{field} differ in {len(names)} of {len(shared)} runs")
    print(f"{len(new)} run files; {len(old.keys() - new.keys())} of the reference are missing")
    there, here = numbers(tree), numbers(ROOT)
    everywhere = set().union(*here.values())
    for page, found in sorted(there.items()):
        if gone := sorted(found - everywhere):
            print(f"{page}: {len(gone)} numbers are nowhere now: {' '.join(gone[:12])}")
    return unexpected


def run_name(encoding: str) -> str:
    """Return the part of a run file's name that an encoding has."""
    names = {"fope": "FoPE", "liere@3": "images/small-LieRE"}
    return names.get(encoding, "KERPLE")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--dump"]:
        dump(sys.argv[2])
    else:
        sys.exit(1 if main(*sys.argv[1:]) else 0)
