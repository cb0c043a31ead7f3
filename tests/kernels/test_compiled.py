"""results/bench/compiled.json: the figures of the present kernels, and what they must be."""

import importlib
import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the kernels need triton, which is a test dependency")

from lrpe_fairseq.kernels import triton_calls

PROGRAM = """
import json
from benchmarks import compiled, compiled_versions
hashes = {name: compiled.source_hash(name) for name in compiled.FAMILIES}
half = compiled.torch.float16
names = {f: [case for case, _ in x.cases(half)] for f, x in compiled.FAMILIES.items()}
kinds = [(c, t) for c in compiled.CAPABILITIES for t in compiled.TYPES]
wanted = [(f, x, *kind) for f, cases in names.items() for x in cases for kind in kinds
          if compiled.is_served(x, *kind, "3.9")]
committed = json.loads(compiled.FIGURES.read_text())
many = [row for row in committed["rows"] if row["spilled_bytes"] > compiled.may_spill(row)]
one = {"flash": "plain, 64/64", "stick": "plain, 64/64", "encode": "phi alone"}
one["linear"] = "numerator, 64/64"
again = [r for f in compiled.FAMILIES for r in compiled.figures(f, 90, "bfloat16", one[f])]
print(json.dumps([hashes, wanted, again, compiled.version("triton"), compiled.SHARED, many,
    committed]))
releases = json.loads(compiled_versions.FIGURES.read_text())
forms = [(family, case) for family, cases in compiled_versions.FORMS.items() for case in cases]
assert all(case in names[family] for family, case in forms)
types = {c: compiled_versions.TYPES.get(c, ("bfloat16",)) for c in compiled_versions.CAPABILITIES}
kinds = [(c, x) for c in types for x in types[c]]
releases["wanted"] = [(v, *form, *kind) for v in compiled_versions.VERSIONS for form in forms
                      for kind in kinds if compiled.is_served(form[1], *kind, v)]
print(json.dumps(releases))
"""


@pytest.fixture(scope="module")
def lines():
    """What a process without the interpreter says: of all forms, and of every release."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()[-2:]]


@pytest.fixture(scope="module")
def compiled(lines):
    return lines[0]


def test_the_figures_are_those_of_the_present_kernels(compiled):
    """Else run ``python -m benchmarks.compiled``."""
    hashes, _, again, version, *_, committed = compiled
    for name, made_from in committed["sources"].items():
        assert made_from == hashes[name.split()[0]], name
    # one case of every family compiles with the Triton that is installed
    assert {row["family"] for row in again} == {row["family"] for row in committed["rows"]}
    if committed["triton"] == version:
        assert all(row in committed["rows"] for row in again)


def test_every_form_is_compiled_for_every_architecture_in_both_half_types(compiled):
    _, wanted, *_, committed = compiled
    found = {(r["family"], r["case"], r["capability"], r["dtype"]) for r in committed["rows"]}
    assert set(map(tuple, wanted)) <= found


def test_no_kernel_spills_registers_or_needs_more_shared_memory_than_there_is(compiled):
    *_, shared, many, committed = compiled
    assert not many
    for row in committed["rows"]:
        assert row["shared_bytes"] <= shared[str(row["capability"])] * 1024, row


def test_every_release_was_tried_with_its_forms_for_every_architecture(lines):
    """Else run ``python -m benchmarks.compiled_versions``."""
    (hashes, *_), releases = lines
    assert releases["sources"] == hashes
    keys = ("triton", "family", "case", "capability", "dtype")
    found = {tuple(row[key] for key in keys) for row in releases["rows"]}
    assert found == set(map(tuple, releases["wanted"]))
    assert "note" not in releases


@pytest.fixture
def still_interpreted(monkeypatch):
    """benchmarks.compiled switches the interpreter off for what is imported from then on."""
    for module in triton_calls.PROOFS:
        importlib.import_module(module)
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "0"))


@pytest.mark.usefixtures("still_interpreted")
def test_code_that_triton_or_its_assembler_gets_wrong_is_refused():
    from benchmarks.compiled import refuse_short_products, refuse_unset_registers

    code = "%d = tt.dot %a, %b, %c : tensor<16x{}xf16, #ttg.dot_op<{{opIdx = 0, kWidth = 8}}>> * "
    refuse_short_products(code.format(32))
    with pytest.raises(RuntimeError, match="a product over 16 numbers, 8 by each thread"):
        refuse_short_products(code.format(16))
    line = "        /*0010*/                   {} ;\n"
    code = line.format("ULDC.64 UR4, c[0x0][0x208]")
    code += line.format("HGMMA.64x16x16.F32.BF16 R56, R32, gdesc[UR2].tnspB, R56, gsb0")
    refuse_unset_registers(code)
    with pytest.raises(RuntimeError, match="UR12 has no value before: UIADD3"):
        refuse_unset_registers(code + line.format("@UP1 UIADD3 UR12, UP0, UR12, UR5, URZ"))
