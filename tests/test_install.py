"""scripts/install.sh and the Makefile's stamps, with a Python that only records its arguments."""

import ast
import contextlib
import importlib
import json
import os
import re
import runpy
import shutil
import stat
import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path
from unittest import mock

import pytest
import setuptools
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[1]
STUB = """#!{python} -IS
import json, os, shutil, subprocess, sys
arguments, log = sys.argv[1:], {log!r}
versions = os.environ.get("STUB_VERSIONS", "{{}}")
if arguments[0] == "-c" and "version_info" in arguments[1]:
    print("{version}")
elif arguments[0] == "-c" and "metadata" in arguments[1]:
    print(open(log + ".torch").read() if os.path.exists(log + ".torch") else sys.exit(1))
elif arguments[0] == "-c":
    sys.exit(0)
elif arguments[:3] == ["-m", "pip", "cache"]:
    print("/cache") if not os.environ.get("PIP_NO_CACHE_DIR") else sys.exit(1)
else:
    extra = os.environ.get("DIST_EXTRA_CONFIG")
    seen = {{"arguments": arguments, "CUDA_HOME": os.environ.get("CUDA_HOME")}}
    seen["config"] = open(extra).read() if extra else None
    check = ["sh", "-c", "ninja --version"]  # as torch does
    seen["ninja"] = subprocess.run(check, capture_output=True).returncode
    with open(log, "a") as file:
        file.write(json.dumps(seen) + "\\n")
    if arguments[:2] == ["-m", "venv"]:
        os.makedirs(arguments[-1] + "/bin", exist_ok=True)
        shutil.copy(sys.argv[0], arguments[-1] + "/bin/python")
    for word in arguments:
        if word.startswith("torch=="):
            open(log + ".torch", "w").write(word.removeprefix("torch=="))
    if os.environ.get("STUB_FAILS", "-") in arguments:
        sys.exit("ERROR: no matching distribution")
"""


@pytest.fixture
def stub(tmp_path):
    """Make a Python of that version that appends what it is asked to ``tmp_path/log``."""

    def make(name="python3.11", version="3.11"):
        path = tmp_path / name
        log = str(tmp_path / "log")
        path.write_text(STUB.format(python=sys.executable, log=log, version=version))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    return make


def calls(folder):
    """What the stub was asked since the last call."""
    log = folder / "log"
    found = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    log.unlink(missing_ok=True)
    return found


def install(folder, python, **more):
    environment = {**os.environ, "PYTHON": str(python), "TORCH": "torch==2.13.0", **more}
    command = [ROOT / "scripts" / "install.sh", folder / "venv", "experiments"]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def fairseq_call(folder):
    return next(call for call in calls(folder) if "fairseq-fixed==0.12.3.1" in call["arguments"])


def test_fairseq_is_built_in_parallel_without_cuda_home_and_ninja_and_with_a_cache_of_its_torch(
    stub, tmp_path
):
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ninja").write_text("#!/bin/sh\n")
    (folder / "ninja").chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    done = install(tmp_path, stub(), CUDA_HOME="/a/folder/without/nvcc", PATH=path)
    assert done.returncode == 0, done.stderr
    call = fairseq_call(tmp_path)
    assert call["CUDA_HOME"] is None
    assert call["ninja"] != 0
    assert call["config"].startswith("[build_ext]\nparallel = ")
    assert "/cache/fairseq-torch-2.13.0" in call["arguments"]


def test_fairseq_is_installed_without_torchaudio(stub, tmp_path):
    """Only its metadata asks for it; the extra "plugin" has the rest of what it imports."""
    install(tmp_path, stub())
    seen = [call["arguments"] for call in calls(tmp_path)]
    (fairseq,) = [words for words in seen if "fairseq-fixed==0.12.3.1" in words]
    assert "--no-deps" in fairseq
    assert seen[-1][-1] == ".[plugin,experiments]"
    assert not any("torchaudio" in word for words in seen for word in words)


@pytest.mark.parametrize(
    ("torch", "removed"), [("torch==2.13.0", True), ("torch==2.13.0 torchaudio", False)]
)
def test_a_torchaudio_that_fairseq_has_brought_is_removed(stub, tmp_path, torch, removed):
    install(tmp_path, stub())
    calls(tmp_path)
    (tmp_path / "venv" / "lib" / "python3.11" / "site-packages" / "torchaudio").mkdir(parents=True)
    assert install(tmp_path, stub(), TORCH=torch).returncode == 0
    seen = [call["arguments"] for call in calls(tmp_path)]
    assert any(words[-1] == "torchaudio" and "uninstall" in words for words in seen) == removed


def test_without_a_cache_of_pip_fairseq_is_built_without_one(stub, tmp_path):
    assert install(tmp_path, stub(), PIP_NO_CACHE_DIR="1").returncode == 0
    assert "--no-cache-dir" in fairseq_call(tmp_path)["arguments"]


def test_another_torch_removes_the_fairseq_that_was_built_against_the_old_one(stub, tmp_path):
    install(tmp_path, stub())
    assert any("uninstall" in call["arguments"] for call in calls(tmp_path))
    install(tmp_path, stub())
    assert not any("uninstall" in call["arguments"] for call in calls(tmp_path))
    install(tmp_path, stub(), TORCH="torch==2.10.0 --index-url URL")
    seen = calls(tmp_path)
    assert any(call["arguments"][-3:] == ["--quiet", "--yes", "fairseq-fixed"] for call in seen)
    assert any({"torch==2.10.0", "--index-url", "URL"} <= set(c["arguments"]) for c in seen)


def test_a_python_that_fairseq_does_not_support_is_refused_in_one_sentence(stub, tmp_path):
    done = install(tmp_path, stub("python3.13", "3.13"))
    assert done.returncode == 2
    assert done.stderr.startswith("Python 3.11 or 3.12 is needed for fairseq, ")
    assert not (tmp_path / "venv").exists()


def test_pip_is_heard_only_where_it_fails(stub, tmp_path):
    done = install(tmp_path, stub())
    assert len(done.stdout.splitlines()) == 4
    assert done.stderr == ""
    done = install(tmp_path, stub(), STUB_FAILS="--editable")
    assert done.returncode == 1
    assert "ERROR: no matching distribution" in done.stderr
    assert "venv/install.log" in done.stderr


@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
def test_make_installs_again_when_torch_or_python_change_and_keeps_a_choice(stub, tmp_path):
    for name in ("Makefile", "setup.py", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    older, newer = stub(), stub("python3.12", "3.12")

    def make(*arguments):
        clean = {k: v for k, v in os.environ.items() if k not in ("TORCH", "PYTHON", "MAKEFLAGS")}
        command = ["make", f"DEFAULT_PYTHON={older}", "install", *arguments]
        subprocess.run(command, cwd=tmp_path, env=clean, check=True, capture_output=True)
        seen = calls(tmp_path)
        return " ".join(a for call in seen for a in call["arguments"] if a.startswith("torch="))

    old, chosen = "torch==2.13.0", "torch==2.10.0"
    for option, installed in (
        ("", old), ("", ""), (f"TORCH={chosen}", chosen), (f"TORCH={chosen}", ""), ("", ""),
        (f"PYTHON={newer}", chosen), ("", ""), (f"TORCH={old}", old), ("", ""),
        (f"PYTHON={older}", old),
    ):  # fmt: skip
        assert make(*filter(None, [option])) == installed


@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
def test_make_site_installs_its_extra_once_and_builds(stub, tmp_path):
    for name in ("Makefile", "setup.py", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    clean = {k: v for k, v in os.environ.items() if k not in ("TORCH", "PYTHON", "MAKEFLAGS")}
    command = ["make", f"DEFAULT_PYTHON={stub()}", "site"]
    for installs in (True, False):
        subprocess.run(command, cwd=tmp_path, env=clean, check=True, capture_output=True)
        *before, last = [call["arguments"] for call in calls(tmp_path)]
        assert last == ["docs/site/make_site.py"]
        assert any(".[plugin,experiments,hf,site]" in call for call in before) == installs


@pytest.fixture(scope="module")
def packaged():
    """What setup.py tells setuptools."""
    with mock.patch.object(setuptools, "setup") as setup:
        runpy.run_path(str(ROOT / "setup.py"))
    return setup.call_args.kwargs


def test_links_of_the_package_index_are_absolute_where_the_repository_is_known(monkeypatch):
    monkeypatch.setenv("REPOSITORY_URL", "https://example.org/u/p/")
    with mock.patch.object(setuptools, "setup") as setup:
        runpy.run_path(str(ROOT / "setup.py"))
    said = setup.call_args.kwargs
    links = re.findall(r"\]\(([^)]*)\)", said["long_description"])
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    ours = [link for link in links if link.startswith("https://example.org/u/p/")]
    for link in ours:
        kind, _, path = link.removeprefix("https://example.org/u/p/").partition("/main/")
        assert kind == ("raw" if path.endswith(".png") else "blob")
        assert (ROOT / path.partition("#")[0]).exists(), link
    assert len(ours) > 10
    assert said["project_urls"]["Source"] == "https://example.org/u/p"


def test_the_wheel_says_that_it_is_typed(packaged):
    assert "py.typed" in packaged["package_data"]["lrpe_fairseq"]
    assert (ROOT / "lrpe_fairseq" / "py.typed").exists()
    assert "Typing :: Typed" in packaged["classifiers"]


def at(python, requirements):
    """The names of the requirements of an environment with that Python."""
    known = map(Requirement, requirements)
    given = {"python_version": python, "sys_platform": "linux"}
    return {one.name for one in known if one.marker is None or one.marker.evaluate(given)}


def test_every_package_that_fairseq_imports_is_required_by_the_plugin(packaged):
    importlib.import_module("lrpe_fairseq.models")
    names = set()
    for module in [m for name, m in sys.modules.items() if name.split(".")[0] == "fairseq"]:
        if (getattr(module, "__file__", None) or "").endswith(".py"):
            for node in ast.parse(Path(module.__file__).read_text(encoding="utf-8")).body:
                names |= {a.name for a in node.names} if isinstance(node, ast.Import) else set()
                is_absolute = isinstance(node, ast.ImportFrom) and not node.level
                names |= {node.module} if is_absolute else set()
    roots = {name.split(".")[0] for name in names} - sys.stdlib_module_names
    owners = packages_distributions()
    found = {owners[root][0] for root in roots - {"fairseq", "fairseq_cli"}}
    known = {*at("3.11", packaged["extras_require"]["plugin"]), "torch", "numpy"}
    assert {"scikit-learn", "bitarray", "hydra-core"} <= found <= known


def test_the_plain_part_installs_on_a_newer_python_that_fairseq_does_not_take(packaged):
    extras = packaged["extras_require"]
    assert {"3.11.0", "3.12.1", "3.13.0"} <= set(
        SpecifierSet(packaged["python_requires"]).filter(["3.10.1", "3.11.0", "3.12.1", "3.13.0"])
    )
    assert "3.10.1" not in SpecifierSet(packaged["python_requires"])
    assert at("3.12", extras["fairseq"]) == {*at("3.12", extras["plugin"]), "fairseq-fixed"}
    assert "fairseq-fixed" not in at("3.13", extras["fairseq"])
    assert at("3.13", packaged["install_requires"]) == {"torch", "numpy"}


def needed(*names):
    """The top-level modules of distributions and of what they require without extras."""
    found, left, seen = set(), list(names), set()
    while left:
        name = left.pop()
        with contextlib.suppress(PackageNotFoundError):  # of another platform
            package = distribution(name)
            found |= {file.parts[0] for file in package.files if file.parts[0] != ".."}
            wanted = (word for word in package.requires or () if "extra ==" not in word)
            seen.add(name)
            left += {re.match(r"[\w.-]+", word)[0] for word in wanted} - seen
    return found


@pytest.mark.exhaustive
def test_a_wheel_without_fairseq_runs_the_plain_pytorch_of_the_readme(tmp_path):
    """A new environment has the wheel, torch and numpy, and what these two need."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    source, plain = tmp_path / "source", tmp_path / "venv"
    for name in ("setup.py", "README.md", "lrpe_fairseq", "hydra_plugins"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        source.mkdir(exist_ok=True)
        copy(ROOT / name, source / name)
    built = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, source]
    subprocess.run([*pip, *built], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", plain], check=True)
    python = plain / "bin" / "python"
    packages = next(plain.glob("lib/python*/site-packages"))
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([*pip, "--python", python, "install", "--no-deps", wheel], check=True)
    for name in needed("torch", "numpy"):
        (packages / name).symlink_to(Path(sysconfig.get_path("purelib")) / name)

    def run(code):
        command = [python, "-I", "-c", code]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert "No module named 'fairseq'" in run("import fairseq").stderr
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    encode, attend, train = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    example = run(f"{encode}{attend}print(tuple(q2.shape), tuple(out.shape))")
    assert example.stdout == "(1, 8, 16, 64) (2, 16, 512)\n", example.stderr
    example = run(train)
    assert "again" in example.stdout, example.stderr
    required = run("import importlib.metadata as m; print(m.requires('lrpe-fairseq'))").stdout
    assert [w for w in ast.literal_eval(required) if "extra" not in w] == ["torch>=2.6", "numpy"]
