"""A double loop over pairs, the reference of biases that depend on the lag."""

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
