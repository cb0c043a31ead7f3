"""Ways to generate that states of attention do not serve."""

from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig

REFUSED = {
    "assistant_model": "decoding with an assistant",
    "prompt_lookup_num_tokens": "prompt lookup",
    "assistant_early_exit": "decoding with an early exit as assistant",
    "penalty_alpha": "contrastive search",
}
"""Arguments of ``generate`` that need a cache whose last tokens can be removed."""


def refuse_generation(config: GenerationConfig, keywords: Mapping[str, Any]) -> None:
    """Check the arguments of ``generate``.

    Raises: ValueError, one sentence, for contrastive search, an assistant, prompt lookup or another
        cache than the dynamic one.
    """
    for name, what in REFUSED.items():
        if keywords.get(name, getattr(config, name, None)):
            raise ValueError(
                f"{what} is not supported, because states of attention cannot forget the last "
                f"tokens: leave out {name}"
            )
    kind = keywords.get("cache_implementation", config.cache_implementation)
    if kind not in (None, "dynamic", "dynamic_full"):
        raise ValueError(
            f"a cache that is {kind} cannot hold the states of lrpe_fairseq's attention: leave "
            "out cache_implementation"
        )
