"""Names that fairseq uses and numpy removed."""

from types import SimpleNamespace

import numpy as np


def restore_numpy_names() -> None:
    """Restore three names that fairseq uses and numpy removed.

    Break: ``np.compat.long`` (``token_block_dataset.py`` for ``--sample-break-mode eos``,
    ``language_pair_dataset.py`` for ``--num-batch-buckets``), ``np.int`` (``data_utils.py``, span
    masks) and ``np.float`` (``dynamic_crf_layer.py``) raise AttributeError. They were aliases of
    builtins, so the builtins replace them. Existing names are not changed. (Span masks without
    overlap stay broken: fairseq calls ``randint`` of numpy's new generator, which has none.)
    """
    if not hasattr(np, "compat"):
        np.compat = SimpleNamespace()
    removed = (
        (np.compat, "long", int),
        (np, "int", int),
        (np, "float", float),
    )
    # set on numpy itself: fairseq's modules read these names when they run
    for owner, name, builtin in removed:
        if not hasattr(owner, name):
            setattr(owner, name, builtin)
