"""``lrpe_adam``: fairseq's Adam, with weight decay for matrices only."""

from collections.abc import Iterable
from typing import Any

from fairseq.optim import register_optimizer
from fairseq.optim.adam import FairseqAdam, FairseqAdamConfig
from torch import nn

from lrpe_fairseq.errors import refuse


@register_optimizer("lrpe_adam", dataclass=FairseqAdamConfig)
class LRPEAdam(FairseqAdam):
    """``adam`` (decoupled weight decay) that decays parameters of two or more dimensions only.

    DeiT's code, which TMLR LRPE used for images, decays the same ones. Biases, weights of norms and
    learned angles of encodings have one dimension. ``adam`` decays them too: an angle without a
    gradient shrinks by the factor exp(-sum over updates of rate x decay). Learned absolute
    positions are a matrix and are decayed, as in the authors' model; DeiT's own excludes them.
    Options are those of ``adam``. The rate is the same for all parameters.

    Trap: ``--fp16`` joins all parameters into one vector, which hides their dimensions.
    Raises: Refusal in this case.
    """

    def __init__(self, cfg: Any, params: Iterable[nn.Parameter]) -> None:
        super().__init__(cfg, groups(params))

    def load_state_dict(self, state_dict: dict, optimizer_overrides: dict | None = None) -> None:
        """Load a state; ``--optimizer-overrides`` changes the weight decay of matrices only."""
        super().load_state_dict(state_dict, optimizer_overrides)
        self.param_groups[1]["weight_decay"] = 0.0


def groups(params: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Return torch's two parameter groups: matrices, then parameters that are not decayed.

    Raises: Refusal if there are no matrices, because the parameters were flattened.
    """
    params = list(params)
    matrices = [p for p in params if p.dim() > 1]
    if not matrices:
        refuse(
            "lrpe_adam decays matrices only, and this training flattens all parameters into "
            "vectors: add --fp16-no-flatten-grads to --fp16, or use --bf16"
        )
    vectors = [p for p in params if p.dim() <= 1]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
