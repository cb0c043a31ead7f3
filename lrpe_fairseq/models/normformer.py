"""NormFormer (Shleifer et al., 2021): more norms and scales in the layers of ``lrpe_lm``.

fairseq's decoder layer builds these parts, but reads their options from a configuration that has
none of them, unless the model is built from an ``argparse.Namespace``. Stock ``transformer_lm`` and
older versions of ``lrpe_lm`` therefore ignore the options of a command line and of a YAML.
"""

import logging
from typing import Any

from omegaconf import DictConfig, open_dict

from lrpe_fairseq.stock import NORMFORMER

logger = logging.getLogger(__name__)


def add_options(cfg: Any, options: Any) -> None:
    """Give ``cfg``, a TransformerConfig, the options of NormFormer that fairseq's layer reads."""
    for name in NORMFORMER:
        setattr(cfg, name, bool(getattr(options, name, False)))


def reset_unbuilt(path: str, state: dict[str, Any]) -> None:
    """Reset options of NormFormer in an older checkpoint that was trained without these parts.

    With them the model would not fit its weights. state: the checkpoint, changed in place.
    """
    model = state["cfg"].get("model")
    if not isinstance(model, DictConfig) or not str(model.get("_name")).startswith("lrpe_lm"):
        return
    weights = [name.split(".") for name in state.get("model") or {}]
    for option, part in NORMFORMER.items():
        # a part of a layer is one word of the name of its weights
        if model.get(option) and not any(part in name for name in weights):
            logger.warning(
                "%s has %s=True, which was ignored when it was trained: it is read without",
                path,
                option,
            )
            with open_dict(model):
                model[option] = False
