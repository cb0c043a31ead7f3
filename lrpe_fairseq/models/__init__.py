"""fairseq models: registration, presets and shared options. fairseq glue only."""

from lrpe_fairseq.models import (  # noqa: F401  (register the archs)
    language_model,
    masked_lm,
    translation,
)
from lrpe_fairseq.models.options import explain_bad_options
from lrpe_fairseq.models.overrides import apply_flat_overrides

explain_bad_options()
apply_flat_overrides()
