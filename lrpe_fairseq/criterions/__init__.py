"""fairseq criterions that stock fairseq does not have."""

from lrpe_fairseq.criterions import classification  # noqa: F401  (registers the criterion)
