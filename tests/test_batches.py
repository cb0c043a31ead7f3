"""Several processes train updates of the size of one process, by every table at every scale."""

import argparse
from dataclasses import replace
from unittest import mock

import pytest
import torch
from omegaconf import OmegaConf

from lrpe_fairseq.experiments.commands import train_row
from lrpe_fairseq.experiments.families import family_of
from lrpe_fairseq.experiments.records import keys
from lrpe_fairseq.experiments.records.files import CONFIGS, ROOT
from lrpe_fairseq.experiments.records.tables import load_table
from lrpe_fairseq.experiments.runner import devices as machine
from lrpe_fairseq.experiments.runner import schedule
from lrpe_fairseq.experiments.runner.devices import Devices
from tests.trial import trained, trial

TABLES = [load_table(path) for path in sorted((CONFIGS / "tables").glob("*.yaml"))]
FEWER = {  # configuration -> GPUs of 8 that are used
    "lra-image": 5,  # 100 samples
    "wikitext2": 4,  # 4 blocks of text
    "wikitext2-annealed": 4,
    "medium": 4,
    "medium-10m": 4,
    "medium-5m": 4,
    "multi30k": 4,  # a sentence may have as many tokens as the batches of 4 GPUs
    "multi30k-annealed": 4,
}


@pytest.fixture
def gpus(monkeypatch):
    """A function that sets the number of GPUs of this machine."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return lambda count: monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


OF_BATCHES = ("task.", *keys.LIMITS, "dataset.required", keys.FREQUENCY, "model.norm")


def distinct_runs():
    """One run of every configuration with other options of batches, of all tables and scales."""
    runs = {}
    for whole, scale in ((table, scale) for table in TABLES for scale in table.scales):
        table = whole.at(scale)
        for cell in keys.cells(table):
            config = ROOT / (cell.config or table.scales[scale])
            own = tuple(option for option in cell.options if option[0].startswith(OF_BATCHES))
            if (config, own) not in runs:
                runs[config, own] = family_of(config).of_cell(table, cell, scale, config, 1)[0]
    return list(runs.values())


def started(settings, command):
    """``settings`` with the changes of a command."""
    chosen = OmegaConf.from_dotlist([word.lstrip("+") for word in command if "=" in word])
    return OmegaConf.merge(settings, chosen)


def limits(run, command):
    """Return the limits of a batch of a command, times its accumulation."""
    settings = started(run.yaml(), command)
    frequency = settings.optimization.update_freq[0]
    return {k: n * frequency for k in machine.UNITS if (n := settings.dataset.get(k))}


def test_every_run_has_updates_of_one_size_on_1_2_4_and_8_gpus(gpus):
    for run in distinct_runs():
        alone = limits(run, run.command())
        for count in (2, 4, 8):
            gpus(count)
            said: list[str] = []
            devices = run.usable(schedule.shares(1)[0], said.append)
            used = devices.processes
            shared = limits(run, run.command(used))
            assert {key: size * used for key, size in shared.items()} == alone
            assert used == min(count, FEWER.get(run.config, 8)), run.config
            assert len(said) == (used < count)


def run_of(config, folder, *overrides):
    """A run of a configuration ``family/name`` on data that do not exist."""
    kind = family_of(CONFIGS / f"{config}.yaml")
    return trial(folder, kind, config=config.partition("/")[2], overrides=overrides)


TOKENS, SAMPLES = keys.LIMITS
NORMED = ("dataset.batch_size=128", "optimization.update_freq=[2]")


@pytest.mark.parametrize(
    ("config", "overrides", "processes", "accumulated", "size"),
    [
        ("lm/wikitext103", (), 4, 4, 4096),  # accumulation is divided first
        ("lm/wikitext103", (), 32, 1, 2048),
        ("lm/wikitext103", ("dataset.max_tokens=4200",), 32, 1, 2100),  # 8 blocks of 512, or 4
        ("classification/lra-text", (), 4, 1, 64),
        ("classification/lra-text", NORMED, 2, 2, 64),  # BatchNorm sees 128 samples, as in one
        ("classification/mnist5k", NORMED, 2, 1, 128),
        ("classification/vit-imagenet", (), 8, 1, 200),
        ("classification/vit-imagenet", (), 16, 1, 100),
    ],
)
def test_accumulation_is_divided_first_and_then_the_batch(
    tmp_path, config, overrides, processes, accumulated, size
):
    run = run_of(config, tmp_path, *overrides)
    settings = started(run.settings(), run.command(processes))
    assert settings.optimization.update_freq == [accumulated]
    assert next(iter(machine._limits(settings).values())) == size


@pytest.mark.parametrize(
    ("config", "overrides", "processes", "said"),
    [
        ("lm/wikitext103", (), 3, "update of 65,536 tokens"),
        ("lm/wikitext2", (), 8, "1,024 tokens"),
        ("translation/multi30k", (), 8, "4,096 tokens"),
        ("classification/lra-image", (), 8, "update of 100 samples: use another number"),
        ("classification/vit-imagenet", (), 64, "1,600 samples"),  # mixup needs pairs
        ("synthetic/suite", ("dataset.batch_size=24",), 2, "24 samples"),  # fairseq: 8, not 12
    ],
)
def test_processes_that_cannot_have_equal_parts_are_refused(
    tmp_path, config, overrides, processes, said
):
    with pytest.raises(ValueError, match=f"^{processes} processes cannot have equal parts.*{said}"):
        run_of(config, tmp_path, *overrides).command(processes)


def test_a_run_uses_the_most_gpus_that_can_have_equal_parts_and_says_so(tmp_path, gpus):
    gpus(8)
    run, said = run_of("classification/lra-image", tmp_path), []
    assert run.usable(Devices(), said.append) == Devices(gpus=(0, 1, 2, 3, 4))
    assert run.usable(Devices(gpus=(4, 5, 6)), said.append) == Devices(gpus=(4, 5))
    part = "cannot have equal parts of an update of 100 samples, so"
    assert said == [f"8 GPUs {part} 5 of them are used", f"3 GPUs {part} 2 of them are used"]
    assert run.usable(Devices(gpus=(1, 2)), pytest.fail) == Devices(gpus=(1, 2))


def test_gpus_are_counted_among_those_that_the_process_sees_and_share_the_cores(monkeypatch, gpus):
    gpus(4)
    assert "CUDA_VISIBLE_DEVICES" not in Devices().environment
    assert Devices(gpus=(1, 3)).environment["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert Devices(threads=8).environment["OMP_NUM_THREADS"] == "2"
    assert Devices(threads=8, gpus=(1,)).environment["OMP_NUM_THREADS"] == "8"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,GPU-7")
    assert Devices(gpus=(1, 3)).environment["CUDA_VISIBLE_DEVICES"] == "5,GPU-7"


def test_the_script_of_a_row_restricts_its_training_to_those_gpus(
    tmp_path, monkeypatch, gpus, capsys
):
    gpus(8)
    start = mock.Mock(return_value=argparse.Namespace(returncode=0))
    monkeypatch.setattr(train_row.subprocess, "run", start)
    run = run_of("classification/lra-image", tmp_path)
    monkeypatch.setattr(type(run), "begin", lambda run, say: 0)
    assert train_row.train(run) == 0
    (words,) = start.call_args.args
    assert words[4:6] == ["env", "CUDA_VISIBLE_DEVICES=0,1,2,3,4"]
    assert "++dataset.batch_size=20" in words
    assert "so 5 of them are used" in capsys.readouterr().out


NAMES = {"max_tokens": TOKENS, "batch_size": SAMPLES, "update_freq": keys.FREQUENCY}


def together(run, processes, **changes):
    """The options that a training on so many processes records."""
    changed = {NAMES[name]: value for name, value in changes.items()}
    return trained(run, **{keys.WORLD: processes}, **changed)


def test_a_training_on_several_gpus_is_that_of_one(tmp_path):
    texts = run_of("classification/lra-text", tmp_path)
    assert texts.differences(together(texts, 4, batch_size=64)) == set()
    assert texts.differences(together(texts, 4)) == {keys.FREQUENCY}
    assert texts.differences(together(texts, 4, batch_size=32)) == {SAMPLES, keys.FREQUENCY}
    blocks = run_of("lm/wikitext2", tmp_path)
    assert blocks.differences(together(blocks, 4, max_tokens=256)) == set()
    assert blocks.differences(together(blocks, 2, max_tokens=256, update_freq=[2])) == set()
    assert blocks.differences(together(blocks, 1, batch_size=4)) == {SAMPLES}


def test_with_batch_norm_accumulated_batches_are_another_training(tmp_path):
    halves = {"batch_size": 128, "update_freq": [2]}
    texts = run_of("classification/lra-text", tmp_path)
    assert texts.differences(together(texts, 1, **halves)) == {SAMPLES, keys.FREQUENCY}
    two = replace(texts, overrides=NORMED)
    assert two.differences(together(two, 2, batch_size=64)) == set()
    assert two.differences(together(two, 2, update_freq=[1])) == {keys.FREQUENCY}
    pixels = run_of("classification/mnist5k", tmp_path)
    assert pixels.differences(together(pixels, 1, batch_size=16, update_freq=[2])) == set()
