"""Without the packages of an extra, a command says in one sentence which extra it needs."""

import importlib
import re
import runpy
import subprocess
import sys
from unittest import mock

import pytest

from lrpe_fairseq.errors import EXTRAS, missing_extra
from lrpe_fairseq.experiments import __main__ as program
from lrpe_fairseq.experiments.records.console import command
from lrpe_fairseq.experiments.records.files import ROOT

MODULES = {  # of packages that are imported by another name
    "fairseq-fixed": {"fairseq", "fairseq_cli", "hydra", "omegaconf"},
    "hydra-core": {"hydra"},
    "pyyaml": {"yaml"},
    "scikit-learn": {"sklearn"},
    "pillow": {"PIL"},
}
HIDDEN = """
import runpy, sys
hidden = {hidden!r}
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hide())
sys.argv = {arguments!r}
if {module!r}:
    runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
else:
    runpy.run_path(sys.argv[0], run_name="__main__")
"""
EVERY = {module for modules in EXTRAS.values() for module in modules}


def test_the_modules_of_the_extras_are_those_of_setup():
    with mock.patch("setuptools.setup") as setup:
        runpy.run_path(str(ROOT / "setup.py"))
    packages = setup.call_args.kwargs["extras_require"]
    for extra, modules in EXTRAS.items():
        names = {re.split("[;=>]", word)[0] for word in packages[extra]}
        wanted = {module for name in names for module in MODULES.get(name, {name})}
        assert set(modules) <= wanted
        assert wanted <= EVERY, "a package of an extra that no sentence names"


def test_no_extra_replaces_the_triton_of_torch():
    """A torch for GPUs requires one version, which a requirement without a version accepts."""
    with mock.patch("setuptools.setup") as setup:
        runpy.run_path(str(ROOT / "setup.py"))
    given = setup.call_args.kwargs
    words = [*given["install_requires"], *(x for e in given["extras_require"].values() for x in e)]
    found = [word.partition(";")[0].strip() for word in words if word.startswith("triton")]
    assert found == ["triton"]


@pytest.mark.parametrize("module", ["yaml", "fairseq", "fairseq.data", "omegaconf", "sacrebleu"])
@pytest.mark.parametrize("name", program.COMMANDS)
def test_a_command_names_the_extra_of_what_it_cannot_import(name, module, monkeypatch, capsys):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(importlib, "import_module", missing)
    assert program.main([name]) == 2
    top = module.partition(".")[0]
    said = f"{name}: {top} is not installed: run make install in the checkout of lrpe_fairseq"
    assert capsys.readouterr().err == f"{said}\n"


def test_a_module_that_is_missed_at_work_is_named_too(capsys):
    def work(name):
        return command("it")(lambda: importlib.import_module(name))

    def absent():
        raise ModuleNotFoundError("No module named 'pandas'", name="pandas")

    assert command("it")(absent)() == 2
    assert "pandas is not installed: run make install in the checkout" in capsys.readouterr().err
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        work("no_such_module")()
    assert missing_extra(ModuleNotFoundError(name="torch")) == ""


@pytest.mark.parametrize(
    ("module", "arguments", "hidden", "sentence"),
    [
        ("lrpe_fairseq.experiments", "program eval_lm a b", EVERY, "is not installed"),
        ("lrpe_fairseq.experiments", "program run_table table2", {"yaml"}, "yaml is not installed"),
        ("lrpe_fairseq.experiments.report.docs", "docs --check", {"pandas"}, "pandas is not"),
        ("", "data-prep/multi30k/prepare.py --help", EVERY, ""),
    ],
)
def test_a_command_without_its_packages_has_no_traceback(module, arguments, hidden, sentence):
    code = HIDDEN.format(hidden=hidden, arguments=arguments.split(), module=module)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == (2 if sentence else 0), ended.stderr
    assert ended.stderr.count("\n") == bool(sentence)
    assert sentence in ended.stderr
    assert "run make install in the checkout of lrpe_fairseq" in ended.stderr or not sentence
