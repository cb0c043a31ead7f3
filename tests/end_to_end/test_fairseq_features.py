"""Features of fairseq that depend on the model class: checkpoints, overrides, inference, export."""

import re

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.dataclass.configs import EMAConfig
from fairseq.models.ema import build_ema
from omegaconf import OmegaConf

from lrpe_fairseq.errors import Refusal
from tests.end_to_end.commands import (
    PLUGIN,
    SMALL,
    TRAINING,
    build,
    built,
    run_here,
    save,
    saved,
    small_transformer,
)

pytestmark = pytest.mark.end_to_end

ADAPTIVE = "--criterion adaptive_loss --adaptive-softmax-cutoff 8,16 --ddp-backend legacy_ddp"
EVALUATION = (
    f"--user-dir {PLUGIN} --task language_modeling --tokens-per-sample 32 --cpu --num-workers 0"
)
PAIRS = (
    f"--user-dir {PLUGIN} --task translation -s en -t de --cpu --optimizer adam --max-tokens 128 "
    + small_transformer(layers=2)
)


def train(corpus, save_dir, updates, *arguments):
    """Train in this process, resuming what ``save_dir`` holds; the last checkpoint."""
    steps = f"--max-update {updates} --save-dir"
    run_here("fairseq_cli.train", corpus.data, TRAINING, SMALL, *arguments, steps, save_dir)
    return saved(save_dir / "checkpoint_last.pt")


def tokens(rows=2, length=7):
    return torch.randint(4, 20, (rows, length), generator=torch.Generator().manual_seed(0))


def test_an_adaptive_softmax_with_shared_embeddings_resumes_and_is_evaluated(
    corpus, tmp_path, caplog
):
    first = train(corpus, tmp_path, 1, ADAPTIVE)
    assert "decoder.output_projection.weight" not in first["model"]
    resumed = train(corpus, tmp_path, 2, ADAPTIVE)
    assert resumed["optimizer_history"][-1]["num_updates"] == 2
    assert list(resumed["model"]) == list(first["model"])
    with caplog.at_level("INFO"):
        path = tmp_path / "checkpoint_last.pt"
        run_here("fairseq_cli.eval_lm", corpus.data, EVALUATION, "--gen-subset test --path", path)
    assert f"Evaluated {corpus.token_count('test')} tokens" in caplog.text


def test_the_average_of_weights_keeps_the_buffers_of_an_encoding(corpus, tmp_path):
    state = train(corpus, tmp_path, 2, "--store-ema --ema-decay 0.9 --position-encoding lrpe-type2")
    averaged = state["extra_state"]["ema"]
    learned = {"theta"}
    drawn = {k for k in averaged if "self_attn.encoding" in k and k.split(".")[-1] not in learned}
    assert drawn
    for name in drawn:
        assert torch.equal(averaged[name], state["model"][name]), name
    name = "decoder.layers.0.fc1.weight"
    assert not torch.equal(averaged[name], state["model"][name])


def test_the_averaged_model_of_learned_angles_computes_and_follows_its_parameters(corpus):
    model, _, _ = build(corpus, SMALL, "--position-encoding lrpe-type2")
    average = build_ema(model, OmegaConf.structured(EMAConfig(store_ema=True, ema_decay=0.0)), None)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
        frozen = average.get_model().eval()
        before = frozen(tokens())[0]
        average.step(model)
        assert not torch.equal(frozen(tokens())[0], before)
        assert torch.equal(frozen(tokens())[0], model.eval()(tokens())[0])


@pytest.fixture(scope="module")
def untrained(corpus, tmp_path_factory):
    """A checkpoint of a language model that reads 32 tokens."""
    model, _, config = build(corpus, SMALL)
    return save(model, config, tmp_path_factory.mktemp("untrained") / "checkpoint.pt")


@pytest.mark.parametrize(
    "options",
    [
        "--tokens-per-sample 64",
        "",  # fairseq's default of --tokens-per-sample is 1024
        "--tokens-per-sample 48 --context-window 8",
        "--tokens-per-sample 33 --batch-size 1 --required-batch-size-multiple 1",
    ],
)
def test_a_perplexity_of_a_part_of_the_text_is_refused_with_the_tokens_left_out(
    corpus, untrained, options
):
    text = corpus.token_count("test")
    block = int(options.split()[1]) - 8 * ("window" in options) if options else 1024
    left = text - text % block if text % block <= 32 else text
    said = rf"^lrpe_fairseq: {left} tokens in .* would be left out: set --tokens-per-sample to at"
    evaluation = f"--user-dir {PLUGIN} --cpu --num-workers 0 --gen-subset test {options} --path"
    with pytest.raises(Refusal, match=said):
        run_here("fairseq_cli.eval_lm", corpus.data, evaluation, untrained)


def test_a_validation_of_a_part_of_the_text_is_refused_or_says_how_many_tokens_are_left_out(
    corpus, untrained, caplog
):
    lengths = [len(line.split()) + 1 for line in corpus.lines["test"]]
    said = f"{sum(n for n in lengths if n > 8)} tokens in {sum(n > 8 for n in lengths)} of 40 samp"
    lines = "--sample-break-mode eos --max-target-positions 8 --max-tokens 99 --valid-subset test"
    validate = [corpus.data, EVALUATION, lines, "--path", untrained]
    with pytest.raises(Refusal, match=f"{said}.* would be left out"):
        run_here("fairseq_cli.validate", *validate)
    run_here("fairseq_cli.validate", *validate, "--skip-invalid-size-inputs-valid-test")
    assert re.search(f"{said}.* are left out", caplog.text)


@pytest.fixture(scope="module")
def translation(pairs, tmp_path_factory):
    """A checkpoint of an untrained translation model with two layers on either side."""
    model, _, config = built(pairs, PAIRS)
    return save(model, config, tmp_path_factory.mktemp("translation") / "checkpoint.pt")


def overridden(path, **overrides):
    models, _, _ = checkpoint_utils.load_model_ensemble_and_task([str(path)], overrides)
    return models[0]


def test_a_flat_name_overrides_a_nested_option(translation, caplog):
    model = overridden(translation, encoder_attention_type="softmax", quant_noise_pq_block_size=4)
    assert "was trained with encoder.attention_type=linear, not softmax" in caplog.text
    assert model.encoder.layers[0].self_attn.attention_type == "softmax"
    assert model.decoder.layers[0].self_attn.attention_type == "softmax"  # its default
    assert model.cfg.quant_noise.pq_block_size == 4
    with pytest.raises(Refusal, match="do not fit this model: override fewer"):
        overridden(translation, encoder_position_encoding="t5", encoder_attention_type="softmax")


def test_layers_to_keep_prune_a_translation_model(translation):
    weights = saved(translation)["model"]
    model = overridden(translation, encoder_layers_to_keep="1", decoder_layers_to_keep="0")
    assert (len(model.encoder.layers), len(model.decoder.layers)) == (1, 1)
    for side, kept in (("encoder", 1), ("decoder", 0)):
        weight = getattr(model, side).layers[0].fc1.weight
        assert torch.equal(weight, weights[f"{side}.layers.{kept}.fc1.weight"])


def test_an_option_that_is_newer_than_the_checkpoint_is_overridden(translation, tmp_path):
    state = saved(translation)
    del state["cfg"]["task"]["num_batch_buckets"]
    del state["cfg"]["model"]["adaptive_softmax_dropout"]
    torch.save(state, tmp_path / "older.pt")
    given = {"num_batch_buckets": 3, "adaptive_softmax_dropout": 0.25}
    path = str(tmp_path / "older.pt")
    (model,), config, _ = checkpoint_utils.load_model_ensemble_and_task([path], given)
    assert config.task.num_batch_buckets == 3
    assert model.cfg.adaptive_softmax_dropout == 0.25


def test_an_unknown_override_is_refused(translation):
    with pytest.raises(SystemExit) as refusal:
        overridden(translation, encoder_atention_type=1)
    said = "unknown option 'encoder_atention_type' in the overrides; did you mean 'encoder_att"
    assert str(refusal.value).startswith(f"lrpe_fairseq: {said}")
