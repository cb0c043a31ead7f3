"""Evaluation at other lengths than that of training: protocols, scores, controls, the figure."""

import json
import math
import re
import sys
from dataclasses import replace

import pytest
import torch

from lrpe_fairseq.attention.linear import EPS
from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.attention.tokens import tokens_of
from lrpe_fairseq.experiments.commands import eval_lm
from lrpe_fairseq.experiments.families import lm, load_named
from lrpe_fairseq.experiments.families.lm import LMRun, PretrainingRun
from lrpe_fairseq.experiments.records import checkpoints
from lrpe_fairseq.experiments.records.console import UserError
from lrpe_fairseq.experiments.records.files import commit
from lrpe_fairseq.experiments.records.protocols import Protocol, Window, holds_to
from lrpe_fairseq.experiments.records.runs import read_run, validate
from lrpe_fairseq.experiments.report.sheets import Sheet
from lrpe_fairseq.experiments.runner import processes, schedule, scoring
from lrpe_fairseq.experiments.runner.devices import Devices
from lrpe_fairseq.experiments.runner.processes import RunFailed
from tests.end_to_end.commands import build
from tests.end_to_end.forked import ForkedChildren
from tests.test_results import make_run
from tests.trial import a_record, trial

T = 8
"""Length of training in these tests."""
ONE_LAYER = (
    "--arch lrpe_lm_tiny --decoder-layers 1 --decoder-embed-dim 16 --decoder-input-dim 16 "
    "--decoder-output-dim 16 --decoder-ffn-embed-dim 16 --decoder-attention-heads 2 "
    "--no-token-positional-embeddings --dropout 0"
)
TAILS = ("tail-8-8", "tail-64-8", "tail-64-64", "tail-20-3", "tail-512")
WHOLE = ("blocks", "sliding", "blocks-7", "blocks-64", "positions-64", *TAILS)


def windows(name, tokens, trained=T):
    return list(Protocol.parse(name).windows(tokens, trained))


@pytest.mark.parametrize(
    "name",
    [
        *("block", "blocks-0", "blocks-x", "blocks-64-8", "tail", "sliding-64", "paired"),
        *("blocks-064", "blocks+yarn", "blocks+none-1", "blocks+yarn-0.5", "blocks+yarn-4.0"),
    ],
)
def test_an_unknown_protocol_is_refused_with_the_forms(name):
    with pytest.raises(
        ValueError, match=f"there is no protocol '{re.escape(name)}'; the protocols are blocks,"
    ):
        Protocol.parse(name)


def test_context_scaling_is_part_of_a_protocols_name_and_sentence():
    printed = Protocol.parse("paired-512+yarn-printed-4")
    assert printed == Protocol("paired", 512, scaling="yarn-printed", factor=4.0)
    assert printed.overrides(T)["context_scaling"] == "yarn-printed"
    scaled = Protocol.parse("paired-512+yarn-2.5")
    assert scaled == Protocol("paired", 512, scaling="yarn", factor=2.5)
    own = {"context_scaling": "yarn", "context_factor": 2.5, "context_length": T}
    assert scaled.overrides(T) == own
    assert scaled.sentence(T).endswith("scaled for the evaluation: yarn by 2.5, from 8 tokens.")
    assert Protocol.parse("paired-512").overrides(T) == {}
    assert Protocol.parse("paired-64+dynamic-1").overrides(T)["context_scaling"] == "dynamic"
    factors = "1,1,2,4"
    long = Protocol.parse("paired-64+longrope-8").overrides(T, factors)
    assert long == {
        "context_scaling": "longrope",
        "context_factor": 8.0,
        "context_length": T,
        "longrope_factors": factors,
    }


def test_the_normalizer_bounded_is_part_of_a_protocols_name_and_sentence():
    bounded = Protocol.parse("paired-512+bounded")
    assert bounded == Protocol("paired", 512, bounded=True)
    assert bounded.overrides(T) == {"attention_normalizer": "bounded"}
    assert bounded.sentence(T).endswith("has the normalizer bounded for the evaluation.")
    both = Protocol.parse("blocks+ntk-4+bounded")
    assert both.overrides(T) == Protocol.parse("blocks+ntk-4").overrides(T) | bounded.overrides(T)
    with pytest.raises(ValueError, match="there is no protocol 'blocks"):
        Protocol.parse("blocks+bounded+bounded-2")


def test_bounded_needs_linear_attention_of_the_normalizer_rotated():
    wanted = [Protocol.parse("blocks+bounded")]
    linear = {"model.position_encoding": "rope", "model.attention_type": "linear,softmax"}
    lm.require_positions(linear, 256, wanted)
    lm.require_positions({**linear, "model.attention_normalizer": "rotated"}, 256, wanted)
    # the second layer has softmax attention, which reads no normalizer
    lm.require_positions({**linear, "model.attention_normalizer": "rotated,content"}, 256, wanted)
    softmax = {**linear, "model.attention_type": "softmax"}
    others = ({**linear, "model.attention_normalizer": n} for n in ("content,rotated", "bounded"))
    for other in (softmax, *others):
        with pytest.raises(UserError, match="attention of the normalizer rotated, which this"):
            lm.require_positions(other, 256, wanted)


@pytest.mark.parametrize("tokens", [1, 8, 63, 64, 65, 1000])
@pytest.mark.parametrize("name", WHOLE)
def test_every_token_is_scored_once_with_the_context_of_the_protocol(name, tokens):
    protocol = Protocol.parse(name)
    found = windows(name, tokens)
    assert [t for w in found for t in range(w.first, w.end)] == list(range(tokens))
    length = protocol.length or T
    least = {"tail": length - protocol.step, "sliding": T // 2}.get(protocol.kind, 0)
    assert all(w.end - w.start <= length for w in found)
    assert all(w.first - w.start == min(least, w.first) for w in found)
    assert protocol.count(tokens, T) == tokens


def test_paired_protocols_score_the_same_tokens_at_every_length():
    block, tokens = 16 * T, 1000
    wanted = [t for end in range(block, tokens + 1, block) for t in range(end - T, end)]
    for length in (T, 2 * T, 100, block):
        found = windows(f"paired-{length}", tokens)
        assert [t for w in found for t in range(w.first, w.end)] == wanted
        assert {w.end - w.start for w in found} == {length}
        assert Protocol.parse(f"paired-{length}").count(tokens, T) == len(wanted)
        assert windows(f"truncated-{length}", tokens) == found


def test_repeated_spans_are_the_same_for_every_distance():
    block, tokens = 16 * T, 1000
    wanted = [t for end in range(2 * block, tokens + 1, block) for t in range(end - 48, end)]
    for distance in (48, 100, block):
        found, protocol = windows(f"repeated-{distance}", tokens), Protocol.parse("repeated-48")
        assert [t for w in found for t in range(w.first, w.end)] == wanted
        assert {w.end - w.start for w in found} == {distance + 48}
        assert all(w.start >= 0 for w in found)
        assert protocol.count(tokens, T) == len(wanted)


@pytest.mark.parametrize("attention", ["linear", "softmax"])
@pytest.mark.parametrize("distance", [48, 60])
def test_the_gain_of_a_repeated_span_is_that_of_a_text_with_a_copy_in_it(
    corpus, attention, distance
):
    model = model_of(corpus, attention, "rope")
    text, own, gains = text_of(model, 500), windows(f"repeated-{distance}", 500), []
    for window in own:
        copied = text.clone()
        copied[window.start : window.start + 48] = text[window.first : window.end]
        pair = [by_hand(model, words, [window]) for words in (text, copied)]
        gains.append((pair[0] - pair[1]).double().mean().item() * math.log(2))
    found = scoring.evaluate(model, text, 2, T, [f"repeated-{distance}"])[f"repeated-{distance}"]
    assert found["gain"] == pytest.approx(sum(gains) / len(gains), abs=1e-6)
    assert found["gain_low"] <= found["gain"] <= found["gain_high"]
    assert found["tokens"] == 48 * len(own)
    assert not any(name.startswith(("delta", "ppl")) for name in found)


def test_no_window_of_documents_crosses_the_start_of_one():
    starts, found = [0, 5, 64, 70], Protocol.parse("documents-16")
    windows_ = list(found.windows(100, T, starts))
    assert [t for w in windows_ for t in range(w.first, w.end)] == list(range(100))
    assert all(w.start == w.first and w.end - w.start <= 16 for w in windows_)
    assert {w.start for w in windows_} >= set(starts)
    assert len(windows_) == 1 + 4 + 1 + 2
    assert found.count(100, T) == 100


def test_a_protocol_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="'tail-64' scores 128 tokens of windows of 64"):
        Protocol.parse("tail-64")
    for length in (T - 1, 16 * T + 1):
        with pytest.raises(ValueError, match=f"from 8, .* to 128, .* not {length}"):
            windows(f"paired-{length}", 1000)
    with pytest.raises(ValueError, match="needs a block of 128 tokens, but the text has 127"):
        windows("paired-64", 127)
    for distance in (47, 16 * T + 1):
        with pytest.raises(ValueError, match=f"from 48, .* to 128, .* not {distance}"):
            windows(f"repeated-{distance}", 1000)
    with pytest.raises(ValueError, match="need two blocks of 128 tokens, but the text has 255"):
        windows("repeated-48", 255)


def model_of(corpus, attention, encoding, normalizer="rotated"):
    """A language model of one layer; its attention is built here, which is faster than a parser."""
    model = build(corpus, ONE_LAYER)[0].eval()
    kinds = {"attention_type": attention, "position_encoding": encoding, "normalizer": normalizer}
    module = MultiheadAttention(16, 2, causal=True, seed=1, **kinds).eval()
    model.decoder.layers[0].self_attn = module
    return model


def text_of(model, tokens):
    symbols = len(model.decoder.dictionary)
    return torch.randint(4, symbols, (tokens,), generator=torch.Generator().manual_seed(2))


def by_hand(model, text, found):
    """Losses in bits, a window at a time, from the model's whole output."""
    before = torch.cat([torch.tensor([2]), text[:-1]])
    losses = []
    for window in found:
        tokens = before[window.start : window.end][None]
        with torch.no_grad():
            log_probs = model(tokens)[0].float().log_softmax(-1)[0]
        own = log_probs.gather(1, text[window.start : window.end, None]).squeeze(1)
        losses.append(-own[window.first - window.start :] / math.log(2))
    return torch.cat(losses)


@pytest.mark.parametrize("attention", ["linear", "softmax"])
@pytest.mark.parametrize("name", ["blocks-24", "tail-24-5", "paired-64", "positions-50"])
def test_losses_are_those_of_the_model(corpus, attention, name, monkeypatch):
    monkeypatch.setattr(scoring, "TOKENS", {"cpu": 100})
    monkeypatch.setattr(scoring, "LOGITS", 300)  # a few tokens at a time
    model = model_of(corpus, attention, "lrpe-type2")
    text = text_of(model, 300)
    expected = by_hand(model, text, windows(name, 300))
    found = scoring.evaluate(model, text, 2, T, [name])[name]
    assert found["tokens"] == len(expected)
    assert found["loss"] == pytest.approx(expected.double().mean().item(), abs=1e-5)
    assert found["ppl"] == pytest.approx(2 ** found["loss"])


def test_sinusoidal_positions_extend_beyond_the_length_of_training(corpus):
    model = build(corpus, ONE_LAYER.replace("--no-token-positional-embeddings", ""))[0].eval()
    positions = model.decoder.embed_positions
    assert len(positions.weights) < 128 + 2
    found = scoring.evaluate(model, text_of(model, 130), 2, T, ["blocks-128"])
    assert found["blocks-128"]["tokens"] == 130
    assert len(positions.weights) == 128 + 2


def test_a_difference_is_in_nats_with_an_interval_over_blocks(caplog):
    bits = torch.tensor([1.0, 3.0, 2.0, 2.0, 6.0, 4.0]).double()
    found = scoring.differences(bits, 3)
    assert found["delta"] == pytest.approx(3 * math.log(2))
    assert found["delta_low"] == pytest.approx(2 * math.log(2))  # three times the least block
    assert 3 < found["delta_high"] / math.log(2) <= 5
    assert scoring.differences(bits, 3) == found
    assert "over 3 blocks only" in caplog.text


def test_a_difference_over_one_block_has_no_interval(caplog):
    assert scoring.differences(torch.full((6,), 2.0).double(), 1) == {"delta": 2 * math.log(2)}
    assert "delta has no interval" in caplog.text


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_documents_are_read_as_if_each_were_the_whole_text(corpus, attention):
    model = model_of(corpus, attention, "rope")
    text, ends = text_of(model, 90), [30, 37, 90]
    text[[end - 1 for end in ends]] = 2  # documents end with a line, a text begins after one
    parts = text.split([30, 7, 53])
    alone = [scoring.evaluate(model, part, 2, T, ["blocks-24"])["blocks-24"] for part in parts]
    found = scoring.evaluate(model, text, 2, T, ["documents-24"], [0, *ends[:-1]])["documents-24"]
    bits = [own["loss"] for own in alone]
    assert (found["tokens"], found["documents"]) == (90, 3)
    mean = sum(loss * own["tokens"] for loss, own in zip(bits, alone, strict=True)) / 90
    assert found["loss"] == pytest.approx(mean)
    assert found["document_ppl"] == pytest.approx(2 ** (sum(bits) / 3))


def test_losses_by_position_are_means_of_bins_with_their_counts():
    bits = torch.arange(40).double()
    found = scoring.by_position(bits, 20)
    first = [*range(16), *range(20, 36)]
    last = [16, 17, 18, 19, 36, 37, 38, 39]
    assert found["loss-16"] == sum(first) / 32
    assert found["loss-20"] == sum(last) / 8
    assert (found["tokens-16"], found["tokens-20"]) == (32, 8)


def test_blocks_of_a_model_with_a_memory_are_evaluated_with_the_task_that_carries_it(
    monkeypatch, tmp_path
):
    seen: list[list[str]] = []
    monkeypatch.setattr(lm, "read_evaluation", lambda *_: {})
    config = {"task.tokens_per_sample": T, "dataset.max_tokens": 64}
    config["task._name"] = "lrpe_truncated_bptt_lm"
    for protocol, task in (("blocks", config["task._name"]), ("sliding", lm.PLAIN_TASK)):
        given = (tmp_path / "best.pt", tmp_path, (("test", protocol),), config, tmp_path)
        lm.measure(*given, lambda words, log: seen.append(words))
        words = seen.pop()
        assert words[words.index("--task") + 1] == task


@pytest.mark.parametrize("kind", [LMRun, PretrainingRun])
def test_a_training_whose_batches_count_samples_is_evaluated_in_blocks(kind, tmp_path, monkeypatch):
    seen: list[list[str]] = []
    monkeypatch.setattr(lm, "read_evaluation", lambda *_: {})
    monkeypatch.setattr(lm, "read_validation", lambda *_: {})
    config = {LMRun: "wikitext2", PretrainingRun: "pretrain-small"}[kind]
    sizes = ("dataset.max_tokens=null", "dataset.batch_size=4", "task.tokens_per_sample=96")
    run = trial(tmp_path, kind, config=config, overrides=sizes)
    run.measure(lambda words, log: seen.append(words))
    for words in seen:
        assert words[words.index("--max-tokens") + 1] == "96"
    assert seen


def test_the_loss_holds_to_the_last_context_before_the_first_that_raises_it():
    def measured(*deltas):
        named = zip((64, 128, 256, 512), deltas, strict=True)
        return {"paired-32": {}, **{f"paired-{n}": {"delta": delta} for n, delta in named}}

    assert holds_to(measured(-0.02, 0, 0.05, 0.09), 512) == 512
    assert holds_to(measured(0.09, 0.11, 0.05, 0), 512) == 64  # a later fall does not count
    assert holds_to(measured(1, 1, 1, 1), 512) == 32
    assert holds_to({**measured(0, 0, 0, 0), "paired-256": {"diverged": 1.0}}, 512) == 128
    assert holds_to({"paired-32": {}}, 512) is None


def test_a_cell_of_holds_to_is_the_lowest_of_its_seeds_and_beyond_window_is_in_nats():
    table = load_named("extrapolation")
    row, holds, beyond = table.row("RoPE"), *map(table.column, ("linear-holds", "linear-beyond"))

    def run(seed, delta):
        paired = {f"paired-{n}": {"delta": delta if n > 256 else 0.0} for n in (256, 512, 1024)}
        long = {"paired-2048": {"loss": 6.0, "delta": 0.0}, "truncated-2048": {"loss": 5.0}}
        metrics = {"test": {"paired-128": {"loss": 6.0}, **paired, **long}}
        config = {**table.options, "optimization.lr": [0.004]}
        names = {"experiment": "extrapolation", "position_encoding": "rope", "seed": seed}
        return make_run(**names, metrics=metrics, config=config)

    sheet = Sheet(table, "small", "", {"a": run(1, 0.0), "b": run(2, 0.2)})
    assert sheet.scores(row, holds) == {1: 256, 2: 256}
    found = sheet.scores(row, beyond)
    assert found == pytest.approx({1: -math.log(2), 2: -math.log(2)})


LIMITED = ("rope", "lrpe-type4", "permuteformer", "alibi", "fox", "gated:lrpe-type2", "lrpe-type8")
SCORED = ("t5", "cope", "stick-breaking", "kerple-log", "transformer-xl", "shaw", "cape-alibi")


@pytest.mark.parametrize(
    ("attention", "name", "normalizer"),
    [
        *(("linear", name, "rotated") for name in LIMITED),
        *(("linear", "rope", other) for other in ("content", "layernorm")),
        *(("softmax", name, "rotated") for name in (*LIMITED, *SCORED)),
    ],
)
def test_truncated_attention_of_one_layer_is_that_of_a_window_for_every_token(
    corpus, attention, name, normalizer
):
    model = model_of(corpus, attention, name, normalizer)
    text = text_of(model, 16 * T)
    last = range(15 * T, 16 * T)
    each = [Window(max(0, t + 1 - T), t + 1, t) for t in last]
    expected = by_hand(model, text, each).double().mean().item()
    found = scoring.evaluate(model, text, 2, T, ["truncated-128", "truncated-8", "paired-8"])
    assert found["truncated-128"]["loss"] == pytest.approx(expected, abs=2e-5)
    assert found["truncated-8"]["loss"] == pytest.approx(found["paired-8"]["loss"], abs=2e-5)
    assert all(m.given.window is None for m in attentions(model))


@pytest.mark.parametrize(
    ("attention", "name", "more"),
    [
        ("linear", "lrpe-type4", 0),
        ("softmax", "stick-breaking", 0),
        ("softmax", "rope --attention-parts kv-shift", 1),
        ("softmax", "path:rope", 1),
        ("softmax", "selective:rope", 2),
    ],
)
def test_layers_with_a_window_reach_as_far_as_their_windows_together(corpus, attention, name, more):
    options = f"--attention-type {attention} --position-encoding {name} --encoding-seed 1"
    layers = ONE_LAYER.replace("--decoder-layers 1", "--decoder-layers 3")
    model = build(corpus, f"{layers} {options}")[0].eval().double()
    for module in attentions(model):
        module.given.window = 4
        for parameter in module.encoding.parameters():  # what starts near zero reads little
            parameter.data += torch.randn(parameter.shape, generator=torch.Generator())
    text, reach = text_of(model, 40)[None], 3 * (3 + more)
    assert scoring.reach_of(model, 4) == reach
    with torch.no_grad():
        whole, all_seen, one_lost = (
            model(text[:, -tokens:])[0][0, -1] for tokens in (40, reach + 1, reach)
        )
    torch.testing.assert_close(all_seen, whole, rtol=1e-11, atol=1e-11)
    assert (one_lost - whole).abs().max() > 1e-7


@pytest.mark.parametrize("scaling", ["dynamic", "longrope"])
def test_windows_are_whole_where_angles_depend_on_the_length_of_the_text(corpus, scaling):
    options = f"--position-encoding rope --context-scaling {scaling} --context-length {T}"
    more = {"dynamic": "--context-factor 4", "longrope": "--longrope-factors 2,2,2,2,3,3,3,3"}
    command = f"{ONE_LAYER} --attention-type softmax {options} {more[scaling]}"
    model = build(corpus, command)[0].eval()
    assert scoring.reach_of(model, T) == sys.maxsize


@pytest.mark.parametrize("name", ["fire", "cape-fire", "spe"])
def test_windows_are_whole_where_a_score_depends_on_more_than_the_lag(corpus, name):
    assert scoring.reach_of(model_of(corpus, "softmax", name), T) == sys.maxsize


def attentions(model):
    return (m for m in model.modules() if isinstance(m, MultiheadAttention))


@pytest.mark.parametrize("name", ["rope", "lrpe-type8", "permuteformer", "fox", "cosformer"])
def test_denominators_are_the_sums_of_all_scores(name):
    torch.manual_seed(1)
    options = {"attention_type": "linear", "position_encoding": name, "causal": True}
    module = MultiheadAttention(16, 2, **options).eval().double()
    x = torch.randn(2, 9, 16).double()
    values = module._project(x)[2]
    found = module.denominators(x)
    module.normalizer = "none"
    numerator = module._linear(x, tokens_of(x), None, False)[0]
    module.normalizer = "rotated"
    divided = module._linear(x, tokens_of(x), None, False)[0]
    assert found.shape == values.shape[:3]
    assert torch.allclose(numerator / found.clamp_min(EPS).unsqueeze(-1), divided)


def test_the_fraction_of_clamped_denominators_is_counted_by_position(corpus, monkeypatch):
    model = model_of(corpus, "linear", "rope")

    def denominators(module, x):
        first = torch.arange(x.shape[1]) < 20  # the first 20 positions of a block are clamped
        return torch.where(first, 0.0, 1.0).expand(x.shape[0], 2, -1)

    monkeypatch.setattr(MultiheadAttention, "denominators", denominators)
    found = scoring.evaluate(model, text_of(model, 128), 2, T, ["positions-64"])["positions-64"]
    assert found["clamped-16"] == 1
    assert found["clamped-32"] == 4 / 16
    assert found["clamped-64"] == 0
    assert not model.decoder.layers[0].self_attn._forward_pre_hooks
    softmax = model_of(corpus, "softmax", "rope")
    found = scoring.evaluate(softmax, text_of(softmax, 128), 2, T, ["positions-64"])
    assert not any(key.startswith("clamped") for key in found["positions-64"])


def test_an_evaluation_that_lost_tokens_is_refused(corpus, tmp_path, monkeypatch):
    model = model_of(corpus, "linear", "none")
    whole = Protocol.windows
    monkeypatch.setattr(Protocol, "windows", lambda *given: list(whole(*given))[1:])
    with pytest.raises(ValueError, match="76 tokens of 100 were scored"):
        scoring.evaluate(model, text_of(model, 100), 2, T, ["blocks-24"])
    counts = {"splits": {"test": {"tokens": 1000}}}
    (tmp_path / "manifest.json").write_text(json.dumps(counts))
    out = tmp_path / "eval-best-test-lengths.json"

    def run(words, log):
        out.write_text(json.dumps({name: {"loss": 1.0, "tokens": 900} for name in words[7:-2]}))

    best, options = tmp_path / "best.pt", {"task.tokens_per_sample": T}
    for name, expected in (("blocks-64", 1000), ("paired-64", 7 * T)):
        with pytest.raises(RunFailed, match=f"900 of {expected} tokens were evaluated"):
            lm.measure(best, tmp_path, (("test", name),), options, tmp_path, run)


def test_learned_positions_beyond_their_length_and_scaling_without_rotations_are_refused():
    wanted = [Protocol.parse(name) for name in ("blocks-256", "paired-512")]
    rope = {"model.position_encoding": "rope"}
    without = "model.no_token_positional_embeddings"
    learned = {**rope, "model.decoder_learned_pos": True, without: False}
    for refused in (wanted, [Protocol.parse("repeated-256")]):
        with pytest.raises(UserError, match="none beyond the 256 tokens of its training, so it "):
            lm.require_positions(learned, 256, refused)
    lm.require_positions(learned, 512, wanted)
    lm.require_positions({**learned, without: True}, 256, wanted)
    lm.require_positions({**rope, "model.decoder_learned_pos": False}, 256, wanted)
    wanted = [Protocol.parse("blocks"), Protocol.parse("blocks+ntk-4")]
    with pytest.raises(UserError, match="encoding fox, none has no rotations to scale"):
        lm.require_positions({"model.position_encoding": "fox,none"}, 256, wanted)
    lm.require_positions({"model.position_encoding": "fox,rope"}, 256, wanted)


def test_paired_protocols_may_count_other_tokens_than_the_whole_split():
    def run(**counts):
        measured = {name.replace("_", "-"): {"ppl": 9.0, "tokens": n} for name, n in counts.items()}
        return a_record(metrics={"test": measured}, protocol=dict.fromkeys(measured, "One."))

    validate(run(blocks_64=1000, tail_64_8=1000, paired_64=64, truncated_64=64, repeated_48=96))
    for bad in (
        {"blocks_64": 1000, "tail_64_8": 999},
        {"paired_64": 64, "truncated_128": 65},
        {"repeated_48": 48, "repeated_64": 96},
    ):
        with pytest.raises(ValueError, match="counts different tokens"):
            validate(run(**bad))


FIRST = ("blocks", f"blocks-{T}", "paired-8", "paired-128", "truncated-128", "positions-64")
MORE = ("tail-64-64", "blocks-64", "sliding", f"tail-{T}-{T // 2}", "documents-16")


def of_test(names):
    return tuple(("test", name) for name in names)


def tiny_run(corpus, folder):
    """A run of four updates on the tiny corpus, with the evaluations FIRST."""
    data = folder / "data"
    data.mkdir()
    (data / "bin").symlink_to(corpus.data)
    (data / "documents").mkdir()
    (data / "documents" / "test.tsv").write_text("1\tone\n20\tanother\n")
    splits = {"test": {"tokens": corpus.token_count("test")}}
    about = {"corpus": "toy", "level": "word", "splits": splits}
    (data / "manifest.json").write_text(json.dumps(about))
    chosen = (
        f"task.tokens_per_sample={T} dataset.max_tokens=64 model.decoder_layers=1 "
        "optimization.max_update=4 checkpoint.save_interval_updates=2 common.log_interval=1 "
        "lr_scheduler.lr_period_updates=4 lr_scheduler.warmup_updates=0"
    )
    given = {"config": "extrapolation", "position_encoding": "lrpe-type2"}
    evaluations = of_test(FIRST)
    return trial(folder, **given, overrides=tuple(chosen.split()), evaluations=evaluations)


def check_by_hand(run, found, out):
    """The command gives the values ``found`` of the run, and others under context scaling."""
    checkpoint = run.checkpoints / "checkpoint_best.pt"
    names = ["--protocols", "tail-64-64", "paired-128"]
    words = [str(checkpoint), str(run.data), "--splits", "test", *names, "--out", str(out)]
    assert eval_lm.main(words) == 0
    plain, run_blocks = {name: found[name] for name in names[1:]}, found["blocks"]
    assert read_run(out)["metrics"]["test"] == plain

    names[1:] = ["blocks", f"blocks-{T}", "paired-128"]
    scale = ["--context-scaling", "yarn", "--context-factor", "2.5"]
    assert eval_lm.main([*words[:4], *names, *scale, *words[-2:]]) == 0
    scaled = read_run(out)["metrics"]["test"]
    assert {name: scaled.pop(name) for name in plain} == plain
    assert scaled.keys() == {f"{name}+yarn-2.5" for name in names[1:]}
    blocks, same, _ = scaled.values()
    assert blocks["loss"] == pytest.approx(same["loss"], abs=1e-4)
    assert scaled["paired-128+yarn-2.5"]["loss"] != plain["paired-128"]["loss"]

    trained = checkpoints.options(checkpoints.require_model(checkpoint, "lrpe_lm"))
    heads = trained["model.decoder_attention_heads"]
    pairs = trained["model.decoder_embed_dim"] // heads // 2
    lists = {"short_factor": [1.0] * pairs, "long_factor": [4.0] * pairs}
    file = out.with_name("config.json")
    file.write_text(json.dumps({"rope_scaling": lists}))
    losses = {}
    for name, factor, more in [
        ("dynamic", "1", []),
        ("longrope", "1", ["--longrope-factors", str(file)]),
        ("linear", "4", []),
    ]:
        scale = ["--context-scaling", name, "--context-factor", factor, *more]
        words = [str(checkpoint), str(run.data), "--splits", "test", "--out", str(out)]
        assert eval_lm.main([*words, "--protocols", "blocks", "paired-128", *scale]) == 0
        found = read_run(out)["metrics"]["test"]
        losses[name] = [found[f"{p}+{name}-{factor}"]["loss"] for p in ("blocks", "paired-128")]
    same = run_blocks["loss"]
    assert losses["dynamic"][0] == losses["longrope"][0] == pytest.approx(same, abs=1e-4)
    assert losses["longrope"][1] == pytest.approx(losses["linear"][1], rel=1e-6)
    assert losses["dynamic"][1] != plain["paired-128"]["loss"]


@pytest.mark.end_to_end
def test_a_run_is_trained_resumed_evaluated_at_other_lengths_and_again_later(
    corpus, tmp_path, monkeypatch
):
    monkeypatch.setattr(eval_lm, "Children", ForkedChildren)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as this process: rounding depends on it
    run, tokens = tiny_run(corpus, tmp_path), corpus.token_count("test")
    children, events = ForkedChildren(), schedule.Events(tmp_path / "events.log")
    half = (word.replace("max_update=4", "max_update=2") for word in run.overrides)
    run.folder.mkdir()
    with processes.locked(run.folder) as lock:
        replace(run, overrides=tuple(half)).train(children, Devices(), lock, pytest.fail)
    assert run.progress() == (2, 4)
    assert schedule.Schedule([run], schedule.shares(1), events, children).run() == 0
    assert "resumed at 2" in (tmp_path / "events.log").read_text()
    record = read_run(run.result)
    assert (record["dataset"], record["commit"]) == ("toy-word", commit())
    assert record["config"]["optimization.max_update"] == 4
    assert [point["updates"] for point in record["curve"]] == [2, 4]
    assert set(record["data"]) == {"train", "valid", "test", "dictionary"}
    found = record["metrics"]["test"]
    assert list(found) == sorted(FIRST)
    assert found[f"blocks-{T}"]["loss"] == pytest.approx(found["blocks"]["loss"], abs=1e-4)
    assert found["paired-128"]["tokens"] == tokens // 128 * T
    assert "clamped-64" in found["positions-64"]

    later = replace(run, evaluations=of_test((*FIRST, *MORE)))
    log = run.log.read_text()
    assert schedule.Schedule([later], schedule.shares(1), events, children).run() == 0
    again = read_run(run.result)
    assert run.log.read_text() == log  # nothing was trained
    assert set(again["evaluated_later"]) == {f"test.{name}" for name in MORE}
    found = again["metrics"]["test"]
    assert found["tail-64-64"]["loss"] == found["blocks-64"]["loss"]
    assert found["documents-16"]["documents"] == 2
    assert found["sliding"]["loss"] == pytest.approx(found["tail-8-4"]["loss"], abs=1e-4)
    whole = {name for name in found if "-128" not in name and name != "paired-8"}
    assert {found[name]["tokens"] for name in whole} == {tokens}

    check_by_hand(run, found, tmp_path / "by-hand.json")
