"""Examples, a double loop over pairs for biases that depend on the lag, and equal gradients."""

import torch


def loop_bias(of_pair, q_positions, k_positions, heads):
    """Return (H, T, S) float64: of_pair(h, s, t), evaluated for each head and pair."""
    rows = [
        [[of_pair(h, s, t) for t in k_positions.tolist()] for s in q_positions.tolist()]
        for h in range(heads)
    ]
    stacked = [torch.stack([torch.stack(row) for row in head]) for head in rows]
    return torch.stack(stacked)


def bias_of(encoding, q_positions, k_positions, dtype=torch.float64):
    """Return the bias (H, T, S) of an additive encoding, whose q and k do not matter."""
    spec = encoding.spec
    q = torch.zeros(1, spec.num_heads, len(q_positions), spec.head_dim, dtype=dtype)
    k = torch.zeros(1, spec.num_heads, len(k_positions), spec.head_dim, dtype=dtype)
    return encoding.bias(q, k, q_positions, k_positions)


def queries_and_keys(rows, columns, heads=2, width=4):
    """Return random q (2, H, T, D) and k (2, H, S, D), float64, with gradients."""
    generator = torch.Generator().manual_seed(rows * columns)
    shapes = [(2, heads, time, width) for time in (rows, columns)]
    draws = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    return [x.requires_grad_() for x in draws]


def assert_same_with_gradients(found, wanted, inputs, visible=1.0):
    """Compare two tensors where ``visible``, and the gradients of a generic function of them."""
    torch.testing.assert_close(found * visible, wanted * visible, rtol=1e-12, atol=1e-12)
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(wanted.shape, generator=generator, dtype=torch.float64) * visible
    inputs = list(inputs)
    losses = ((values.sin() * weight).sum() for values in (found, wanted))
    pairs = [torch.autograd.grad(loss, inputs) for loss in losses]
    torch.testing.assert_close(*pairs, rtol=1e-10, atol=1e-10)
