"""How far angles move in training: read from checkpoints, and drawn."""

import json
import math
import shlex

import pytest
import torch

from lrpe_fairseq.experiments.commands import drift as command
from lrpe_fairseq.experiments.report import drift as picture
from tests.end_to_end.commands import SMALL, build, save

T = 16


@pytest.fixture
def trained(corpus, tmp_path):
    """A folder with two checkpoints of a model whose angles moved, and its data."""
    chosen = f"--tokens-per-sample {T} --attention-type linear --position-encoding lrpe-type2"
    model, _, config = build(corpus, SMALL, chosen)
    data, folder = tmp_path / "data", tmp_path / "checkpoints"
    data.mkdir()
    folder.mkdir()
    (data / "bin").symlink_to(corpus.data)
    cores = [layer.self_attn.encoding.core for layer in model.decoder.layers]
    start = torch.cat([core.theta.detach().clone() for core in cores])
    for updates, step in ((10, 0.0), (5, 0.5)):
        with torch.no_grad():
            for core in cores:
                core.theta += step
        save(model, config, folder / f"checkpoint_1_{updates}.pt")
    return data, folder, start.double()


def test_the_command_reads_the_angles_of_every_checkpoint_and_they_are_drawn(trained, tmp_path):
    data, folder, start = trained
    out = tmp_path / "results" / "bench" / "drift" / "type2.json"
    assert command.main([str(folder), str(data), "--label", "mine", "--out", str(out)]) == 0
    measured = json.loads(out.read_text())
    assert len(measured["rows"]) == 3
    at_first, moved, unmoved = measured["rows"]
    assert at_first["updates"] == 0
    turns = start.abs() * T / (2 * math.pi)
    assert at_first["turns"][0] == pytest.approx(turns.min().item())
    assert at_first["turns"][-1] == pytest.approx(turns.max().item())
    assert unmoved["turns"] == pytest.approx(at_first["turns"])
    shifted = (start + 0.5).abs() * T / (2 * math.pi)
    assert moved["turns"][3] == pytest.approx(shifted.median().item(), rel=0.2)
    assert moved["turns"][0] == pytest.approx(shifted.min().item(), rel=1e-5)
    [(path, draw)] = picture.pictures(tmp_path).items()
    draw(tmp_path / path)
    assert (tmp_path / path).read_bytes().startswith(b"\x89PNG")
    assert picture.pictures(tmp_path / "elsewhere") == {}


def test_the_command_of_the_docstring_has_all_arguments(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = shlex.split(command.__doc__.split("\n\n")[1].replace("\\\n", ""))
    assert command.main(line[line.index("drift") + 1 :]) == 2
    assert "no checkpoint" in capsys.readouterr().err


def test_quantiles_that_never_differ_are_one_curve():
    rows = [{"updates": n, "turns": [0.0, 0.0, 0.0, 2.0 + n]} for n in (0, 1)]
    curves = picture._quantiles({"quantiles": [0.0, 0.25, 0.5, 1.0], "rows": rows})
    assert curves == {"slowest to median": [(0, 0.0), (1, 0.0)], "fastest": [(0, 2.0), (1, 3.0)]}


def test_a_folder_without_checkpoints_of_updates_is_refused_with_the_option_that_saves_them(
    tmp_path, capsys
):
    words = [str(tmp_path), str(tmp_path), "--label", "mine", "--out", str(tmp_path / "o.json")]
    assert command.main(words) == 2
    assert "save_interval_updates" in capsys.readouterr().err


def test_a_model_without_angles_is_refused(corpus, tmp_path, capsys):
    chosen = f"--tokens-per-sample {T} --attention-type linear --position-encoding fox"
    model, _, config = build(corpus, SMALL, chosen)
    save(model, config, tmp_path / "checkpoint_1_5.pt")
    (tmp_path / "bin").symlink_to(corpus.data)
    words = [str(tmp_path), str(tmp_path), "--label", "mine", "--out", str(tmp_path / "o.json")]
    assert command.main(words) == 2
    assert "choose rope or an LRPE type" in capsys.readouterr().err
