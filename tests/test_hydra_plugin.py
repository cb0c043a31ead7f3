"""A program of hydra that is not fairseq's does with our plugin what it does without it."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from omegaconf import OmegaConf

from tests.end_to_end.commands import environment

FILES = {
    "config.yaml": "defaults: [db: base, _self_]\nname: x\n",
    "packaged.yaml": "defaults: [base@db, _self_]\nname: x\n",
    "over_base.yaml": "defaults: [base, _self_, {db: base}]\nname: x\nport: 3\n",
    "base.yaml": "driver: root\nport: 2\nurl: ${.driver}-${.port}\n",
    "missing.yaml": "defaults: [base, {optional db: absent}]\n",
    "named.yaml": "model: {_name: lrpe_of_theirs, size: 1}\n",
    "db/base.yaml": "driver: pg\nport: 1\n",
}
CALLS = {
    "config": ["db.port=7"],
    "packaged": ["db.driver=mysql"],
    "over_base": ["port=4", "db.port=5"],
    "missing": [],
    "named": ["model.size=2"],
    "named with a new key": ["model.width=2"],
    "named with a forced key": ["+model.width=2", "model._name=lrpe_lm"],
}
PROGRAM = """
import sys
import hydra

@hydra.main(config_path={folder!r}, config_name="packaged", version_base=None)
def main(cfg):
    names = {{name for name in sys.modules if name.split(".")[0] in {packages!r}}}
    print(cfg.name, dict(cfg.db), sorted(names))

main()
"""
PACKAGES = ("hydra_plugins", "lrpe_fairseq", "torch", "fairseq", "fairseq_cli")


@pytest.fixture
def folder(tmp_path):
    """A folder with the configurations of a stranger."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture(scope="module")
def plugin():
    """Our plugin, as hydra has imported it."""
    Plugins.instance()
    return sys.modules["hydra_plugins.lrpe_options"]


def composed(folder, call):
    """What hydra makes of a call, or the error."""
    with initialize_config_dir(str(folder), version_base="1.1"):
        try:
            return OmegaConf.to_yaml(compose(call.split()[0], CALLS[call]))
        except HydraException as error:
            return str(error)


@pytest.mark.parametrize("call", CALLS)
def test_a_strangers_configuration_is_composed_as_without_the_plugin(
    folder, call, plugin, monkeypatch
):
    found = composed(folder, call)
    monkeypatch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", plugin._compose)
    monkeypatch.setattr(ConfigLoaderImpl, "_apply_overrides_to_config", staticmethod(plugin._apply))
    assert found == composed(folder, call)
    assert ("new key" in call) == ("Could not override" in found)


def test_a_strangers_program_in_this_environment_imports_nothing_of_ours_but_the_plugin(folder):
    program = folder / "program.py"
    program.write_text(PROGRAM.format(folder=str(folder), packages=PACKAGES))
    given = {"cwd": folder, "env": environment(), "capture_output": True, "text": True}
    ended = subprocess.run([sys.executable, program], check=False, **given)
    database = {"driver": "root", "port": 2, "url": "root-2"}
    ours = ["hydra_plugins", "hydra_plugins.lrpe_options"]
    assert ended.stdout.strip() == f"x {database} {ours}", ended.stderr


def test_a_function_with_the_names_of_fairseqs_keeps_its_code(plugin, monkeypatch):
    def hydra_main(cfg):
        return _hydra_main(cfg)  # noqa: F821

    program = SimpleNamespace(hydra_main=SimpleNamespace(__wrapped__=hydra_main))
    monkeypatch.setitem(sys.modules, "__main__", program)
    before = hydra_main.__code__
    plugin._return_values()
    assert hydra_main.__code__ is before
