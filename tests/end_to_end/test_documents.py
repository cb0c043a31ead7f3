"""``--document-boundary``: packed documents in a language model, in training and in decoding."""

import itertools

import pytest
import torch

from tests.end_to_end.commands import SMALL, build

pytestmark = pytest.mark.end_to_end

MODELS = {
    "linear": "--attention-type linear --position-encoding lrpe-type2 --decoder-learned-pos",
    "softmax": "--attention-type softmax --position-encoding t5",
    "checkpointed": "--attention-type linear --position-encoding gated:spe "
    "--checkpoint-activations",
}


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_documents_in_a_block_are_read_as_each_alone(corpus, options):
    model, task, _ = build(corpus, SMALL, options, "--dropout 0 --document-boundary w1")
    model, mark, pad = model.double().eval(), task.dictionary.index("w1"), task.dictionary.pad()
    tokens = torch.randint(20, 24, (2, 12), generator=torch.Generator().manual_seed(0))
    tokens[0, [0, 4, 5]] = tokens[1, [3, 8]] = mark
    tokens[1, 10:] = pad
    weight = torch.randn(2, 12, len(task.dictionary), dtype=torch.float64)
    together, _ = model(tokens)
    alone, bounds = torch.zeros_like(together), [(0, [0, 4, 5, 12]), (1, [0, 3, 8, 10])]
    for row, ends in bounds:
        for first, last in itertools.pairwise(ends):
            alone[row, first:last] = model(tokens[row : row + 1, first:last])[0]
    together = together.masked_fill(tokens.eq(pad).unsqueeze(-1), 0.0)
    torch.testing.assert_close(together, alone, rtol=1e-10, atol=1e-10)
    learned = list(model.parameters())
    grads = []
    for out in (model(tokens)[0][:1], alone[:1]):  # recomputed activations need backward
        model.zero_grad()
        (out * weight[:1]).sum().backward()
        grads.append([p.grad.clone() for p in learned if p.grad is not None])
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_decoding_starts_anew_at_the_boundary(corpus, attention):
    options = f"--attention-type {attention} --position-encoding rope --document-boundary w1"
    model, task, _ = build(corpus, SMALL, options)
    model, mark = model.double().eval(), task.dictionary.index("w1")
    tokens = torch.randint(20, 24, (2, 9))
    tokens[0, 4] = tokens[1, 7] = mark
    state, order = {}, torch.tensor([1, 0, 0])
    for length in range(1, 10):
        if length == 6:
            tokens = tokens[order]
            model.decoder.reorder_incremental_state_scripting(state, order)
        found = model.decoder(tokens[:, :length], incremental_state=state)[0]
        expected = model(tokens[:, :length])[0][:, -1:]
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found[1:2], model(tokens[1:2, 4:])[0][:, -1:])
