"""RoBERTa pre-training runs: :class:`TrainingRun` scored by masked-language-model loss."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lrpe_fairseq.experiments.records import fairseq_log
from lrpe_fairseq.experiments.records.runs import Run
from lrpe_fairseq.experiments.runner.training import Shell, TrainingRun, parse_validation

MASKED = "masked"
MASK_SEED = 1
EXACT_ABOVE = 0.005 / (0.0005 * math.log(2))
"""The perplexity where both of fairseq's rounded numbers have the same relative error."""
PROTOCOL = {
    MASKED: "fairseq-validate over non-overlapping blocks; 15 % of the tokens are predicted, the "
    f"same ones of every model (mask seed {MASK_SEED}). The loss is in bits per predicted token."
}


@dataclass(frozen=True)
class PretrainingRun(TrainingRun):
    """The pre-training and validation of one masked language model."""

    configs: ClassVar[str] = "roberta"
    task: ClassVar[str] = "masked_lm"
    data_scripts: ClassVar[Mapping[str, str]] = {
        "wikitext-2-bpe": "data-prep/wikitext/prepare.py wikitext-2 --level bpe",
        "wikitext-103-gpt2": "data-prep/wikitext/prepare.py wikitext-103 --level gpt2",
        "wikibook": "data-prep/wikibook/prepare.py",
    }
    next_step: ClassVar[str] = "fine-tune with: scripts/finetune_glue.sh {best} all"
    evaluations: tuple[tuple[str, str], ...] = (("valid", MASKED), ("test", MASKED))

    def validation_command(self, split: str) -> list[str]:
        """Return fairseq-validate of the best checkpoint on one split, with the shared masks."""
        size = str(self.settings().dataset.max_tokens)
        options = ["--max-tokens", size, "--required-batch-size-multiple", "1"]
        seed = ["--model-overrides", f"{{'seed': {MASK_SEED}}}"]
        return self.validation(self.task, split, *options, *seed)

    def measure(self, run: Shell) -> Run:
        """Return loss and perplexity of every split of ``evaluations``."""
        metrics: Run = {}
        for split, protocol in self.evaluations:
            log = self.folder / f"eval-{split}-{protocol}.log"
            run(self.validation_command(split), log)
            metrics[split] = {protocol: read_validation(log, split)}
        return {"metrics": metrics, "protocol": PROTOCOL}


def read_validation(log: Path, split: str) -> dict[str, float]:
    """Read ``loss`` (bits) and ``ppl``, or ``diverged``, from the output of fairseq-validate.

    Trap: fairseq rounds the loss to 3 decimals and its perplexity, of the loss before rounding, to
    2. Above a perplexity of about 14 the second is more exact.

    Raises: RunFailed if the output has none.
    """
    found = parse_validation(log, split)
    exact = EXACT_ABOVE < found["ppl"] < math.inf
    return fairseq_log.scored(math.log2(found["ppl"]) if exact else found["loss"])
