"""What the fork server of :mod:`~lrpe_fairseq.experiments.runner.warm` imports, without noise."""

import importlib
import logging
import warnings

TOOLS = ("train", "hydra_train", "validate", "preprocess", "eval_lm", "generate", "interactive")

# Asks for tensorboardX on import, which nothing here needs.
logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # hydra asks fairseq for a version_base
    for tool in TOOLS:  # before the plugin, which looks for them
        importlib.import_module(f"fairseq_cli.{tool}")
    import lrpe_fairseq.models  # noqa: F401
