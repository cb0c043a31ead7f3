"""README and docs: generated parts are fresh, and README's commands do what they promise."""

import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lrpe_fairseq.experiments.report import docs, markdown, speed
from tests.end_to_end.commands import PLUGIN
from tests.end_to_end.forked import run_forked

ROOT = Path(__file__).resolve().parents[1]


def test_every_generated_page_is_fresh():
    assert docs.stale(ROOT, list(docs.PARTS)) == [], "run make docs"


def test_the_check_names_what_is_stale_and_the_pages_are_written_by_the_same_command(
    tmp_path, capsys, monkeypatch
):
    part = SimpleNamespace(pages=lambda root: {"page.md": "fresh"}, pictures=lambda root: {})
    monkeypatch.setitem(docs.PARTS, "toy", part)
    (tmp_path / "page.md").write_text("stale")
    arguments = ["toy", "--root", str(tmp_path)]
    assert docs.main([*arguments, "--check"]) == 1
    assert "docs: stale: page.md; " in capsys.readouterr().err
    assert docs.main(arguments) == 0
    assert docs.main([*arguments, "--check"]) == 0


def test_a_bar_in_a_cell_does_not_break_the_table():
    table = markdown.table(["a", "b"], [["P(s | t)", "|s - t| < 2"]])
    assert table.splitlines()[2] == r"| P(s \| t) | \|s - t\| < 2 |"


def test_a_part_without_its_place_is_refused():
    with pytest.raises(ValueError, match="the markers <!-- encodings -->"):
        markdown.between("text", "encodings", "content")


@pytest.mark.parametrize(
    ("speed_ups", "first"),
    [
        ({128: 0.7, 256: 0.9, 512: 1.5, 1024: 2.0}, 512),
        ({128: 1.1, 256: 0.9, 512: 1.5}, 512),
        ({128: 1.1, 256: 1.9}, 128),
        ({128: 1.1, 256: 0.9}, None),
    ],
)
def test_the_crossover_is_the_shortest_length_from_which_on_linear_wins(
    monkeypatch, speed_ups, first
):
    rows = [{"length": n, "contestant": "sdpa", "speed_up": s} for n, s in speed_ups.items()]
    monkeypatch.setattr(speed, "measured", lambda *_: rows)
    assert speed.crossover(ROOT, "cpu") == first


def test_a_speed_that_was_not_measured_is_a_dash(monkeypatch):
    row = {"attention": "linear", "encoding": "lrpe-type3", "relative_speed": 0.985}
    monkeypatch.setattr(speed, "measured", lambda part, device, root: [row] * (device == "cpu"))
    assert speed.speed(ROOT, "cpu", "linear", "lrpe-type3") == "0.98"
    assert speed.speed(ROOT, "cuda", "linear", "lrpe-type3") == "–"


README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMAND = r"^{}(?:.*\\\n)*.*$"
TRAININGS = re.findall(COMMAND.format("fairseq-hydra-train "), README, re.MULTILINE)
TINY = "optimization.max_update=2 checkpoint.save_interval_updates=2 dataset.max_valid_steps=1"
ON_CPU = "common.cpu=true common.bf16=false model.decoder_layers=1 dataset.max_tokens=512"


def command(start, text=README):
    """The first command of ``text`` that begins with ``start``."""
    return re.search(COMMAND.format(re.escape(start)), text, re.MULTILINE)[0]


def shell(folder, text):
    """What the command writes, with the programs of this installation; it must succeed."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {"PATH": path, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    given = {"cwd": folder, "env": os.environ | own, "capture_output": True, "text": True}
    return succeeded(subprocess.run(["bash", "-c", text], **given))


def forked(folder, text, *more, given=""):
    """As ``shell``, for one command of fairseq, without a new interpreter."""
    program, *arguments = shlex.split(text.replace("$PWD", str(folder)).replace("\\\n", " "))
    tool = program.replace("fairseq-", "fairseq_cli.").replace("-", "_")
    return succeeded(run_forked(tool, [*arguments, *more], given=given, cwd=folder))


def succeeded(done):
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-3000:]
    return said


@pytest.fixture(scope="module")
def own_text(tmp_path_factory):
    """A checkout with README's ``data/mine``, prepared by its command."""
    folder = tmp_path_factory.mktemp("own")
    shutil.copytree(ROOT / "lrpe_fairseq", folder / "lrpe_fairseq")  # a root of its own
    for name in ("configs", "hydra_plugins", "scripts", ".venv"):
        if (ROOT / name).exists():
            (folder / name).symlink_to(ROOT / name)
    words, chance = re.findall(r"\w+", README), random.Random(1)
    lines = (" ".join(chance.choices(words, k=12)) + "\n" for _ in range(3300))
    (folder / "mine.txt").write_text("".join(lines), encoding="utf-8")
    small = command("python -m lrpe_fairseq.experiments prepare").replace("8000", "600")
    assert '"unknown": 0' in shell(folder, small)
    return folder


@pytest.mark.end_to_end
def test_a_model_of_own_text_is_trained_resumed_evaluated_and_writes(own_text):
    training = command("fairseq-hydra-train", README[README.index("On a CPU;") :])
    small = [*TINY.split(), f"common.user_dir={PLUGIN}", "model.decoder_layers=1"]
    written = forked(own_text, training, *small, "common.log_interval=1")
    assert re.search(r"done training in [\d.]+ seconds$", written.strip())
    assert "num_updates=1," in written
    written = forked(own_text, training, *small, "optimization.max_update=3")
    assert "Loaded checkpoint runs/mine/linear-fox/checkpoint_last.pt" in written
    evaluated = shell(own_text, command("scripts/eval_lm.sh"))
    for protocol in ("blocks", "paired-256", "paired-2048"):
        assert re.search(rf"^test, {protocol}: loss [\d.]+, ppl ", evaluated, re.MULTILINE)
    said, _, interactive = command("echo ").partition(" | ")
    generated = forked(own_text, interactive, "--user-dir", str(PLUGIN), given=said[6:-1])
    detokenized = re.search(r"^D-0\t[-.e\d]+\t(.*)$", generated, re.MULTILINE)[1]
    assert detokenized.startswith("the first words")
    assert "▁" not in detokenized
    assert list(own_text.glob("runs/mine/linear-fox/tensorboard/*/events*"))


@pytest.mark.end_to_end
def test_a_model_of_own_text_is_loaded_in_python_as_the_page_says(own_text, monkeypatch, capsys):
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```python\n(from lrpe_fairseq\.models.*?)```", page, re.DOTALL)
    training = command("fairseq-hydra-train", README[README.index("On a CPU;") :])
    forked(own_text, training, *TINY.split(), f"common.user_dir={PLUGIN}", "model.decoder_layers=1")
    monkeypatch.chdir(own_text)
    exec(compile(block, "python.md", "exec"), {})
    text, perplexity = capsys.readouterr().out.strip().rsplit("\n", 1)
    assert text.startswith("The first words")
    assert float(perplexity.removeprefix("perplexity ")) > 1


@pytest.mark.end_to_end
@pytest.mark.exhaustive
@pytest.mark.parametrize("text", TRAININGS, ids=range(len(TRAININGS)))
def test_every_training_command_trains(own_text, text):
    if "multi30k" in text:
        pytest.skip("the data are a download; tests/end_to_end trains translation models")
    folder = f"checkpoint.save_dir={own_text}/runs/{abs(hash(text))}"
    written = shell(own_text, f"{text} {TINY} {ON_CPU if '-gpu' in text else ''} {folder}")
    assert "done training in" in written
    assert "is validated against ConfigStore" not in written
    assert ("can fail on texts longer" in written) == ("rotated" in text)


def test_readme_names_the_command_of_the_tests_which_installs_what_they_need():
    assert "`make test` runs the tests" in (ROOT / "README.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "\ntest: $(TOOLS)" in makefile
    assert "'.[plugin,experiments,hf,test]'" in makefile
