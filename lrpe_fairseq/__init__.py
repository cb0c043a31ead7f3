"""Relative positional encodings for linear and softmax transformers, as a fairseq plugin.

``fairseq-train ... --user-dir lrpe_fairseq`` imports this package, which registers the models
and the tasks.
Without fairseq, ``lrpe_fairseq.encodings`` and ``lrpe_fairseq.attention`` work on their own.
"""

import logging
from importlib.util import find_spec

if find_spec("fairseq") is not None:
    # on import its speech task asks for tensorboardX, which nothing here needs
    logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)

    from lrpe_fairseq import compat, preemption

    compat.apply()
    preemption.apply()

    from lrpe_fairseq import models, tasks  # noqa: F401  (registers archs and tasks)
