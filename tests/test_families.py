"""Families of experiments: who owns a configuration, and what a new family needs."""

import json
import re
import subprocess

import pytest
from omegaconf import OmegaConf

from lrpe_fairseq.experiments.families import FAMILIES, family_of, preparation_of
from lrpe_fairseq.experiments.records.files import CONFIGS, ROOT, load_config
from lrpe_fairseq.experiments.records.runs import read_runs
from tests.toy_checkout import checkout
from tests.trial import configurations


def owners(config):
    task = load_config(config).task._name
    return [
        name
        for name, family in FAMILIES.items()
        if config.parent.name == family.configs and family.task in ("", task)
    ]


def all_configurations():
    folders = (folder for folder in CONFIGS.iterdir() if folder.is_dir())
    return [path for f in folders if f.name != "tables" for path in configurations(f)]


def test_every_configuration_belongs_to_exactly_one_family():
    found = {path: owners(path) for path in all_configurations()}
    assert {path: names for path, names in found.items() if len(names) != 1} == {}
    assert set().union(*found.values()) == set(FAMILIES)


def test_every_configuration_resumes_exactly_and_saves_where_it_validates_within_an_epoch():
    """fairseq compares validations only where it saves. Translations average the last ones."""
    lost = []
    for path in all_configurations():
        known = load_config(path)
        assert known.dataset.update_epoch_batch_itr is True, path
        every = OmegaConf.select(known, "dataset.validate_interval_updates", default=0)
        saved = OmegaConf.select(known, "checkpoint.save_interval_updates", default=0)
        if every and path.parent.name != "translation" and (not saved or every % saved):
            lost.append(path.relative_to(CONFIGS).as_posix())
    assert lost == []


def test_a_configuration_without_family_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"absent\.yaml does not exist"):
        family_of(CONFIGS / "lm" / "absent.yaml")
    (tmp_path / "x.yaml").write_text("task: {_name: language_modeling}")
    with pytest.raises(ValueError, match=r"which no family trains \(lm, pretraining"):
        family_of(tmp_path / "x.yaml")


def test_families_agree_on_the_script_that_fills_a_data_folder():
    for family in FAMILIES.values():
        for name, script in family.data_scripts.items():
            found = preparation_of(ROOT / "data" / name)
            assert found == [*script.split(), "--dest", f"data/{name}"]
            assert (ROOT / found[0]).is_file()


def test_the_data_of_fine_tuning_are_prepared_in_the_pieces_of_pre_training():
    words = preparation_of(ROOT / "data" / "glue-wikitext-2-bpe" / "RTE")
    assert words[:3] == ["data-prep/glue/prepare.py", "RTE", "--tokens-of"]
    assert words[3:] == ["data/wikitext-2-bpe", "--dest", "data/glue-wikitext-2-bpe"]
    assert preparation_of(ROOT / "data" / "unknown") == []


DRIVER = """
from lrpe_fairseq.experiments.commands import run_table, train_row

table = ["letters", "--scale", "paper", "--seeds", "1"]
print("first", run_table.main([*table, "--jobs", "2"]))
print("second", run_table.main([*table, "--status"]))
print("row", train_row.main(["letters", "Base", "linear", "--scale", "paper"]))
"""


def snippets():
    """The code of CONTRIBUTING.md's section on families, and its entry of FAMILIES."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition("## Add an experiment family")[2].partition("\n## ")[0]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    yield re.sub(r"^   ", "", code, flags=re.MULTILINE)
    yield re.search(r"Add the entry\*\* `(.*?)`", section)[1]


def test_a_family_is_one_file_and_one_entry(tmp_path):
    folder = checkout(tmp_path, *snippets())
    driver = [str(folder / ".venv" / "bin" / "python"), "-c", DRIVER]
    given = {"cwd": folder, "env": {"PYTHONPATH": str(folder)}, "capture_output": True}
    done = subprocess.run(driver, **given, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout
    assert "first 0" in said
    assert "2 done\nsecond 0" in said.partition("first 0")[2]
    assert "evaluate with: scripts/run_table.sh letters --scale paper\nrow 0" in said
    found = read_runs(folder / "results" / "runs")
    assert sorted(found) == [f"letters/paper-{row}-linear-seed1.json" for row in ("Base", "First")]
    for run in found.values():
        assert [point["valid_accuracy"] for point in run["curve"]] == [61.0, 62.0]
        assert run["metrics"] == {"test": {"whole": {"accuracy": 62.5}}}
    assert [run["config"]["model.pooling"] for run in found.values()] == ["mean", "first"]
    assert "62.50" in (folder / "results" / "README.md").read_text()
    assert json.loads((folder / "data" / "letters" / "manifest.json").read_text())
