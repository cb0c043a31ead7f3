"""Stacks whose layers differ in attention, encoding, normalizer and window."""

import logging

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lrpe_fairseq.attention.parts import PARTS
from lrpe_fairseq.errors import Refusal
from lrpe_fairseq.models import attention
from lrpe_fairseq.models.resumption import check_resumed
from tests.end_to_end.commands import SMALL, build, built, load, run_here, save
from tests.end_to_end.test_fairseq_features import PAIRS, overridden

pytestmark = pytest.mark.end_to_end

BARE = f"{SMALL} --decoder-layers 4 --no-token-positional-embeddings"
STACK = (
    f"{BARE} --attention-type linear,linear,softmax --position-encoding fox,lrpe-type2,rope,none "
    "--attention-normalizer rotated,content --attention-window 0,3,4"
)
KINDS = [("linear", "fox"), ("linear", "lrpe-type2"), ("softmax", "rope"), ("linear", "none")]
"""The four layers of STACK; the last one begins the pattern of attention types again."""


def text(length=13):
    """Tokens (2, T)."""
    return torch.randint(4, 20, (2, length), generator=torch.Generator().manual_seed(1))


def layers_of(model):
    return [layer.self_attn for layer in model.decoder.layers]


def test_every_layer_has_its_own_attention_and_the_log_says_which(corpus, caplog):
    caplog.set_level(logging.INFO, attention.__name__)
    found = layers_of(build(corpus, STACK)[0])
    assert [(own.attention_type, own.encoding.name) for own in found] == KINDS
    assert [own.normalizer for own in found] == ["rotated", "content"] * 2
    assert [own.window for own in found] == [None, 3, 4, None]
    said = [record.getMessage() for record in caplog.records if record.name == attention.__name__]
    assert said == [
        "attention-type linear,linear,softmax of 4 layers: linear, linear, softmax, linear",
        "attention-window 0,3,4 of 4 layers: 0, 3, 4, 0",
    ]


def test_a_mixed_stack_is_its_layers_alone(corpus):
    model = build(corpus, f"{BARE} --attention-type linear,softmax --position-encoding fox,rope")[0]
    model, tokens = model.double().eval(), text()
    x = model.decoder.embed_scale * model.decoder.embed_tokens(tokens).transpose(0, 1)
    for place, (kind, name) in enumerate([("linear", "fox"), ("softmax", "rope")] * 2):
        pure = build(corpus, f"{BARE} --attention-type {kind} --position-encoding {name}")[0]
        layer = pure.double().eval().decoder.layers[place]
        layer.load_state_dict(model.decoder.layers[place].state_dict())
        x = layer(x)[0]
    x = model.decoder.layer_norm(x).transpose(0, 1)
    assert torch.equal(model.decoder.output_layer(x), model(tokens)[0])


def test_only_the_first_layer_copies_its_input(corpus):
    """Embeddings lie in memory as (B, T, C), and fairseq's layers read (T, B, C)."""
    copies = []
    for layers in (1, 3):
        options = f"--decoder-layers {layers} --attention-type linear --position-encoding rope"
        model, tokens = build(corpus, f"{SMALL} {options}")[0], text()
        with profile(activities=[ProfilerActivity.CPU]) as found:
            model(tokens)[0].sum().backward()
        copies.append(sum(event.name == "aten::clone" for event in found.events()))
    assert copies[0] == copies[1]


def test_context_scaling_concerns_the_layers_with_rotations(corpus):
    scaling = "--context-scaling ntk --context-factor 4"
    found = [
        own.encoding.spec.options.values for own in layers_of(build(corpus, STACK, scaling)[0])
    ]
    assert [own["context_scaling"] for own in found] == ["none", "ntk", "ntk", "none"]
    for name in ("fox", "fox,none"):
        with pytest.raises(Refusal, match="'fox' does not support --context-scaling"):
            build(corpus, BARE, f"--position-encoding {name}", scaling)


YARN = "--position-encoding rope --context-scaling yarn --context-factor 4 --context-length 8"


def test_a_checkpoint_with_yarn_says_that_the_name_has_another_meaning_now(
    corpus, tmp_path, caplog
):
    model, _, config = build(corpus, BARE, YARN)
    path = save(model, config, tmp_path / "checkpoint.pt")
    load(path)
    assert f"{path} has context_scaling=yarn, which is the ramp of the authors' code" in caplog.text
    assert "load it with context_scaling=yarn-printed" in caplog.text
    caplog.clear()
    printed = overridden(path, context_scaling="yarn-printed")
    assert layers_of(printed)[0].encoding.core.options.context_scaling == "yarn-printed"
    model, _, config = build(corpus, BARE, YARN.replace("yarn", "ntk"))
    path = save(model, config, tmp_path / "other.pt")
    load(path)
    overridden(path, context_scaling="yarn")  # says nothing about the checkpoint
    assert "yarn" not in caplog.text


def test_a_training_with_yarn_of_before_goes_on_under_its_present_name(corpus):
    names = "yarn", "yarn-printed", "ntk"
    found = [build(corpus, BARE, YARN.replace("yarn", name)) for name in names]
    before, printed, other = (config for _, _, config in found)
    check_resumed("last.pt", before, before)
    check_resumed("last.pt", before, printed)
    with pytest.raises(Refusal, match="was trained with context_scaling=yarn; this training has"):
        check_resumed("last.pt", before, other)
    with pytest.raises(Refusal, match="was trained with context_scaling=yarn-printed"):
        check_resumed("last.pt", printed, before)


@pytest.mark.parametrize("kind", ["linear", "softmax"])
def test_a_window_in_training_is_that_of_the_evaluation(corpus, kind):
    attention = f"{BARE} --attention-type {kind} --position-encoding rope"
    own, plain = (build(corpus, f"{attention} {o}")[0] for o in ("--attention-window 4", ""))
    results = []
    for model in (own, plain):
        plain.decoder.given.window = 4
        torch.manual_seed(2)  # of dropout
        out = model(text())[0]
        results.append([out, *torch.autograd.grad(out.logsumexp(-1).sum(), model.parameters())])
    assert all(map(torch.equal, *results))
    plain.decoder.given.window = None
    torch.manual_seed(2)
    assert not torch.allclose(results[0][0], plain(text())[0])


def decoded(decoder, tokens, **given):
    """Logits of tokens (B, T) read one by one, the beams reordered in between."""
    state, parts = {}, []
    for length in range(1, tokens.shape[1] + 1):
        if length in (6, 10):
            decoder.reorder_incremental_state_scripting(state, torch.tensor([1, 0]))
            tokens, parts = tokens.flip(0), [part.flip(0) for part in parts]
        parts.append(decoder(tokens[:, :length], incremental_state=state, **given)[0])
    return torch.cat(parts, 1)


@pytest.mark.parametrize("parts", ["none", ",".join(PARTS)])
def test_decoding_a_mixed_stack_with_windows_equals_the_whole_text(corpus, parts):
    model = build(corpus, STACK, f"--attention-parts {parts}")[0].double().eval()
    with torch.no_grad():
        found = decoded(model.decoder, text())
        torch.testing.assert_close(found, model(text())[0], rtol=1e-9, atol=1e-9)


def test_an_encoder_a_decoder_and_cross_attention_have_their_own_patterns(pairs):
    model = built(
        pairs,
        PAIRS,
        "--encoder-attention-type softmax,linear --encoder-position-encoding t5,lrpe-type2",
        "--decoder-attention-type linear,softmax --decoder-attention-window 0,4",
        "--cross-position-encoding none,rope",
        f"--encoder-attention-parts {','.join(PARTS)} --decoder-attention-parts kv-shift",
    )[0]
    model, source, lengths = model.double().eval(), text(7), torch.tensor([7, 7])
    assert [layer.self_attn.encoding.name for layer in model.encoder.layers] == ["t5", "lrpe-type2"]
    cross = [type(layer.encoder_attn).__module__ for layer in model.decoder.layers]
    assert [name.partition(".")[0] for name in cross] == ["fairseq", "lrpe_fairseq"]
    with torch.no_grad():
        encoded = model.encoder(source, lengths)
        whole = model.decoder(text(), encoder_out=encoded)[0]
        one_row = text()[:1].expand(2, -1)  # beams of one source
        encoded = model.encoder(source[:1].expand(2, -1), lengths)
        found = decoded(model.decoder, one_row, encoder_out=encoded)
    torch.testing.assert_close(found[0], whole[0], rtol=1e-9, atol=1e-9)


@pytest.fixture(scope="module")
def checkpoint(corpus, tmp_path_factory):
    model, _, config = build(corpus, STACK)
    return save(model, config, tmp_path_factory.mktemp("stack") / "checkpoint.pt")


def test_a_checkpoint_keeps_its_patterns_and_an_override_changes_them(corpus, checkpoint):
    model = build(corpus, STACK)[0].eval()
    assert torch.equal(overridden(checkpoint).eval()(text())[0], model(text())[0])
    assert [own.window for own in layers_of(overridden(checkpoint, attention_window=5))] == [5] * 4
    written = run_here(
        "fairseq_cli.generate", corpus.data, "--task language_modeling --cpu --beam 3",
        "--sample-break-mode eos --max-len-b 20 --path", checkpoint,
        "--model-overrides \"{'attention_window':'2,6'}\"",
    )  # fmt: skip
    assert "\nH-0\t" in written


def test_a_pruned_stack_keeps_the_attention_of_its_layers(checkpoint):
    found = layers_of(overridden(checkpoint, decoder_layers_to_keep="0,2,3"))
    kept = [KINDS[0], *KINDS[2:]]
    assert [(own.attention_type, own.encoding.name) for own in found] == kept
    assert [own.window for own in found] == [None, 4, None]
