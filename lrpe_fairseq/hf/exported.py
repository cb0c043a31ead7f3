"""Another attention in the layers of an exported model, which has this package's attention."""

import copy
from collections.abc import Collection, Mapping

from torch import Tensor, nn

from lrpe_fairseq.errors import ChoiceError
from lrpe_fairseq.hf.config import LAYER
from lrpe_fairseq.hf.families import Options, changed, require_plain
from lrpe_fairseq.hf.model import LRPEForCausalLM


def convert_exported(
    model: LRPEForCausalLM, layers: Collection[int], options: Options
) -> LRPEForCausalLM:
    """Change the options of attention in some layers, in place; see :func:`hf.convert`.

    Weights keep their values wherever the changed model has weights of that name and shape. Other
    weights, such as those of new gates, are those of a new model.
    Raises: ChoiceError for options that do not fit, and for weights such as those of adapters,
        which would be lost. The model is then unchanged.
    """
    require_plain(part for part in model.modules() if isinstance(part, nn.Linear))
    config = copy.deepcopy(model.config)
    config.attention = [
        changed({**LAYER, **own}, options) if layer in layers else own
        for layer, own in enumerate(config.attention)
    ]
    made = LRPEForCausalLM(config)
    _require_own(model, made)
    common = _common(model, made)
    made.load_state_dict(common, strict=False)
    _freeze(model, made, common)
    made.to(model.device, model.dtype).train(model.training)
    model.model, model.lm_head, model.config = made.model, made.lm_head, config
    return model


def _require_own(model: LRPEForCausalLM, made: LRPEForCausalLM) -> None:
    """Refuse weights of a model that neither its configuration nor that of ``made`` has."""
    known, wanted = _tensors(model), _tensors(made)
    lost = _without_place(known, wanted)
    if lost:  # such as those of gates that the options remove
        lost &= _without_place(known, _tensors(LRPEForCausalLM(copy.deepcopy(model.config))))
    if lost:
        raise ChoiceError(
            f"the weight {min(lost)} is not of the model's configuration and would be lost: merge "
            "the adapters first"
        )


def _freeze(model: LRPEForCausalLM, made: LRPEForCausalLM, common: Collection[str]) -> None:
    """Freeze the ``common`` parameters of ``made`` that were frozen in a model.

    Parameters that are fixed by their encoding, and learned in another one, stay learned.
    """
    learned = _learned(made)
    was_frozen = dict(_parameters(model)).keys() - _learned(model).keys()
    frozen = set(common) & learned.keys() & was_frozen
    if frozen:
        frozen &= _learned(LRPEForCausalLM(copy.deepcopy(model.config))).keys()
    for name in frozen:
        learned[name].requires_grad_(False)


def _parameters(model: LRPEForCausalLM) -> list[tuple[str, nn.Parameter]]:
    """Return all parameters with their names, those of shared encodings with all names."""
    return list(model.named_parameters(remove_duplicate=False))


def _learned(model: LRPEForCausalLM) -> dict[str, nn.Parameter]:
    """Return the parameters that are not frozen."""
    return {name: own for name, own in _parameters(model) if own.requires_grad}


def _without_place(known: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> set[str]:
    """Return the names of weights that others do not have, or have in another shape."""
    return {n for n, own in known.items() if n not in wanted or wanted[n].shape != own.shape}


def _tensors(model: LRPEForCausalLM) -> dict[str, Tensor]:
    """Return all parameters and buffers, also those of shared encodings."""
    known: dict[str, Tensor] = dict(_parameters(model))
    return known | dict(model.named_buffers(remove_duplicate=False))


def _common(model: LRPEForCausalLM, made: LRPEForCausalLM) -> dict[str, Tensor]:
    """Return the weights of a model for which another one has a place."""
    known, wanted = _tensors(model), made.state_dict()
    same = wanted.keys() & (known.keys() - _without_place(known, wanted))
    return {name: known[name] for name in same}
