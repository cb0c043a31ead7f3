"""What the process that :mod:`tests.end_to_end.forked` forks has done before: it imported fairseq's
commands and read one command line, which fills the caches of hydra's parser."""

import importlib

# before the plugin, which looks for them, and before anything that sets up logging
TOOLS = ("train", "hydra_train", "validate", "preprocess", "eval_lm", "generate", "interactive")


def preload() -> None:
    """Import what every command imports sooner or later."""
    for tool in TOOLS:
        importlib.import_module(f"fairseq_cli.{tool}")
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
