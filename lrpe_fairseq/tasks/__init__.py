"""fairseq tasks that stock fairseq does not have."""

from lrpe_fairseq.tasks import (  # noqa: F401  (registers the tasks)
    classification,
    images,
    synthetic,
    transduction,
    truncated_bptt,
)
