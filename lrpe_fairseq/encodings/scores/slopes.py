"""The slopes of linear biases (ALiBi; Press, Smith and Lewis, 2022, Section 3)."""


def alibi_slopes(num_heads: int) -> list[float]:
    """Return the slope m_h > 0 of every head; the bias of a score at lag n is -m_h n.

    For H a power of two, m_h = 2^(-8(h+1)/H). Otherwise, as in the authors' code: with p the
    largest power of two below H, the slopes of p heads, followed by the first H - p of the slopes
    1, 3, 5, ... (counted from one) of 2p heads. Trap: these are not in order of size.

    >>> alibi_slopes(4)
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (h + 1) / power) for h in range(power)]
    return slopes + [2.0 ** (-4.0 * (2 * h + 1) / power) for h in range(num_heads - power)]
