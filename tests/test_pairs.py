"""What pairs of features add to denominators: against sums over single pairs of tokens."""

import json
import math

import pytest
import torch

from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.encodings import EncodingOptions
from lrpe_fairseq.experiments.commands import pairs as command
from lrpe_fairseq.experiments.report import pairs as page
from lrpe_fairseq.experiments.runner.pairs import CLASSES, classes_of, feature_classes, pair_parts
from tests.end_to_end.commands import SMALL, build, save

C, H, T, LENGTH = 32, 2, 8, 40
EDGES = [0, 2, 8, 40]
NAMES = ("rope", "lrpe-type1", "lrpe-type2", "lrpe-type8", "lrpe-tmlr-type1", "lrpe-type6")


def attention_of(name, **options):
    torch.manual_seed(0)
    given = {"attention_type": "linear", "position_encoding": name, "causal": True, **options}
    return MultiheadAttention(C, H, **given).double().eval()


def text():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3, LENGTH, C, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("name", NAMES)
def test_parts_are_those_of_all_pairs_of_tokens(name):
    attention, x, at = attention_of(name), text(), torch.arange(LENGTH)
    found = pair_parts(attention, x, T, EDGES, queries=T)
    q, k = attention.feature_pairs(x)
    classes, wanted = feature_classes(attention.encoding, T), []
    for positions in (at, 0 * at):
        q2, k2 = (y.double() for y in attention.encoding(q, k, positions, positions))
        parts = torch.zeros(3, H, T, len(CLASSES), len(EDGES) - 1, dtype=torch.float64)
        for row, s in enumerate(range(LENGTH - T, LENGTH)):
            for t in range(s + 1):
                n = next(n for n, end in enumerate(EDGES[1:]) if s - t < end)
                by_feature = q2[:, :, s] * k2[:, :, t]
                for j, g in enumerate(classes.tolist()):
                    parts[:, :, row, g, n] += by_feature[..., j]
        wanted.append(parts)
    turned, plain = wanted
    whole = plain.sum((-2, -1), keepdim=True)
    torch.testing.assert_close(found.turned, (turned / whole).mean((0, 1, 2)), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.plain, (plain / whole).mean((0, 1, 2)), rtol=1e-9, atol=1e-9)
    assert found.plain.sum() == pytest.approx(1)
    denominators = attention.denominators(x)[:, :, -T:]
    quotient = (denominators / whole.flatten(2)).mean()
    assert found.turned.sum().item() == pytest.approx(quotient.item(), rel=1e-5)
    assert found.clamped == (denominators <= 1e-6).double().mean()


def test_pairs_at_0_add_all_of_their_mass_at_every_distance():
    options = EncodingOptions(angle_floor="turn", context_length=T)
    found = pair_parts(attention_of("rope", options=options), text(), T, EDGES, queries=T)
    torch.testing.assert_close(found.turned[0], found.plain[0], rtol=1e-12, atol=1e-12)
    assert found.plain[0].sum() > 0.3
    assert found.plain[1].sum() == 0  # nothing turns less than once in training
    assert abs(found.turned[2:].sum()) < 0.5 * found.plain[2:].sum()


def test_the_classes_are_those_of_the_turns_in_training():
    once = 2 * math.pi / 128
    theta = torch.tensor([0.0, 0.5, 0.999, 1.0, 3.9, 4.0, 31.9, 32.0, -32.0]) * once
    assert classes_of(theta, 128).tolist() == [0, 1, 1, 2, 2, 3, 3, 4, 4]


@pytest.mark.parametrize(
    "options",
    [
        *({"position_encoding": n} for n in ("none", "fox", "gated:rope", "path:rope", "rope-2d")),
        {"position_encoding": "rope", "normalizer": "layernorm"},
        {"position_encoding": "rope", "attention_type": "softmax"},
    ],
)
def test_attention_without_such_pairs_is_refused_in_one_sentence(options):
    attention = attention_of(**{"name": "rope", **options})
    with pytest.raises(ValueError, match="choose linear attention with normalizer") as refused:
        pair_parts(attention, text(), T, EDGES, queries=T)
    assert "\n" not in str(refused.value)


def test_the_command_measures_a_checkpoint_and_the_page_shows_it(corpus, tmp_path):
    chosen = f"--tokens-per-sample {T} --attention-type linear --position-encoding lrpe-type2"
    model, _, config = build(corpus, SMALL, chosen)
    save(model, config, tmp_path / "model.pt")
    data = tmp_path / "data"
    data.mkdir()
    (data / "bin").symlink_to(corpus.data)
    out = tmp_path / "results" / "bench" / "pairs" / "type2.json"
    words = [str(tmp_path / "model.pt"), str(data), "--label", "lrpe-type2", "--out", str(out)]
    assert command.main([*words, "--blocks", "2"]) == 0
    measured = json.loads(out.read_text())
    rows = [row for row in measured["rows"] if "turns" in row]
    assert sum(row["plain"] for row in rows) == pytest.approx(1)
    assert {(row["from"], row["to"]) for row in rows} == {(0, 0), (1, 7), (8, 31), (32, 127)}
    section = page.section(tmp_path)
    assert "Which pairs carry the denominator" in section
    assert "`lrpe-type2`" in section
    assert page.section(tmp_path / "elsewhere") == ""
