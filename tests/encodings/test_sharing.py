"""Layers share the parameters of an encoding where its option says so."""

import copy

import pytest
from torch import nn

from lrpe_fairseq.encodings import EncodingOptions, build_encoding
from lrpe_fairseq.encodings.core.sharing import share_across_layers

LAYERS = 3
OWN = {"deberta": 4, "spe": 1}
"""Parameters that stay each layer's own: the projections of DeBERTa, and the gate of SPE."""


def layers_of(name, **options):
    """Encodings of the layers of a model, after sharing, and their parameters before."""
    given = EncodingOptions(**options)
    seeds = range(LAYERS)
    layers = nn.ModuleList(
        build_encoding(name, 8, 2, causal=True, seed=s, options=given) for s in seeds
    )
    before = len(list(layers[0].parameters()))
    share_across_layers(layers)
    return layers, before


OPTIONAL = ["t5", "fire", "spe"]


@pytest.mark.parametrize(
    ("name", "shared"),
    [(name, shared) for name in OPTIONAL for shared in (True, False)]
    + [(name, None) for name in (*OPTIONAL, "kerple-log", "kerple-power", "deberta", "ape")],
)
def test_layers_share_one_set_of_parameters_by_an_option_or_always(name, shared):
    layers, each = layers_of(name, **({} if shared is None else {f"{name}_shared": shared}))
    one = name not in OPTIONAL if shared is None else shared
    own = OWN.get(name, 0)
    expected = LAYERS * own + (each - own) * (1 if one else LAYERS)
    assert len(list(layers.parameters())) == expected
    twin = copy.deepcopy(layers)
    twin.load_state_dict(layers.state_dict())
    assert len(list(twin.parameters())) == expected


@pytest.mark.parametrize("name", ["cape-alibi", "cape-kerple", "cape-fire"])
def test_layers_of_cape_share_neither_the_network_nor_the_bias(name):
    layers, each = layers_of(name)
    assert len(list(layers.parameters())) == LAYERS * each
