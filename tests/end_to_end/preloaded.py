"""What the fork server does for the tests beyond importing fairseq: it imports what the first
optimizer does, and reads one command line, which fills the caches of hydra's parser."""


def preload() -> None:
    """Do what every command does sooner or later."""
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
