"""Trainings go on where Triton's kernels do not: in its interpreter, with a failure injected."""

import re

import pytest

from lrpe_fairseq.experiments.records import fairseq_log
from tests.end_to_end.commands import SMALL, TRAINING, last_loss, run, side_by_side, user_dir

pytest.importorskip("triton", reason="the kernels need triton, which is a test dependency")

from tests import triton_probe

pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.skipif(bool(triton_probe.why_not()), reason=triton_probe.why_not()),
]

UNAVAILABLE = """
import lrpe_fairseq.models
from lrpe_fairseq.kernels import loader

def launch(kernel, grid, args, constants):
    if not kernel.fn.__module__.endswith("probe_triton"):
        raise RuntimeError("out of resource: shared memory")
    kernel[grid](*args, **constants)

loader.interpret()
loader._launch = launch
"""
CASES = {
    "linear": ("lrpe-type2", {"encodings of queries and keys", "causal linear attention"}),
    "softmax": ("t5", {"softmax attention"}),
}


@pytest.mark.parametrize("attention", CASES)
def test_a_training_whose_kernels_fail_has_the_losses_of_one_without(
    attention, corpus, tmp_path, monkeypatch
):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # an import of benchmarks.compiled removes it
    name, families = CASES[attention]
    options = f"--attention-type {attention} --position-encoding {name} --dropout 0.1"
    options += " --decoder-attention-heads 2"  # whose width the kernels serve
    train = [corpus.data, TRAINING, SMALL, options, "--max-update 3 --save-dir"]
    failing = user_dir(tmp_path / "plugin", UNAVAILABLE)
    log, _ = side_by_side(
        lambda: run("fairseq_cli.train", *train, tmp_path / "failing", failing),
        lambda: run("fairseq_cli.train", *train, tmp_path / "without"),
    )
    found, wanted = (
        last_loss(tmp_path / name / "checkpoint_last.pt") for name in ("failing", "without")
    )
    assert found == wanted
    warnings = re.findall(r"WARNING.* \| the Triton kernels of (.+) are not used on", log)
    assert sorted(warnings) == sorted(families)
    path = tmp_path / "train.log"
    path.write_text(log)
    served = fairseq_log.served(path)
    for family in families:
        assert all(x.startswith("definition, because") for x in served[f"kernel of {family}"])
    assert not any(x.startswith("triton") for kernels in served.values() for x in kernels)
