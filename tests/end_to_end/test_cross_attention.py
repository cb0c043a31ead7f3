"""Cross-attention of ``lrpe_transformer``: the ``--cross-*`` options, positions and generation."""

import pytest
import torch
from fairseq.modules import MultiheadAttention as Stock
from omegaconf import OmegaConf, open_dict

from lrpe_fairseq.attention.cross import CrossAttention
from lrpe_fairseq.encodings.core.protocols import Encoding
from lrpe_fairseq.models import translation
from tests.end_to_end.commands import PLUGIN, built, load, save

pytestmark = pytest.mark.end_to_end

SMALL = (
    f"--user-dir {PLUGIN} --task translation -s en -t de --cpu --optimizer adam --max-tokens 128 "
    "--arch lrpe_transformer_tiny --dropout 0 --encoder-layers 1 --decoder-layers 2 "
    "--encoder-embed-dim 16 --decoder-embed-dim 32 --encoder-ffn-embed-dim 16 "
    "--decoder-ffn-embed-dim 16 --encoder-attention-heads 2 --decoder-attention-heads 4"
)
ALIKE = (
    "--encoder-embed-dim 16 --decoder-embed-dim 16 --encoder-attention-heads 2 "
    "--decoder-attention-heads 2"
)
CROSS = "--cross-position-encoding"
APE = (
    f"{ALIKE} --no-token-positional-embeddings --encoder-position-encoding ape {CROSS} ape "
    "--decoder-position-encoding ape"
)


def model_of(pairs, *options):
    return built(pairs, SMALL, *options)[0].eval()


def batch(rows=3):
    """Sources with padding on the left, targets with padding on the right."""
    generator = torch.Generator().manual_seed(0)
    source, target = (torch.randint(4, 20, (rows, n), generator=generator) for n in (7, 6))
    source[0, :3], target[0, 4:], target[:, 0] = 1, 1, 2
    lengths = source.ne(1).sum(1)
    return {"src_tokens": source, "src_lengths": lengths, "prev_output_tokens": target}


def cross_of(model):
    return [layer.encoder_attn for layer in model.decoder.layers]


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ("", Stock),
        (f"{CROSS} rope", CrossAttention),
        ("--cross-kv-heads 4", CrossAttention),
        ("--cross-attention-type linear", CrossAttention),
    ],
)
def test_cross_attention_is_stock_by_default_and_starts_from_its_weights(pairs, options, kind):
    model, stock = model_of(pairs, options), model_of(pairs)
    assert all(type(attention) is kind for attention in cross_of(model))
    assert model.state_dict().keys() == stock.state_dict().keys()
    for name, weight in stock.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name


@pytest.mark.parametrize("widths", [(32, 32), (32, 16)])
def test_without_an_encoding_ours_is_stock(widths):
    width, source = widths
    ours = CrossAttention(
        width, 4, memory_dim=source, attention_type="softmax", position_encoding="none"
    )
    stock = Stock(width, 4, kdim=source, vdim=source, encoder_decoder_attention=True)
    stock.load_state_dict(ours.state_dict())
    ours.eval(), stock.eval()
    x, memory = torch.randn(5, 3, width), torch.randn(7, 3, source)
    padding = torch.zeros(3, 7).bool()
    padding[0, :3], padding[1, 5:] = True, True
    states: tuple[dict, dict] = {}, {}
    for needs in ({"need_weights": True}, {"need_head_weights": True}, {"need_weights": False}):
        given = {"key_padding_mask": padding, "static_kv": True, **needs}
        wanted, weights = stock(x, memory, memory, **given)
        found, own = ours(x, memory, memory, **given)
        torch.testing.assert_close(found, wanted)
        assert (own is None) == (weights is None)
        if weights is not None:
            torch.testing.assert_close(own, weights)
        for step in range(5):
            both = (
                module(x[step : step + 1], memory, memory, incremental_state=state, **given)
                for module, state in zip((stock, ours), states, strict=True)
            )
            torch.testing.assert_close(*(out for out, _ in both))


def test_a_checkpoint_from_before_the_options_has_stock_cross_attention(pairs, tmp_path):
    model, _, config = built(pairs, SMALL)
    with open_dict(config.model):
        del config.model["cross"]
    save(model, config, tmp_path / "old.pt")
    old, _, _ = load(tmp_path / "old.pt")
    with torch.no_grad():
        assert torch.equal(old(**batch())[0], model.eval()(**batch())[0])


def test_softmax_gives_the_alignment_and_linear_refuses_to(pairs):
    asked = OmegaConf.create({"generation": {"print_alignment": "hard", "replace_unk": None}})
    with torch.no_grad():
        softmax, linear = (
            model_of(pairs, f"{CROSS} ape --cross-attention-type {kind}")
            for kind in ("softmax", "linear")
        )
        softmax.prepare_for_inference_(asked)
        attention = softmax(**batch())[1]["attn"][0]
        assert linear(**batch())[1]["attn"] == [None]
    assert attention.shape == (3, 6, 7)
    torch.testing.assert_close(attention.sum(-1), torch.ones(3, 6))
    assert attention[0, :, :3].count_nonzero() == 0
    for option in ("print_alignment", "replace_unk"):
        given = {"print_alignment": None, "replace_unk": None, option: "hard"}
        with pytest.raises(SystemExit, match="need the weights of cross-attention"):
            linear.prepare_for_inference_(OmegaConf.create({"generation": given}))


def test_beam_search_keeps_the_positions_of_the_source(pairs):
    model, given = model_of(pairs, f"{CROSS} rope"), batch()
    nodes = torch.arange(21).view(3, 7) * 5
    source = {key: given[key] for key in ("src_tokens", "src_lengths")}
    order = torch.tensor([2, 0, 0])
    with torch.no_grad():
        encoded = model.encoder(**source, positions=nodes)
        reordered = model.encoder.reorder_encoder_out(encoded, order)
        target = given["prev_output_tokens"]
        found = model.decoder(target[order], encoder_out=reordered)[0]
        wanted = model.decoder(target, encoder_out=encoded)[0][order]
        counted = model.decoder(target, encoder_out={**encoded, "positions": []})[0][order]
    torch.testing.assert_close(found, wanted)
    assert not torch.allclose(counted, wanted, atol=1e-4)


def generators(model):
    return [p for name, p in model.named_parameters() if name.endswith("generator.entries")]


def test_encoder_decoder_and_cross_attention_share_one_generator_and_its_gradient(
    pairs, monkeypatch
):
    model = model_of(pairs, APE).double()
    with monkeypatch.context() as patched:
        for name in ("share_across_layers", "share_across_stacks"):
            patched.setattr(translation, name, lambda stack: None)
        apart = model_of(pairs, APE).double()
    assert sum(isinstance(m, Encoding) for m in model.modules()) == 5
    assert (len(generators(model)), len(generators(apart))) == (1, 5)
    for one in (model, apart):
        one(**batch())[0].square().sum().backward()
    total = sum(p.grad for p in generators(apart))
    torch.testing.assert_close(generators(model)[0].grad, total)
    twin = model_of(pairs, APE).double()
    generators(model)[0].data += 0.1
    twin.load_state_dict(model.state_dict())
    assert len(generators(twin)) == 1
    with torch.no_grad():
        assert torch.equal(twin(**batch())[0], model(**batch())[0])


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_activation_checkpointing_has_the_gradients_of_every_pass(pairs, attention):
    found = []
    nodes = {"src_positions": torch.arange(21).view(3, 7) * 2}
    nodes["prev_output_positions"] = torch.arange(18).view(3, 6)
    others = {name: 3 * at for name, at in nodes.items()}
    for more in ("", "--checkpoint-activations"):
        model = model_of(pairs, APE, f"--cross-attention-type {attention}", more).train()
        passes = [model(**batch(), **at)[0] for at in (nodes, others, {})]
        sum(out.square().sum() for out in passes).backward()
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("more", ["", "--share-all-embeddings"])
def test_the_departure_of_unit_embeddings_changes_their_scale_and_nothing_else(pairs, more):
    named = " ".join(f"--{side}-fidelity ape-unit-embeddings" for side in ("encoder", "decoder"))
    plain, wide = (model_of(pairs, ALIKE, more, options) for options in ("", named))
    published = model_of(pairs, ALIKE, more, named.replace("ape-unit-embeddings", "published"))
    tables = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    tied = (*tables, "decoder.output_projection.weight") if more else tables
    for name, weight in plain.state_dict().items():
        factor = 4.0 if name in tied else 1.0  # the root of the width
        assert torch.equal(wide.state_dict()[name], factor * weight), name
        assert name not in tied or torch.equal(published.state_dict()[name], weight)
