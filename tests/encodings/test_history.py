"""The tokens before each token, against a loop over the tokens of each row."""

import pytest
import torch

from lrpe_fairseq.encodings.core.history import causal_filter, history

B, T, C = 4, 11, 3


def text(length=T, dtype=torch.float64):
    return torch.randn(B, length, C, generator=torch.Generator().manual_seed(1), dtype=dtype)


def holes():
    """Padding on the left, on the right, inside, and a row without tokens."""
    found = torch.zeros(B, T, dtype=torch.bool)
    found[0, :4] = found[1, 7:] = found[2, 2] = found[2, 5:8] = found[3] = True
    return found


def begins():
    found = torch.zeros(B, T, dtype=torch.bool)
    found[:, 0] = found[:2, 5] = found[0, 6] = found[2, 9] = True
    return found


def naive(x, count, padding, starts):
    """[x_(t-1), ..., x_(t-n)] (n, B, T, C) and the last n (B, n, C), token by token."""
    out, tail = x.new_zeros(count, B, x.shape[1], C), x.new_zeros(B, count, C)
    for row in range(B):
        seen = [x.new_zeros(C)] * count
        for t in range(x.shape[1]):
            if padding is not None and padding[row, t]:
                continue
            if starts is not None and starts[row, t]:
                seen = [x.new_zeros(C)] * count
            for j in range(count):
                out[j, row, t] = seen[-1 - j]
            seen = [*seen[1:], x[row, t]]
        tail[row] = torch.stack(seen)
    return out, tail


CASES = pytest.mark.parametrize("padding", [None, holes()], ids=["whole", "padded"])
PACKED = pytest.mark.parametrize("starts", [None, begins()], ids=["one", "documents"])


@CASES
@PACKED
@pytest.mark.parametrize("count", [1, 3])
def test_history_is_that_of_a_loop_over_tokens_and_of_pieces(padding, starts, count):
    x = text()
    want, last = naive(x, count, padding, starts)
    real = torch.ones(B, T, dtype=torch.bool) if padding is None else ~padding
    for sizes in ([T], [1] * T, [2, 5, 4]):
        tail, found, at = None, [], 0
        for size in sizes:
            cut = slice(at, at + size)
            own = {"padding": padding, "starts": starts}
            own = {n: None if m is None else m[:, cut] for n, m in own.items()}
            past, tail = history(x[:, cut], count, tail=tail, **own)
            found.append(torch.stack(past))
            at += size
        assert torch.equal(torch.cat(found, 2)[:, real], want[:, real])
        assert torch.equal(tail, last)


def test_a_reordered_tail_continues_the_rows_of_the_beam():
    x, order = text(), torch.tensor([2, 2, 0, 1])
    _, tail = history(x[:, :6], 2)
    past, _ = history(x[order, 6:], 2, tail=tail.index_select(0, order))
    assert torch.equal(torch.stack(past), naive(x[order], 2, None, None)[0][:, :, 6:])


@CASES
@PACKED
def test_gradients_reach_the_tokens_that_were_read_and_no_padding(padding, starts):
    x = text().requires_grad_()
    real = torch.ones(B, T, dtype=torch.bool) if padding is None else ~padding
    weight = torch.tensor([[0.5], [-1.0], [2.0]], dtype=x.dtype).expand(3, C).requires_grad_()
    y, _ = causal_filter(x, weight, padding=padding, starts=starts)
    want = sum(w * p for w, p in zip(weight, [x, *naive(x, 2, padding, starts)[0]], strict=True))
    torch.testing.assert_close(y[real], want[real], rtol=1e-14, atol=1e-14)
    of = torch.sin(torch.arange(want.numel(), dtype=x.dtype)).view_as(want) * real.unsqueeze(-1)
    found = torch.autograd.grad((y * of).sum(), (x, weight))
    torch.testing.assert_close(
        found, torch.autograd.grad((want * of).sum(), (x, weight)), rtol=1e-13, atol=1e-13
    )
    assert not found[0][~real].any()
