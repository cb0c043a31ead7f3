"""The text of an option is data, not code."""

import sys

from lrpe_fairseq.literals import evaluate_literal

EVALUATING_MODULES = (
    "fairseq.criterions.ctc",
    "fairseq.data.audio.raw_audio_dataset",
    "fairseq.data.codedataset",
    "fairseq.models.fconv",
    "fairseq.models.fconv_lm",
    "fairseq.models.fconv_self_att",
    "fairseq.models.hubert.hubert",
    "fairseq.models.lightconv_lm",
    "fairseq.models.speech_to_text.s2t_wav_transformer",
    "fairseq.models.transformer_lm",
    "fairseq.models.wav2vec.wav2vec",
    "fairseq.models.wav2vec.wav2vec2",
    "fairseq.optim.adafactor",
    "fairseq.optim.adam",
    "fairseq.optim.adamax",
    "fairseq.optim.cpu_adam",
    "fairseq.optim.fused_lamb",
    "fairseq.utils",
)
"""The fairseq modules that call eval() on the text of an option."""


def evaluate_options_as_literals() -> None:
    """Prevent fairseq from running the text of an option as code.

    Break: fairseq calls ``eval`` on option strings (``utils.eval_str_list`` for
    ``--adaptive-softmax-cutoff``, ``fconv`` for ``--encoder-layers``, ...), and a checkpoint
    contains options. A cutoff of ``__import__('os').system(...)`` runs when the model is built,
    even under safe loading. Each of those modules gets its own ``eval``, which accepts literals and
    arithmetic (``[(512, 3)] * 20``) and refuses everything else. The builtin is not changed, nor
    is the ``eval`` of ``--model-overrides`` in the command-line tools, which the user types.
    """
    for name in EVALUATING_MODULES:
        module = sys.modules.get(name)
        if module is not None:
            # a global of the module comes before the builtin of the same name
            vars(module).setdefault("eval", evaluate_literal)
