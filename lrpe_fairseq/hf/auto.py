"""Classes of this package in the tables with which transformers finds classes."""

import transformers
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

CODE = "modeling_lrpe"
"""The module beside the weights that ``trust_remote_code`` loads."""


def register_causal_lm(config: type[PretrainedConfig], model: type[PreTrainedModel]) -> None:
    """Let ``AutoConfig`` and ``AutoModelForCausalLM`` load a language model.

    With label smoothing, ``transformers.Trainer`` shifts the labels of classes whose names are in
    the table of causal models, which ``AutoModelForCausalLM.register`` does not extend. Without
    the name, a training would teach the model to repeat the present token.
    """
    transformers.AutoConfig.register(config.model_type, config, exist_ok=True)
    transformers.AutoModelForCausalLM.register(config, model, exist_ok=True)
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type] = model.__name__
