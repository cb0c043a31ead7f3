"""fairseq tasks that stock fairseq does not have."""

from lrpe_fairseq.tasks import (  # noqa: F401  (registers the tasks)
    classification,
    images,
    synthetic,
    transduction,
    truncated_bptt,
)
from lrpe_fairseq.tasks.missing_data import explain_missing_data

explain_missing_data()
