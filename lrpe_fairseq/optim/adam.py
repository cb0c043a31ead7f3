"""Weight decay: ``lrpe_adam``, and parameters that fairseq's ``adam`` does not decay."""

from collections.abc import Callable, Iterable
from typing import Any

from fairseq.optim import register_optimizer
from fairseq.optim.adam import FairseqAdam, FairseqAdamConfig
from torch import nn

from lrpe_fairseq.compat.patching import replace_method
from lrpe_fairseq.errors import refuse


@register_optimizer("lrpe_adam", dataclass=FairseqAdamConfig)
class LRPEAdam(FairseqAdam):
    """``adam`` (decoupled weight decay) that decays neither vectors nor parameters of angles.

    It decays parameters of two or more dimensions, as DeiT's code does, which TMLR LRPE used for
    images: neither biases nor weights of norms. It does not decay what an encoding creates
    by ``parameters.undecayed``: angles, frequencies and generators of rotations. ``adam`` decays
    them: an angle without a gradient shrinks by the factor exp(-sum over updates of rate x decay).
    Learned absolute positions are a matrix and are decayed, as in the authors' model; DeiT's own
    excludes them. Options are those of ``adam``. The rate is the same for all parameters.

    Trap: ``--fp16`` joins all parameters into one vector, which hides their dimensions.
    Raises: Refusal in this case.
    """

    def __init__(self, cfg: Any, params: Iterable[nn.Parameter]) -> None:
        params = list(params)
        if all(p.dim() <= 1 for p in params):
            refuse(
                "lrpe_adam decays matrices only, and this training flattens all parameters into "
                "vectors: add --fp16-no-flatten-grads to --fp16, or use --bf16"
            )
        super().__init__(cfg, groups(params, lambda p: p.dim() > 1 and _mark(p) is None))


def groups(
    params: Iterable[nn.Parameter], decayed: Callable[[nn.Parameter], bool]
) -> list[dict[str, Any]]:
    """Return torch's two parameter groups: those that are decayed and those that are not."""
    params = list(params)
    kept = [p for p in params if not decayed(p)]
    # a group has the optimizer's own decay unless it says another
    return [{"params": [p for p in params if decayed(p)]}, {"params": kept, "weight_decay": 0.0}]


def spare_marked_parameters() -> None:
    """Make fairseq's ``adam`` leave parameters marked with ``by_any_adam`` without weight decay.

    Trap: ``--fp16`` without ``--fp16-no-flatten-grads`` joins them with all others and decays them.
    """
    replace_method(FairseqAdam, "__init__", _start_sparing)
    replace_method(FairseqAdam, "load_state_dict", _load_sparing)


def _start_sparing(original: Callable, self: FairseqAdam, cfg: Any, params: Iterable[Any]) -> None:
    params = list(params)
    # they may be groups already, of a subclass such as LRPEAdam
    if any(_spared(p) for p in params if isinstance(p, nn.Parameter)):
        params = groups(params, lambda p: not _spared(p))
    original(self, cfg, params)


def _load_sparing(original: Callable, self: FairseqAdam, *args: Any, **overrides: Any) -> None:
    original(self, *args, **overrides)
    for group in self.param_groups[1:]:
        group["weight_decay"] = 0.0  # which --optimizer-overrides sets in all groups


def _mark(parameter: nn.Parameter) -> dict[str, Any] | None:
    """Return what ``undecayed`` noted on a parameter of an encoding, None for other parameters."""
    return getattr(parameter, "optim_overrides", {}).get("optimizer")


def _spared(parameter: nn.Parameter) -> bool:
    return bool((_mark(parameter) or {}).get("any_adam"))


spare_marked_parameters()
