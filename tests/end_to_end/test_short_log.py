"""How much a training of a shipped configuration says before its first update."""

import pytest

from lrpe_fairseq.experiments.records.files import CONFIGS, ROOT
from tests.end_to_end.forked import run_forked

pytestmark = pytest.mark.end_to_end


def test_the_first_update_stands_within_thirty_lines(corpus, tmp_path):
    """They were 79: a model's modules, and how fairseq makes batches."""
    words = ["--config-dir", str(CONFIGS / "lm"), "--config-name", "text", "common.cpu=true"]
    words += [
        f"task.data={corpus.data}",
        f"checkpoint.save_dir={tmp_path}",
        "common.log_interval=1",
    ]
    words += ["optimization.max_update=2", "common.tensorboard_logdir=null"]
    words += ["task.tokens_per_sample=32", "dataset.max_tokens=128"]
    done = run_forked("fairseq_cli.hydra_train", words, cwd=ROOT)
    assert done.returncode == 0
    lines = (done.stdout + done.stderr).splitlines()
    first = next(n for n, line in enumerate(lines) if "num_updates=1," in line)
    assert first < 30, "\n".join(lines[:first])
    before = "\n".join(lines[:first])
    assert "num. shared model params" in before
    assert "save_interval_updates" in before  # the configuration, on one line
