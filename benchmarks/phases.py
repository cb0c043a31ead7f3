"""Phase error of a rotation by position and number type: float64 against rounded angles."""

import math
from collections.abc import Sequence

import torch

from lrpe_fairseq.encodings.rotations.cores import BASE, phases

POSITIONS = (512, 8192, 65536, 1_000_000)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTH, WINDOW = 64, 256


def measure(device: str, positions: Sequence[int] = POSITIONS) -> list[dict]:
    """Return rows of {position, dtype, ours, float32_angle, own_angle}.

    Each error is the largest |phase - exact phase| of a rotation of width 64 over the last 256
    positions before ``position``. ``ours`` computes the angle in float64 and rounds cosine and
    sine; ``float32_angle`` and ``own_angle`` round the angle itself, to float32 or to ``dtype``
    (None if the position is out of its range).
    """
    return [_row(end, dtype, device) for end in positions for dtype in DTYPES]


def _row(end: int, dtype: torch.dtype, device: str) -> dict:
    s = torch.arange(end - WINDOW, end, device=device)
    theta = BASE ** (torch.arange(WIDTH // 2, dtype=torch.float64, device=device) * (-2 / WIDTH))
    angle = s.unsqueeze(-1) * theta
    exact = torch.polar(torch.ones_like(angle), angle)
    wide = torch.promote_types(dtype, torch.float32)
    ours = phases(s, theta, wide)
    rounded = {
        "ours": torch.complex(ours.real.to(dtype).double(), ours.imag.to(dtype).double()),
        "float32_angle": _rounded_angle(s, theta, torch.float32, dtype),
        "own_angle": _rounded_angle(s, theta, dtype, dtype),
    }
    errors = {name: (value - exact).abs().max().item() for name, value in rounded.items()}
    finite = {name: error if math.isfinite(error) else None for name, error in errors.items()}
    return {"position": end, "dtype": str(dtype)[6:], **finite}


def _rounded_angle(
    s: torch.Tensor, theta: torch.Tensor, of_angle: torch.dtype, of_result: torch.dtype
) -> torch.Tensor:
    """Return cosine and sine of the angle rounded to ``of_angle``, rounded to ``of_result``."""
    angle = (s.to(of_angle).unsqueeze(-1) * theta.to(of_angle)).double()
    parts = (part.to(of_result).double() for part in (angle.cos(), angle.sin()))
    return torch.complex(*parts)
