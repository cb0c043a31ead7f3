"""Imports of the fork server of :mod:`~lrpe_fairseq.experiments.runner.warm`, without warnings.

Only the server imports this module: it leaves the process group of the runner. A signal to that
group, such as that of ``timeout``, would end the server before the runner has stopped its children.
"""

import importlib
import logging
import os
import warnings

os.setpgid(0, 0)

TOOLS = ("train", "hydra_train", "validate", "preprocess", "eval_lm", "generate", "interactive")

# Its import logs a request for tensorboardX, which is not needed.
logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # hydra warns that fairseq gives no version_base
    for tool in TOOLS:  # before the plugin, which patches them
        importlib.import_module(f"fairseq_cli.{tool}")
    import lrpe_fairseq.models  # noqa: F401
