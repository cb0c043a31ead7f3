"""Models of this package in transformers. fairseq is not needed.

After ``import lrpe_fairseq.hf``, ``AutoModelForCausalLM.from_pretrained(FOLDER)`` loads a folder
that :func:`export` wrote; docs/huggingface.md.
"""

from lrpe_fairseq.errors import install_command

try:
    import transformers
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "lrpe_fairseq.hf needs transformers 5 or later: pip install 'transformers>=5', or "
        f"{install_command('hf')}",
        name=error.name,
    ) from None

from lrpe_fairseq.hf.auto import register_causal_lm
from lrpe_fairseq.hf.config import LRPEConfig
from lrpe_fairseq.hf.convert import convert
from lrpe_fairseq.hf.converted import register
from lrpe_fairseq.hf.export import export
from lrpe_fairseq.hf.families import plan
from lrpe_fairseq.hf.folding import fold_back
from lrpe_fairseq.hf.model import LRPEForCausalLM, LRPEForMaskedLM, LRPEModel

__all__ = [
    "LRPEConfig",
    "LRPEForCausalLM",
    "LRPEForMaskedLM",
    "LRPEModel",
    "convert",
    "export",
    "fold_back",
    "plan",
]

register_causal_lm(LRPEConfig, LRPEForCausalLM)
transformers.AutoModel.register(LRPEConfig, LRPEModel, exist_ok=True)
transformers.AutoModelForMaskedLM.register(LRPEConfig, LRPEForMaskedLM, exist_ok=True)
register()
