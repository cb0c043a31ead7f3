"""Small networks inside encodings, initialized from a generator."""

import torch
from torch import nn


def linear(inputs: int, outputs: int, generator: torch.Generator) -> nn.Linear:
    """Return a linear layer with the initialization of ``nn.Linear``, drawn with ``generator``.

    Weights and biases are U(-a, a) with a = inputs^-0.5, float32 on the CPU. The global generator
    is not used.
    """
    layer = nn.utils.skip_init(nn.Linear, inputs, outputs, dtype=torch.float32)
    for parameter in (layer.weight, layer.bias):
        nn.init.uniform_(parameter, -(inputs**-0.5), inputs**-0.5, generator=generator)
    return layer
