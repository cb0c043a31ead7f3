"""TAPE: states that layers hand on, compared with the equations written out."""

import pytest
import torch
from torch.nn import functional as F

from lrpe_fairseq.encodings import EncodingSpec, build_encoding
from lrpe_fairseq.encodings.core.options import EncodingOptions
from lrpe_fairseq.encodings.rotations.tape import DIAGONAL, StateUpdate
from lrpe_fairseq.errors import ChoiceError, Refusal
from tests.end_to_end.commands import SMALL, build
from tests.test_classifier import batch_of, rows_of
from tests.test_classifier import model_of as classifier_of

pytestmark = pytest.mark.end_to_end

BARE = f"{SMALL} --attention-type softmax --decoder-layers 3 --no-token-positional-embeddings"


def text(length=13):
    """Tokens (2, T)."""
    return torch.randint(4, 20, (2, length), generator=torch.Generator().manual_seed(1))


def model_of(corpus, *options, name="tape", live=0.3):
    """A float64 model whose updates have weights of size ``live``."""
    model = build(corpus, BARE, f"--position-encoding {name}", *options)[0].double().eval()
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if ".update." in name and live:
            parameter.data.normal_().mul_(live)
    return model


def layer_by_definition(layer, x, e, seen):
    """Return x (B, T, C) and e (B, H, T, D/2), complex, after a layer; seen: bool (T, T)."""
    own = layer.self_attn
    heads, width = own.num_heads, own.head_dim

    def split(y):
        return y.unflatten(-1, (heads, width)).transpose(1, 2)

    h = layer.self_attn_layer_norm(x)
    q, k, v = (split(p(h)) for p in (own.q_proj, own.k_proj, own.v_proj))
    q, k = (torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous()) * e for y in (q, k))
    scores = (q @ k.mH).real / width**0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    x = x + own.out_proj((weights @ v).transpose(1, 2).flatten(2))
    y = layer.fc2(F.relu(layer.fc1(layer.final_layer_norm(x))))
    if own.update is not None:
        mix, up, gate, down = (p.to(e) for p in own.update.parameters())
        m = weights.to(e) @ e
        e = e + torch.einsum("gh,bhtd->bgtd", mix, m)
        gates = F.silu(y @ gate.real.T).mT.unsqueeze(-1)
        e = e + torch.einsum("hn,bntd->bhtd", down, gates * torch.einsum("nh,bhtd->bntd", up, e))
    return x + y, e


def test_the_layers_are_the_equations(corpus):
    model, tokens = model_of(corpus, "--decoder-normalize-before"), text()
    decoder, spec = model.decoder, model.decoder.layers[0].self_attn.encoding.spec
    x = decoder.embed_scale * decoder.embed_tokens(tokens)
    theta = 10000.0 ** (-torch.arange(0, spec.head_dim, 2).double() / spec.head_dim)
    angles = torch.arange(tokens.shape[1]).double()[:, None] * theta
    e = torch.polar(torch.ones_like(angles), angles).expand(2, spec.num_heads, -1, -1)
    seen = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
    for layer in decoder.layers:
        with torch.no_grad():  # hooks would read states of no pass
            hooks, layer.fc2._forward_hooks = layer.fc2._forward_hooks, {}
            x, e = layer_by_definition(layer, x, e, seen)
            layer.fc2._forward_hooks = hooks
    wanted = decoder.output_layer(decoder.layer_norm(x))
    torch.testing.assert_close(model(tokens)[0], wanted, rtol=1e-12, atol=1e-12)


def test_the_start_is_rope_and_the_maps_that_are_0_learn(corpus):
    model, plain = model_of(corpus, live=0.0), model_of(corpus, name="rope")
    plain.load_state_dict(model.state_dict(), strict=False)
    out, tokens = model(text())[0], text()
    torch.testing.assert_close(out, plain(tokens)[0], rtol=1e-12, atol=1e-12)
    updates = [layer.self_attn.update for layer in model.decoder.layers]
    assert updates[-1] is None
    out.square().sum().backward()
    for update in updates[:-1]:
        assert update.mix.grad.abs().max() > 0
        assert update.up.grad is not None
    model = model_of(corpus)
    model(tokens)[0].square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_shift_of_all_positions_changes_nothing(corpus):
    model, tokens = model_of(corpus), text()
    at = torch.arange(tokens.shape[1])
    out, far = (model.decoder(tokens, positions=at + shift)[0] for shift in (0, 1000))
    assert (out - model_of(corpus, live=0.0)(tokens)[0]).abs().max() > 1e-3
    torch.testing.assert_close(far, out, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("window", [0, 4])
def test_decoding_with_reordered_rows_is_one_pass(corpus, window):
    model, tokens = model_of(corpus, f"--attention-window {window}"), text()
    tokens[:, :5] = tokens[:1, :5]
    state, parts = {}, []
    for end in range(1, tokens.shape[1] + 1):
        if end == 6:
            model.decoder.reorder_incremental_state_scripting(state, torch.tensor([1, 0]))
        parts.append(model.decoder(tokens[:, :end], incremental_state=state)[0])
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens)[0], rtol=1e-12, atol=1e-12)


def test_padding_on_the_left_changes_nothing(corpus):
    model, tokens = model_of(corpus), text()
    padded = F.pad(tokens, (3, 0), value=1)
    torch.testing.assert_close(model(padded)[0][:, 3:], model(tokens)[0], rtol=1e-12, atol=1e-12)


def test_an_encoder_updates_its_states_and_reads_no_padding():
    model, rows = classifier_of("softmax", "tape"), rows_of(9, 12, 5)
    plain = model(batch_of(rows))
    for name, parameter in model.named_parameters():
        if ".update." in name:
            parameter.data += 0.3
    found = model(batch_of(rows))
    assert (found - plain).abs().max() > 1e-4
    alone = torch.cat([model(row[None]) for row in rows])
    torch.testing.assert_close(found, alone, rtol=1e-10, atol=1e-10)


def test_half_precision_keeps_states_wide(corpus):
    model = build(corpus, BARE, "--position-encoding tape")[0].bfloat16()
    states = []
    for layer in model.decoder.layers[:-1]:
        layer.self_attn.update.register_forward_hook(lambda *call: states.append(call[-1].dtype))
    model(text())
    assert states == [torch.float32] * 2
    assert all(p.dtype != torch.bfloat16 for n, p in model.named_parameters() if ".update." in n)


HEADS = 3


def published_update():
    return StateUpdate(EncodingSpec(8, HEADS, options=EncodingOptions(frozenset({DIAGONAL}))))


def test_the_published_code_mixes_no_heads_and_learns_as_its_einsum():
    """Two steps of Adam from the authors' start, with their einsum and with ours."""
    e, m = torch.randn(2, 1, HEADS, 4, 8, generator=torch.Generator().manual_seed(1))
    y, wanted = torch.zeros(1, 4, 8 * HEADS), torch.linspace(-1, 1, HEADS).view(1, HEADS, 1, 1)
    update, theirs = published_update(), torch.nn.Parameter(torch.zeros(HEADS, HEADS))

    def published():
        return e + torch.einsum("bqnd,qe->bqnd", m, theirs)

    for weight, states in ((update.mix, lambda: update(e, m, y)), (theirs, published)):
        adam = torch.optim.Adam([weight], lr=0.1)
        for _ in range(2):
            adam.zero_grad()
            (states() - wanted * m).square().sum().backward()
            adam.step()
    torch.testing.assert_close(update(e, m, y), published())
    moved = update.mix.sum(1).abs()
    assert ((moved > 0.9 * HEADS * 2 * 0.1) == (wanted.flatten() != 0)).all()


def test_an_older_checkpoint_of_the_published_code_loads():
    update, older = published_update(), published_update().state_dict()
    older["mix"] = torch.tensor([0.1, -0.2, 0.3])
    update.load_state_dict(older)
    e, m = torch.randn(2, 1, HEADS, 4, 8, generator=torch.Generator().manual_seed(1))
    found = update(e, m, torch.zeros(1, 4, 8 * HEADS))
    torch.testing.assert_close(found, e + older["mix"].view(1, HEADS, 1, 1) * m)


def test_what_hands_no_states_on_is_refused(corpus):
    with pytest.raises(Refusal, match=r"--checkpoint-activations .* 'tape'"):
        build(corpus, BARE, "--position-encoding tape --checkpoint-activations")
    with pytest.raises(Refusal, match="'tape' needs states"):
        build(corpus, SMALL, "--attention-type linear --position-encoding tape")
    for name in ("gated:tape", "path:tape", "selective:tape"):
        with pytest.raises(ChoiceError, match="choose"):
            build_encoding(name, 8, 2, causal=True)
