"""Tree-SQ, the added embedding of tree nodes: its definition, and its place in lrpe_transformer."""

from __future__ import annotations

import pytest
import torch

from lrpe_fairseq.experiments.data import transduction as data
from lrpe_fairseq.experiments.data.transduction import Recipe
from lrpe_fairseq.models.tree_embedding import STEPS, TreeEmbedding
from tests.end_to_end.commands import PLUGIN, built, small_transformer

MODEL = (
    f"{small_transformer(inner=16)} "
    "--encoder-attention-heads 2 --decoder-attention-heads 2 --share-all-embeddings "
    "--encoder-position-encoding none --encoder-attention-type softmax --dropout 0"
)
TASK = f"--user-dir {PLUGIN} --task lrpe_transduction --cpu"


def node(*branches: int) -> int:
    code = 0
    for branch in branches:
        code = 2 * code + branch + 1
    return code


def expected(branches: tuple[int, ...], decays: list[float], width: int) -> torch.Tensor:
    """Written out feature by feature: step from the node, branch, decay."""
    features = []
    for step in range(STEPS):
        taken = branches[-1 - step] if step < len(branches) else None
        for branch in (0, 1):
            for a in decays:
                scale = (len(decays) * (1 - a * a) / 2) ** 0.5
                features.append(a**step * scale if taken == branch else 0.0)
    return torch.tensor(features + [0.0] * (width - len(features)))


def test_the_embedding_of_known_nodes():
    """Two decays; the root, a child, a grandchild, and a node deeper than all steps."""
    embedding = TreeEmbedding(35)
    decays = [0.5, 0.9]
    with torch.no_grad():
        embedding.weight.copy_(torch.tensor(decays).atanh())
    found = [(), (1,), (0, 1), (1, 1, 0, 1, 0, 0, 1, 0, 1, 1)]
    embedding.given.positions = torch.tensor([[node(*path) for path in found]])
    embedded = embedding(embedding.given.positions)
    for row, path in zip(embedded[0], found, strict=True):
        torch.testing.assert_close(row, expected(path, decays, 35))
    assert embedded[0, 0].count_nonzero() == 0
    assert embedded.square().sum(2).max() <= len(decays) ** 2 / 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    dest = tmp_path_factory.mktemp("data") / "tree-copy"
    data.prepare(dest, Recipe("tree-copy", "tiny", "depth"))
    return dest / "bin"


def test_the_model_adds_it_to_tokens_with_one_weight_for_both_halves(folder):
    nodes = "--node-positions --tree-embedding --no-token-positional-embeddings"
    model, task, _ = built(folder, TASK, MODEL, nodes)
    source, target = model.encoder.embed_positions, model.decoder.embed_positions
    assert source.weight is target.weight
    task.load_dataset("valid")
    pairs = task.dataset("valid")
    given = pairs.collater([pairs[0], pairs[1]])["net_input"]
    model.eval()
    out = model(**given)[0]
    out.sum().backward()
    assert source.weight.grad.abs().sum() > 0
    with torch.no_grad():
        encoded = model.encoder(given["src_tokens"], positions=given["src_positions"])
        tokens = model.encoder.embed_scale * model.encoder.embed_tokens(given["src_tokens"])
        added, _ = model.encoder.forward_embedding(given["src_tokens"])
        torch.testing.assert_close(added, tokens + source(given["src_tokens"]))
        moved = {**given, "src_positions": given["src_positions"] * 0}
        assert not torch.allclose(model(**moved)[0], out)
    assert encoded["encoder_out"][0].isfinite().all()
