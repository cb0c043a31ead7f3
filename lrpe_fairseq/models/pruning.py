"""Models that keep some layers of a larger one: ``--decoder-layers-to-keep`` and the like.

fairseq builds a model of the kept layers and prunes a checkpoint when it is loaded. A checkpoint of
the pruned model then has fewer layers than its options say, so that it can be neither evaluated nor
resumed. Here it has the options of the model that was built, and a checkpoint is pruned only if it
has more layers than the model.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

from fairseq.trainer import Trainer
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import nn

from lrpe_fairseq import patterns
from lrpe_fairseq.compat.patching import replace_method
from lrpe_fairseq.errors import refuse

SIDES = ("encoder", "decoder")


class Prunable(nn.Module):
    """Mixin for models: a checkpoint is pruned only if it has more layers than the model."""

    def load_state_dict(
        self, state_dict: dict, strict: bool = True, model_cfg: Any = None, args: Any = None
    ) -> Any:
        """Load a state dict as fairseq does, after pruning it to the layers of ``model_cfg``.

        fairseq reads flat option names only, drops the layers of a side that lists none, and clears
        the options of ``model_cfg``.
        """
        if model_cfg is not None:
            # fairseq's pruning needs any name of a model
            model_cfg = DictConfig({"_name": "lrpe", **self._to_prune(state_dict, model_cfg)})
        return super().load_state_dict(state_dict, strict, model_cfg, args)

    def _to_prune(self, state_dict: dict, cfg: Any) -> dict[str, str | None]:
        """Return fairseq's options for the layers of ``state_dict`` that this model has."""
        parameters = [name for name, _ in self.named_parameters()]
        kept_of: dict[str, list[int]] = {}
        pruned = False
        for side in SIDES:
            layers = count_layers(state_dict, side)
            listed = kept_layers(cfg, side)
            # a checkpoint of the pruned model has as many layers, and is loaded as it is
            more = layers > count_layers(parameters, side) and listed is not None
            kept_of[side] = patterns.kept(listed, layers) if more else list(range(layers))
            pruned = pruned or more
        return {
            f"{side}_layers_to_keep": ",".join(map(str, kept)) if pruned and kept else None
            for side, kept in kept_of.items()
        }


def is_ours(model: Any) -> bool:
    """True for the options of a model of this package."""
    return str(model.get("_name")).startswith("lrpe_")


def count_layers(names: Iterable[str], side: str) -> int:
    """Count the layers of the encoder or the decoder in the names of weights."""
    # the encoder of lrpe_roberta is nested: encoder.sentence_encoder.layers.0
    layer = re.compile(rf"^{side}\.(?:\w+\.)*?layers\.(\d+)\.")
    return len({match.group(1) for match in map(layer.match, names) if match})


def stack_of(cfg: Any, side: str) -> tuple[Any, str]:
    """Return the options that have the number of layers of a side, and the prefix of its name."""
    nested = getattr(cfg, side, None)
    return (cfg, f"{side}_") if nested is None else (nested, "")


def kept_layers(cfg: Any, side: str) -> Any:
    """Return the layers to keep of a side, as they were given, or None."""
    options, prefix = stack_of(cfg, side)
    return getattr(options, f"{prefix}layers_to_keep", None) or None


def built_options(model: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a model after pruning, from those that it was asked for.

    The number of layers is that of the layers to keep, patterns are those of these layers, and no
    layers are listed any more. model: a section of a configuration as plain containers.
    """
    cfg = _config(model)
    for side in SIDES:
        if kept_layers(cfg, side):
            options, prefix = stack_of(cfg, side)
            # cross-attention has a pattern over the layers of the decoder
            cross = getattr(cfg, "cross", None) if side == "decoder" else None
            prune_stack(options, prefix, [options, cross])
    return OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)


def as_built(before: dict[str, Any], now: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of two models after pruning: of a checkpoint and of a training that loads
    it.

    If the training prunes and the options of the checkpoint say nothing of it, the checkpoint is
    pruned when it is loaded, or an older version wrote it after pruning without recording it.
    """
    saved = _config(before)
    training = _config(now)
    for side in SIDES:
        listed = kept_layers(training, side)
        options, prefix = stack_of(saved, side)
        layers = getattr(options, f"{prefix}layers", 0)
        wanted, _ = stack_of(training, side)
        # with fewer layers the checkpoint says itself that it was pruned
        same = layers == getattr(wanted, f"{prefix}layers", 0)
        if listed and same and not kept_layers(saved, side):
            setattr(options, f"{prefix}layers_to_keep", listed)
    return built_options(OmegaConf.to_container(saved)), built_options(now)


def _config(model: dict[str, Any]) -> DictConfig:
    # choices are enumerations, which omegaconf takes as objects
    return OmegaConf.create(model, flags={"allow_objects": True})


def prune_stack(cfg: Any, prefix: str, patterned: list[Any]) -> None:
    """Write the options of the kept layers of one stack into ``cfg``, in place.

    prefix: of ``layers`` and ``layers_to_keep`` in ``cfg``. patterned: the options with patterns
    over this stack; None is skipped. Raises: ChoiceError for a layer that is not there.
    """
    layers = getattr(cfg, f"{prefix}layers")
    listed = getattr(cfg, f"{prefix}layers_to_keep")
    for options in patterned:
        if options is not None:
            keep_patterns(options, layers, listed)
    setattr(cfg, f"{prefix}layers", len(patterns.kept(listed, layers)))
    setattr(cfg, f"{prefix}layers_to_keep", None)


def keep_patterns(options: Any, layers: int, listed: Any) -> None:
    """Write the patterns of the layers that are kept of a stack, in full, into its options.

    listed: as in :func:`lrpe_fairseq.patterns.kept`; nothing changes without any.
    Raises: ChoiceError for a layer that is not there.
    """
    if not listed:
        return
    indices = patterns.kept(listed, layers)
    for name in patterns.OPTIONS:
        pattern = getattr(options, name, "0")
        if len(patterns.values(pattern)) > 1:
            # in full: what is left of a pattern may not repeat
            every = patterns.over_layers(pattern, layers)
            setattr(options, name, ",".join(every[layer] for layer in indices))


def record_built_options() -> None:
    """Let checkpoints of our models have the options of what was built. Once."""
    replace_method(Trainer, "state_dict", _state_of_built_model)


def _state_of_built_model(original: Callable, self: Trainer) -> dict[str, Any]:
    state = original(self)
    model = state["cfg"].get("model") if isinstance(state["cfg"], dict) else None
    if isinstance(model, dict) and is_ours(model):
        # a copy: the trainer's own configuration stays as it was asked for
        state["cfg"] = {**state["cfg"], "model": built_options(model)}
    return state


def complete_pruned(path: str, state: dict[str, Any]) -> None:
    """Correct the number of layers in an older checkpoint of a pruned model, in place.

    Raises: Refusal if its options have patterns, because it does not say which layers were kept.
    """
    model = state["cfg"].get("model")
    if not isinstance(model, DictConfig) or not is_ours(model):
        return
    for side in SIDES:
        layers = model.get(f"{side}_layers")
        saved = count_layers(state.get("model") or (), side)
        # no such side, all layers, or a checkpoint that fairseq itself prunes
        if not layers or not 0 < saved < layers or kept_layers(model, side):
            continue
        unknown = [n for n in patterns.OPTIONS if len(patterns.values(model.get(n, "0"))) > 1]
        if unknown:
            overrides = ", ".join(
                [f"'{side}_layers': {saved}", *(f"'{n}': '...'" for n in unknown)]
            )
            refuse(
                f"{path} has {saved} of {layers} layers and does not say which: pass "
                f'--model-overrides "{{{overrides}}}" with the values of these layers'
            )
        with open_dict(model):
            model[f"{side}_layers"] = saved
