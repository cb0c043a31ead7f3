"""The masked language model: pre-trained, scored, resumed; and padding, which no sentence may
notice, for every encoding."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.errors import Refusal
from lrpe_fairseq.experiments.families.lm import PretrainingRun
from lrpe_fairseq.experiments.runner.training import Devices, shell
from tests.end_to_end.cases import in_turn, sampled, usable
from tests.end_to_end.commands import PLUGIN, build, load, run, saved
from tests.end_to_end.forked import ForkedChildren
from tests.trial import trial

pytestmark = pytest.mark.end_to_end

TASK = f"--user-dir {PLUGIN} --task masked_lm --tokens-per-sample 32 --criterion masked_lm"
SMALL = (
    "--arch lrpe_roberta_tiny --encoder-layers 2 --encoder-embed-dim 32 --encoder-ffn-embed-dim 64"
)
PRETRAIN = (
    f"{TASK} {SMALL} --optimizer adam --lr 3e-3 --max-tokens 256 --num-workers 0 --cpu "
    "--no-epoch-checkpoints --log-format simple --max-update 150 --dropout 0 --save-interval 999 "
    "--validate-interval 999 --save-interval-updates 150"
)
OPTIONS = {  # none of them the default
    "linear": "--attention-type linear --position-encoding lrpe-type3 --encoding-seed 5 "
    "--attention-normalizer layernorm --attention-parts qk-norm,output-gate,kv-shift",
    "softmax": "--attention-type softmax --position-encoding lrpe-type6 --encoding-seed 5",
}


@pytest.mark.parametrize(
    ("attention", "encoding"), sampled(usable("encoder-only"), in_turn("encoder-only"))
)
def test_a_padded_batch_and_its_single_sentences_have_the_same_logits(corpus, attention, encoding):
    _, task, config = build(corpus, TASK, SMALL)  # read once
    config.model.attention_type, config.model.position_encoding = attention, encoding
    model = task.build_model(config.model).eval()
    pad = model.encoder.dictionary.pad()
    generator = torch.Generator().manual_seed(0)
    sentences = [torch.randint(4, 24, (n,), generator=generator) for n in (20, 13, 1)]
    right, left = torch.full((2, 3, 20), pad)
    for row, sentence in enumerate(sentences):
        right[row, : len(sentence)] = left[row, 20 - len(sentence) :] = sentence
    assert not any(m.causal for m in model.modules() if isinstance(m, MultiheadAttention))
    with torch.no_grad():
        alone = [model(sentence.unsqueeze(0))[0][0] for sentence in sentences]
        on_the_right, on_the_left = model(right)[0], model(left)[0]
    for row, expected in enumerate(alone):
        size = len(expected)
        torch.testing.assert_close(on_the_right[row, :size], expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(on_the_left[row, 20 - size :], expected, rtol=0, atol=1e-5)


def test_pruning_of_heads_is_refused_with_grouped_queries(corpus):
    with pytest.raises(SystemExit, match="prunes attention heads with their keys and values"):
        build(corpus, TASK, SMALL, "--mha-reg-scale-factor 0.1 --kv-heads 2")


@pytest.fixture(
    scope="session", params=["linear", pytest.param("softmax", marks=pytest.mark.exhaustive)]
)
def pretrained(request, corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pretrained") / request.param
    run("fairseq_cli.train", corpus.data, PRETRAIN, OPTIONS[request.param], "--save-dir", folder)
    return folder / "checkpoint_best.pt"


def test_pretraining_learns_and_its_checkpoint_alone_restores_the_model(pretrained, corpus):
    model, _, config = load(pretrained)
    assert config.model.encoding_seed == 5
    assert (
        f"--position-encoding {config.model.position_encoding}" in OPTIONS[pretrained.parent.name]
    )
    assert saved(pretrained)["extra_state"]["best"] < 4.0  # log2 of 20 words is 4.3
    typed = build(corpus, TASK, SMALL, OPTIONS[pretrained.parent.name])[0].eval()
    typed.load_state_dict(saved(pretrained)["model"])
    tokens = torch.randint(4, 24, (2, 30))
    assert torch.equal(model(tokens)[0], typed(tokens)[0])
    for length in (16, 64):
        task = TASK.replace("32", str(length))
        other = build(corpus, task, SMALL, OPTIONS[pretrained.parent.name])[0].eval()
        with pytest.raises(Refusal, match="for 32 tokens") if length > 32 else nullcontext():
            other.load_state_dict(saved(pretrained)["model"])
            assert torch.equal(other(tokens[:, :16])[0], model(tokens[:, :16])[0])


def test_a_run_is_scored_with_the_same_masks_whatever_its_seed(pretrained, corpus, tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "checkpoints").symlink_to(pretrained.parent)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "bin").symlink_to(corpus.data)
    kind = {"kind": PretrainingRun, "config": "pretrain-small"}
    runs = [trial(tmp_path, **kind, seed=seed) for seed in (1, 2)]
    here = shell(ForkedChildren(), Devices())
    first, second = (run.measure(here)["metrics"] for run in runs)
    assert first == second
    assert 0 < first["valid"]["masked"]["loss"] < 4.0
    assert first["test"]["masked"]["ppl"] == 2 ** first["test"]["masked"]["loss"]


def test_a_finished_run_is_finished_and_a_longer_one_goes_on_from_it(corpus, tmp_path):
    """fairseq keeps the string "3000" of the YAML's total_num_update as 3000.0."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "bin").symlink_to(corpus.data)
    tiny = ["encoder_layers=1", "encoder_embed_dim=16", "encoder_attention_heads=2"]
    tiny = [f"model.{option}" for option in tiny] + ["common.log_interval=1"]
    chosen = (*tiny, "optimization.max_update=2")
    run = trial(tmp_path, PretrainingRun, config="pretrain-small", overrides=chosen)
    run.work(ForkedChildren(), Devices(), print)
    assert run.finished()
    assert "total_num_update" not in " ".join(run.overrides)
    longer = replace(run, overrides=(*run.overrides[:-1], "optimization.max_update=3"))
    said: list[str] = []
    assert not longer.finished()
    assert longer.ready_to_resume(said.append) == 2
    assert said == []
