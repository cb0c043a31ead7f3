"""Linear maps inside encodings, initialized from a generator, and maps of the last axis.

Axes: B batch, T time.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Linear(nn.Module):
    """x W^T + b with W (outputs, inputs) and an optional b (outputs,), float32 on the CPU.

    It is no ``nn.Linear``, because fairseq initializes every ``nn.Linear`` of a BERT model again,
    with the global generator.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__()
        exact = {"dtype": torch.float32, "device": "cpu"}
        self.in_features, self.out_features = inputs, outputs
        self.weight = nn.Parameter(torch.empty(outputs, inputs, **exact))
        self.bias = nn.Parameter(torch.empty(outputs, **exact)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs)."""
        return F.linear(x, self.weight, self.bias)


def applied(layer: Linear, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Apply ``layer`` in the wider one of its dtype and ``dtype``, and return ``dtype``."""
    wide = torch.promote_types(layer.weight.dtype, dtype)
    bias = None if layer.bias is None else layer.bias.to(wide)
    return F.linear(x.to(wide), layer.weight.to(wide), bias).to(dtype)


def linear(inputs: int, outputs: int, generator: torch.Generator) -> Linear:
    """Return a linear map with the initialization of ``nn.Linear``, drawn with ``generator``.

    Weights and biases are U(-a, a) with a = inputs^-0.5.
    """
    layer = Linear(inputs, outputs)
    for parameter in (layer.weight, layer.bias):
        nn.init.uniform_(parameter, -(inputs**-0.5), inputs**-0.5, generator=generator)
    return layer


def key_projection(width: int, generator: torch.Generator, bias: bool) -> Linear:
    """Return a linear map that is initialized like fairseq's key projection.

    Weights have Xavier's uniform distribution with gain 1/sqrt 2, biases are 0.
    """
    layer = Linear(width, width, bias)
    nn.init.xavier_uniform_(layer.weight, gain=0.5**0.5, generator=generator)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def log_sigmoid(x: Tensor) -> Tensor:
    """Return log sigmoid(x).

    While a compiler traces it is -softplus(-x), because the gradient of torch's own function has
    other strides than the compiler is told.
    """
    return -F.softplus(-x) if torch.compiler.is_compiling() else F.logsigmoid(x)


def as_stored(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function of the last axis to x (B, T, .), which fairseq stores as (T, B, .).

    PyTorch's functions would copy x, and in each backward pass its gradient, once per call.
    """
    x, time_first = stored(x)
    return function(x).transpose(0, 1) if time_first else function(x)


def stored(x: Tensor) -> tuple[Tensor, bool]:
    """Return (T, B, .) and True if x (B, T, .) is stored so, else x and False."""
    if x.is_contiguous():
        return x, False
    swapped = x.transpose(0, 1)
    return (swapped, True) if swapped.is_contiguous() else (x, False)
