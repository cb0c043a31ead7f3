"""The task lrpe_transduction: nodes in batch and model, Tree-SQ, and teacher-forced metrics."""

import math
import re

import numpy as np
import pytest
import torch
from fairseq import tasks
from fairseq.logging import metrics
from omegaconf import OmegaConf

from lrpe_fairseq.errors import Refusal
from lrpe_fairseq.experiments.data import transduction as data
from lrpe_fairseq.experiments.data.transduction import Recipe
from lrpe_fairseq.models.tree_embedding import STEPS, TreeEmbedding
from lrpe_fairseq.tasks.transduction import log_scored, published_zeros, scored_mask, sums
from tests.end_to_end.commands import PLUGIN, built, configured, run_here, small_transformer

PAD, EOS = 1, 2
MODEL = (
    f"{small_transformer(width=16, inner=16)} "
    "--encoder-attention-heads 2 --decoder-attention-heads 2 --share-all-embeddings "
    "--no-token-positional-embeddings --encoder-position-encoding ape-tree "
    "--decoder-position-encoding ape-tree --encoder-attention-type softmax --dropout 0 "
    "--cross-position-encoding ape-tree"
)
TASK = f"--user-dir {PLUGIN} --task lrpe_transduction --scored-tokens no-end --cpu"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    dest = tmp_path_factory.mktemp("data") / "tree-copy"
    data.prepare(dest, Recipe("tree-copy", "tiny", "depth"))
    return dest / "bin"


@pytest.fixture(scope="module")
def trained(folder):
    """Model and task of a command line, and the first batch of valid with its samples."""
    model, task, _ = built(folder, TASK, MODEL, "--node-positions")
    task.load_dataset("valid")
    rows = [3, 0, 40, 41]
    pairs = task.dataset("valid")
    return model.eval(), task, pairs.collater([pairs[row] for row in rows])


def one_epoch(folder, tmp_path, *options):
    """Train: log, logged numbers of the validation, and task and model of the checkpoint."""
    log = tmp_path / "log.txt"
    run_here(
        "fairseq_cli.train", folder, *options, "--optimizer adam --lr 1e-2 --batch-size 32",
        "--max-epoch 1 --num-workers 0 --log-format simple --log-interval 1 --save-dir", tmp_path,
        "--log-file", log,
    )  # fmt: skip
    text = log.read_text()
    line = next(line for line in text.splitlines() if "valid on 'valid'" in line)
    logged = {name: float(value) for name, value in re.findall(r"(\w+) ([\d.]+)", line)}
    model, task, _ = built(folder, *options)
    model.load_state_dict(torch.load(tmp_path / "checkpoint_last.pt", weights_only=False)["model"])
    task.load_dataset("valid")
    return text, logged, task, model.eval()


def sums_row_by_row(rows, model):
    """Negative log-likelihood, right tokens and tokens of the scored places, and exact rows."""
    found = np.zeros(4)
    for row in range(len(rows)):
        batch = rows.collater([rows[row]])
        with torch.no_grad():
            scores = model(**batch["net_input"])[0].log_softmax(-1)[0]
        scored = batch["target"][0] > EOS
        scores, target = scores[scored], batch["target"][0, scored]
        hits = scores.argmax(1).eq(target)
        nll = -float(scores.gather(1, target[:, None]).sum())
        found += [nll, int(hits.sum()), len(hits), int(hits.all())]
    return found


@pytest.fixture(scope="module")
def samples():
    """The validation set, as it was generated."""
    return data.generate(Recipe("tree-copy", "tiny", "depth"))["valid"]


def test_every_token_of_a_source_has_its_code_and_its_end_has_0(trained, samples):
    _, task, batch = trained
    for row, number in enumerate(batch["id"].tolist()):
        tokens = batch["net_input"]["src_tokens"][row]
        codes = batch["net_input"]["src_positions"][row]
        source, _ = samples[number]
        real = tokens.ne(PAD)
        assert task.source_dictionary.string(tokens[real]) == " ".join(source.tokens)
        assert codes[real].tolist() == [*source.codes, 0]


def test_every_token_before_a_target_has_its_code_and_the_first_end_has_0(trained, samples):
    _, _, batch = trained
    for row, number in enumerate(batch["id"].tolist()):
        tokens = batch["net_input"]["prev_output_tokens"][row]
        codes = batch["net_input"]["prev_output_positions"][row]
        _, target = samples[number]
        assert tokens[0] == EOS
        assert codes[tokens.ne(PAD)].tolist() == [0, *target.codes]


def test_padding_has_the_code_0(trained):
    _, _, batch = trained
    net_input = batch["net_input"]
    for tokens, codes in (("src_tokens", "src_positions"),
                          ("prev_output_tokens", "prev_output_positions")):  # fmt: skip
        assert net_input[codes][net_input[tokens].eq(PAD)].count_nonzero() == 0


def test_the_model_uses_the_positions_and_forgets_them(trained):
    model, _, batch = trained
    given = batch["net_input"]
    plain = {key: value for key, value in given.items() if "positions" not in key}
    with torch.no_grad():
        counted, nodes = model(**plain)[0], model(**given)[0]
        again = model(**plain)[0]
        one = {key: value[:1] for key, value in given.items()}
        alone = model(**one)[0]
    assert not torch.allclose(counted, nodes, atol=1e-5)
    assert torch.equal(counted, again)
    torch.testing.assert_close(alone, nodes[:1])


def test_sums_by_hand():
    """Three types after the special ones; the second sample is shorter and wrong once."""
    target = torch.tensor([[4, 5, EOS], [6, EOS, PAD]])
    probs = torch.full((2, 3, 7), 0.05)
    for row, place, token in ((0, 0, 4), (0, 1, 5), (0, 2, 2), (1, 0, 5), (1, 1, 2), (1, 2, 0)):
        probs[row, place, token] = 0.7
    expected = {
        "all": (4 * math.log(1 / 0.7) + math.log(20), 5, 4, 1),
        "no-end": (2 * math.log(1 / 0.7) + math.log(20), 3, 2, 1),
        "inner": (math.log(1 / 0.7), 1, 1, 2),
    }
    for scored, numbers in expected.items():
        found = sums(probs.log(), target, scored_mask(target, PAD, EOS, scored))
        assert list(found.values())[:4] == pytest.approx(numbers, rel=1e-6)
        assert found["_samples"] == 2


def node(branches):
    code = 0
    for branch in branches:
        code = 2 * code + branch + 1
    return code


def features_of(branches, decays, width):
    """Written out feature by feature: step from the node, branch, decay."""
    features = []
    for step in range(STEPS):
        taken = branches[-1 - step] if step < len(branches) else None
        for branch in (0, 1):
            for a in decays:
                scale = (len(decays) * (1 - a * a) / 2) ** 0.5
                features.append(a**step * scale if taken == branch else 0.0)
    return torch.tensor(features + [0.0] * (width - len(features)))


def test_the_tree_embedding_of_known_nodes():
    """Two decays; the root, a child, a grandchild, and a node deeper than all steps."""
    embedding, decays = TreeEmbedding(35), [0.5, 0.9]
    embedding.weight.data = torch.tensor(decays).atanh()
    found = [(), (1,), (0, 1), (1, 1, 0, 1, 0, 0, 1, 0, 1, 1)]
    embedding.given.positions = torch.tensor([[node(path) for path in found]])
    embedded = embedding(embedding.given.positions)
    for row, path in zip(embedded[0], found, strict=True):
        torch.testing.assert_close(row, features_of(path, decays, 35))
    assert embedded[0, 0].count_nonzero() == 0
    assert embedded.square().sum(2).max() <= len(decays) ** 2 / 2


def test_the_model_adds_it_to_tokens_with_one_weight_for_both_halves(folder, trained):
    options = MODEL.replace("ape-tree", "none")
    model, _, _ = built(folder, TASK, options, "--node-positions --tree-embedding")
    source, target = model.encoder.embed_positions, model.decoder.embed_positions
    assert source.weight is target.weight
    given, encoder = trained[2]["net_input"], model.eval().encoder
    out = model(**given)[0]
    out.sum().backward()
    assert source.weight.grad.abs().sum() > 0
    with torch.no_grad():
        encoder(given["src_tokens"], positions=given["src_positions"])
        tokens = encoder.embed_scale * encoder.embed_tokens(given["src_tokens"])
        added, _ = encoder.forward_embedding(given["src_tokens"])
        torch.testing.assert_close(added, tokens + source(given["src_tokens"]))
        moved = {**given, "src_positions": given["src_positions"] * 0}
        assert not torch.allclose(model(**moved)[0], out)


def logged(*batches):
    with metrics.aggregate(new_root=True) as found:
        for batch in batches:
            log_scored([batch | {"_published_zeros": 0.0}])
    return found.get_smoothed_values()


def test_a_training_that_diverged_has_an_infinite_perplexity():
    """exp of 710 is beyond the largest float."""
    target = torch.tensor([[4]])
    values = logged(sums(torch.full((1, 1, 7), -710.0), target, target.ne(PAD)))
    assert values["teacher_ppl"] == values["ppl_published"] == math.inf


def test_a_batch_without_scored_tokens_has_no_weight():
    """A target of one token has none under ``inner``."""
    target = torch.tensor([[4, EOS]])
    empty = sums(torch.zeros(1, 2, 7), target, scored_mask(target, PAD, EOS, "inner"))
    other = sums(torch.full((1, 2, 7), -2.0), target, target.ne(PAD))
    for batches in ((empty, other), (other, empty)):
        values = logged(*batches)
        assert values["teacher_ppl"] == pytest.approx(math.exp(2))
        assert values["token_accuracy"] == 0
        assert values["exact_match"] == 0.5
    assert math.isnan(logged(empty)["teacher_ppl"])


def test_the_published_slip_is_an_explicit_mask_of_the_inputs():
    """Targets of batches of 32, whose padded inputs are compared with padding token by token."""
    lengths = np.random.RandomState(1).randint(3, 9, size=70)  # start token included
    for start in range(0, 70, 32):
        batch = lengths[start : start + 32]
        tokens = np.arange(batch.max())[None, :] < batch[:, None]
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        extra = inputs.sum(1) - targets.sum(1)
        assert (published_zeros(lengths)[start : start + 32] == extra).all()


def test_training_reports_the_metrics_of_a_direct_computation(folder, tmp_path):
    options = (TASK, MODEL, "--node-positions --criterion label_smoothed_cross_entropy")
    _, logged, task, model = one_epoch(folder, tmp_path, *options)
    pairs = task.dataset("valid")
    nll, right, tokens, exact = sums_row_by_row(pairs, model)
    zeros = published_zeros(pairs.dataset.tgt_sizes).sum()
    assert zeros > 50
    assert logged["teacher_ppl"] == pytest.approx(math.exp(nll / tokens), rel=1e-3)
    assert logged["ppl_published"] == pytest.approx(math.exp(nll / (tokens + zeros)), rel=1e-3)
    assert logged["token_accuracy"] == pytest.approx(right / tokens, abs=1e-4)
    assert logged["exact_match"] == pytest.approx(exact / len(pairs), abs=1e-4)


def test_data_without_or_with_other_positions_are_refused(folder, tmp_path):
    def refused(sentence, path, **options):
        with pytest.raises(Refusal, match=sentence):
            tasks.setup_task(OmegaConf.merge(config, options, {"data": str(path)})).load_dataset(
                "valid"
            )

    config = configured(folder, TASK, MODEL, "--node-positions").task
    data.prepare(tmp_path, Recipe("copy", "tiny"))
    refused("prepare a task of trees", tmp_path / "bin")
    refused("reads a single data folder, not the shards", f"{folder}:{folder}")
    cut = {"truncate_source": True, "max_source_positions": 5}
    refused("does not have a position for every token", folder, **cut)
