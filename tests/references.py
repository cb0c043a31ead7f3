"""Dense float64 references, written from the equations and nothing else."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from lrpe_fairseq.encodings import QueryKeyEncoding, ScoreEncoding
from lrpe_fairseq.encodings.rotations.lrpe import LRPE


def assert_near(found: Iterable, wanted: Iterable, scale: float, least: float = 0.1) -> None:
    """Compare tensors relative to the largest number of each, at ``least``: terms may cancel."""
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape
        assert (a.double() - b.double()).abs().max() <= scale * b.abs().max().clamp_min(least)


def dense_p(encoding: LRPE, name: str) -> Tensor:
    """P as a (d, d) complex128 matrix (LRPE, C.7)."""
    d = encoding.spec.head_dim
    eye = torch.eye(d, dtype=torch.float64)
    if name == "fourier":
        j = torch.arange(d, dtype=torch.float64)
        return torch.exp(-2j * math.pi * torch.outer(j, j) / d) / math.sqrt(d)
    if name.startswith("householder"):
        v = encoding.projection.v.detach().double()
        return (eye - 2 * torch.outer(v, v) / (v @ v)).to(torch.complex128)
    if name == "odd-even":
        rows = [k // 2 if k % 2 == 0 else math.ceil(d / 2) + k // 2 for k in range(d)]
        return eye[rows].to(torch.complex128)
    return eye.to(torch.complex128)


def frequencies(name: str, d: int) -> Tensor:
    """The untrained angles per token of a rotation or unitary core, float64."""
    if name.startswith("unitary"):
        return torch.tensor([10000 ** (-2 * t / d) for t in range(d)], dtype=torch.float64)
    e = d // 2 + (d // 2) % 2 if name == "rotation-half" else d - d % 2
    return torch.tensor([10000 ** (-2 * i / e) for i in range(e // 2)], dtype=torch.float64)


def dense_lambda(encoding: LRPE, name: str, s: int) -> Tensor:
    """Lambda^(s) as a (d, d) complex128 matrix (LRPE, Eq. 23-25)."""
    d = encoding.spec.head_dim
    if name == "permutation":
        pi, power = encoding.core.permutation.tolist(), list(range(d))
        for _ in range(s % math.factorial(min(d, 12)) if s < 0 else s):
            power = [pi[j] for j in power]
        return torch.eye(d, dtype=torch.complex128)[power]
    learned = name.endswith("learned")
    theta = encoding.core.theta.detach().double() if learned else frequencies(name, d)
    if name.startswith("unitary"):
        return torch.diag(torch.exp(1j * s * theta))
    matrix = torch.eye(d, dtype=torch.float64)
    for i, angle in enumerate((s * theta).tolist()):
        c, sn = math.cos(angle), math.sin(angle)
        matrix[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = torch.tensor(
            [[c, -sn], [sn, c]], dtype=torch.float64
        )
    return matrix.to(torch.complex128)


def dense_w(encoding: LRPE, p_name: str, core_name: str, lag: int) -> Tensor:
    """W_lag = P^H Lambda^(lag) P; for a negative lag W_{-lag}^H (Eq. 14 and 22)."""
    p, power = dense_p(encoding, p_name), dense_lambda(encoding, core_name, abs(lag))
    w = p.conj().T @ power @ p
    return w if lag >= 0 else w.conj().T


def dense_scores(w_of_lag: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Re(q_s^H W_{t-s} k_t) for q, k (B, H, T, d) and W (2T - 1, d, d), lag -(T-1) first."""
    length = q.shape[-2]
    lag = torch.arange(length)[None, :] - torch.arange(length)[:, None] + length - 1
    turned = torch.einsum("nij,bhtj->bhnti", w_of_lag, k.to(torch.complex128))
    turned = turned[:, :, lag, torch.arange(length)[None, :]]  # B H s t d
    return torch.einsum("bhsi,bhsti->bhst", q.to(torch.complex128), turned).real


def score_matrix(
    encoding: QueryKeyEncoding | ScoreEncoding,
    q: Tensor,
    k: Tensor,
    q_positions: Tensor,
    k_positions: Tensor,
    x: Tensor | None = None,
) -> Tensor:
    """The score of every (s, t) under either protocol, (B, H, T, S), for q that is scaled already.

    A decay of the weight is part of it: its logarithm is added. x: the layer's input (B, T, C), of
    which the encoding computes gates, places and reflections; None for none of them.
    """
    if isinstance(encoding, ScoreEncoding):
        q = q * encoding.content_scale
        if x is not None:
            q, k = encoding.widened(x, q / encoding.softmax_scale, k, k_positions)
            q = q * encoding.softmax_scale
        visible = visible_matrix(encoding, q, k)
        return encoding(q @ k.transpose(-1, -2), q, k, q_positions, k_positions, visible)
    gates = None if x is None else encoding.log_gates(x)
    places = None if x is None else encoding.phases(x, None, None, {})[0]
    if places is None:
        q, k = encoding(q, k, q_positions, k_positions)
    else:
        q, k = encoding(q, k, places, places)
    scores, log_decay = q @ k.transpose(-1, -2), encoding.log_decay()
    if x is not None and encoding.reflections is not None:
        transport, k = encoding.transport(x, k_positions, None, None, {})[0].by_keys(k)
        scores = carried_scores(q, k, *transport)
    if log_decay is not None:
        lag = q_positions.unsqueeze(-1) - k_positions.unsqueeze(-2)
        lag = lag.clamp_min(0) if encoding.spec.causal else lag.abs()
        exponent = log_decay.double()[:, None, None] * lag.unsqueeze(-3)
        of_score = encoding.form(None, q_positions).score_decay is not None
        scores = scores * exponent.exp() if of_score else scores + exponent
    if gates is None:
        return scores
    if gates.dim() == 4:  # of every feature
        total = gates.double().cumsum(2)
        exponent = (total.unsqueeze(3) - total.unsqueeze(2)).clamp_max(0)
        return (q.unsqueeze(3) * k.unsqueeze(2) * exponent.exp()).sum(-1)
    total = gates.double().cumsum(-1)
    return scores + (total.unsqueeze(-1) - total.unsqueeze(-2)).tril()


def carried_scores(q: Tensor, k: Tensor, w: Tensor, beta: Tensor) -> Tensor:
    """q_s^T H_s ... H_(t+1) k_t with H_u = I - beta_u w_u w_u^T, (B, H, T, T); 0 for t > s.

    From products of matrices, one by one.
    """
    steps = -beta[..., None, None] * w.unsqueeze(-1) * w.unsqueeze(-2)
    steps = steps + torch.eye(w.shape[-1], dtype=w.dtype)
    scores = q.new_zeros(*q.shape[:3], q.shape[2])
    for s in range(q.shape[2]):
        row = q[:, :, s, None]
        for t in range(s, -1, -1):
            scores[:, :, s, t] = (row * k[:, :, t, None]).sum((-1, -2))
            row = row @ steps[:, :, t]
    return scores


def weight_matrix(
    encoding: QueryKeyEncoding | ScoreEncoding, q: Tensor, k: Tensor, *rest: Tensor
) -> Tensor:
    """The weights of softmax attention, (B, H, T, S); arguments as of :func:`score_matrix`."""
    scores, visible = score_matrix(encoding, q, k, *rest), visible_matrix(encoding, q, k)
    if isinstance(encoding, ScoreEncoding):
        return encoding.weigh(scores, visible, scores.dtype)
    hidden = torch.zeros(()) if visible is None else ~visible
    return scores.masked_fill(hidden.bool(), -math.inf).softmax(-1)


def visible_matrix(
    encoding: QueryKeyEncoding | ScoreEncoding, q: Tensor, k: Tensor
) -> Tensor | None:
    """The causal mask (1, 1, T, S), true where a query sees a key; None without a mask."""
    if not encoding.spec.causal:
        return None
    rows, columns = q.shape[-2], k.shape[-2]
    return torch.ones(1, 1, rows, columns, dtype=torch.bool).tril(columns - rows)


def gradients_in_and_out_of_autocast(encoding, x, positions, dtype):
    """The gradients of x and of all parameters, with the backward pass outside and in autocast.

    The forward pass is in autocast. x: (B, H, T, D), float32.
    """
    inputs = [x, *encoding.parameters()]
    found = []
    for enabled in (False, True):
        with torch.autocast(x.device.type, dtype):
            q, k = encoding(x, x, positions, positions)
        loss = (q * torch.linspace(-1, 1, q.numel()).view_as(q)).sum() + k.square().sum()
        with torch.autocast(x.device.type, dtype, enabled=enabled):
            found.append(torch.autograd.grad(loss, inputs))
    return found
