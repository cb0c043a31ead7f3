"""Trainings go on where Triton's kernels do not: in its interpreter, with a failure injected."""

import re

import pytest

from lrpe_fairseq.experiments.records import fairseq_log
from tests.end_to_end.commands import SMALL, TRAINING, run, side_by_side, user_dir

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
def test_a_training_whose_kernels_fail_has_the_losses_of_one_without(attention, corpus, tmp_path):
    name, families = CASES[attention]
    options = f"--attention-type {attention} --position-encoding {name} --dropout 0.1"
    train = [corpus.data, TRAINING, SMALL, options, "--max-update 3 --log-interval 1 --no-save"]
    failing = user_dir(tmp_path / "failing", UNAVAILABLE)
    logs = side_by_side(
        lambda: run("fairseq_cli.train", *train, failing),
        lambda: run("fairseq_cli.train", *train),
    )
    losses = [re.findall(r"\bloss=([\d.]+)", log) or re.findall(r'"loss": "', log) for log in logs]
    assert losses[0] == losses[1]
    assert len(losses[0]) >= 3
    warnings = re.findall(r"WARNING.* \| the Triton kernels of (.+) are not used on", logs[0])
    assert sorted(warnings) == sorted(families)
    path = tmp_path / "train.log"
    path.write_text(logs[0])
    served = fairseq_log.served(path)
    for family in families:
        (said,) = {x.split(":")[0] for x in served[f"kernel of {family}"]}
        assert said.startswith("definition, because ")
    assert not any(x.startswith("triton") for kernels in served.values() for x in kernels)
