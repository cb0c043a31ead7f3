"""fairseq criterions that stock fairseq does not have."""

from lrpe_fairseq.criterions import (  # noqa: F401  (registers the criterions)
    classification,
    without_logits,
)
