"""What the fork server of the tests does once: it imports fairseq and what the first optimizer
does, and reads one command line, which fills the caches of hydra's parser.

It leaves the process group of pytest: a signal to that group, such as that of ``timeout``, would
end the server before its children have stopped."""

import importlib
import logging
import os
import warnings

TOOLS = ("train", "hydra_train", "validate", "preprocess", "eval_lm", "generate", "interactive")


def preload() -> None:
    """Do what every command does sooner or later."""
    os.setpgid(0, 0)
    # Its import logs a request for tensorboardX, which is not needed.
    logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hydra warns that fairseq gives no version_base
        for tool in TOOLS:  # before the plugin, which patches them
            importlib.import_module(f"fairseq_cli.{tool}")
        importlib.import_module("lrpe_fairseq.models")
    import torch._dynamo  # torch.optim imports it when the first optimizer is made
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    import lrpe_fairseq

    torch.set_num_threads(1)
    model = ["--task", "language_modeling", "--arch", "lrpe_lm_tiny", "--optimizer", "adam"]
    line = ["data", "--user-dir", lrpe_fairseq.__path__[0], *model]
    parser = options.get_training_parser()
    convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, line))


preload()
