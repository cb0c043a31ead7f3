"""RoBERTa pre-training runs: :class:`TrainingRun` scored by masked-language-model loss."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lrpe_fairseq.experiments.records import checkpoints
from lrpe_fairseq.experiments.records.runs import Run
from lrpe_fairseq.experiments.runner.processes import Children
from lrpe_fairseq.experiments.runner.training import (
    BIN,
    Devices,
    RunFailed,
    TrainingRun,
    relative,
    run_child,
)

MASKED = "masked"
MASK_SEED = 1
PROTOCOL = {
    MASKED: "fairseq-validate over non-overlapping blocks; 15 % of the tokens are predicted, the "
    f"same ones of every model (mask seed {MASK_SEED}). The loss is in bits per predicted token."
}


@dataclass(frozen=True)
class PretrainingRun(TrainingRun):
    """One masked language model."""

    family: ClassVar[str] = "roberta"
    evaluations: tuple[tuple[str, str], ...] = (("valid", MASKED), ("test", MASKED))

    def validation_command(self, split: str) -> list[str]:
        """fairseq-validate of the best checkpoint on one split, with the masks of all models."""
        return [
            str(BIN / "fairseq-validate"),
            relative(self.data / "bin"),
            *("--user-dir", "lrpe_fairseq"),
            *("--task", "masked_lm"),
            *("--path", relative(self.checkpoints / checkpoints.BEST)),
            *("--valid-subset", split),
            *("--max-tokens", str(self.settings().dataset.max_tokens)),
            *("--required-batch-size-multiple", "1"),
            *("--model-overrides", f"{{'seed': {MASK_SEED}}}"),
            *("--num-workers", "0"),
            *("--log-format", "json"),
        ]

    def measure(self, children: Children, devices: Devices, lock: int) -> Run:
        """Loss and perplexity of every split of ``evaluations``."""
        metrics: Run = {}
        for split, protocol in self.evaluations:
            log = self.folder / f"eval-{split}-{protocol}.log"
            log.unlink(missing_ok=True)
            run_child(children, self.validation_command(split), log, devices, lock)
            metrics.setdefault(split, {})[protocol] = read_validation(log, split)
        return {"metrics": metrics, "protocol": PROTOCOL}


def read_validation(log: Path, split: str) -> dict[str, float]:
    """``loss`` (bits) and ``ppl`` from what fairseq-validate printed.

    Raises: RunFailed if it printed none.
    """
    found = re.findall(rf"\| {split} \| (\{{.*\}})", log.read_text(encoding="utf-8"))
    if not found:
        raise RunFailed(f"fairseq-validate printed no loss of {split} ({log})")
    loss = float(json.loads(found[-1])[f"{split}_loss"])
    return {"loss": loss, "ppl": 2**loss}
