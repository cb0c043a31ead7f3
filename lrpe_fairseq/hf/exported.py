"""Another attention in the layers of an exported model, which has this package's attention."""

import copy
from collections.abc import Collection

from torch import Tensor

from lrpe_fairseq.hf.config import LAYER
from lrpe_fairseq.hf.families import Options, changed
from lrpe_fairseq.hf.model import LRPEForCausalLM


def convert_exported(
    model: LRPEForCausalLM, layers: Collection[int], options: Options
) -> LRPEForCausalLM:
    """Change the options of attention in some layers, in place; see :func:`hf.convert`.

    Weights keep their values wherever the changed model has weights of that name and shape. Other
    weights, such as those of new gates, are those of a new model.
    Raises: ChoiceError for options that do not fit. The model is then unchanged.
    """
    config = copy.deepcopy(model.config)
    config.attention = [
        changed({**LAYER, **own}, options) if layer in layers else own
        for layer, own in enumerate(config.attention)
    ]
    made = LRPEForCausalLM(config)
    made.load_state_dict(_common(model, made), strict=False)
    made.to(model.device, model.dtype).train(model.training)
    model.model, model.lm_head, model.config = made.model, made.lm_head, config
    return model


def _common(model: LRPEForCausalLM, made: LRPEForCausalLM) -> dict[str, Tensor]:
    """Return the weights of a model for which another one has a place."""
    known = dict(model.named_parameters(remove_duplicate=False))  # also of shared encodings
    known |= dict(model.named_buffers(remove_duplicate=False))
    wanted = made.state_dict()
    same = {name for name in wanted if name in known and known[name].shape == wanted[name].shape}
    return {name: known[name] for name in same}
