"""What the fork server of :mod:`~lrpe_fairseq.experiments.runner.warm` imports, without noise."""

import logging
import warnings

# Asks for tensorboardX on import, which nothing here needs.
logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # hydra asks fairseq for a version_base
    import fairseq_cli.eval_lm
    import fairseq_cli.hydra_train  # noqa: F401

    import lrpe_fairseq.models  # noqa: F401
