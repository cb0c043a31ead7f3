"""What the examples share: a model and a text, the loss on it, and a training."""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all examples have."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("model", help="folder or name of a model of transformers")
    made.add_argument("text", type=Path, help="a text; its last tenth is for validation")
    made.add_argument("folder", type=Path, help="of checkpoints, and of the model in the end")
    made.add_argument("--gguf", metavar="FILE", help="a GGUF file in the folder of the model")
    made.add_argument("--updates", type=int, default=30, help="default: 30")
    made.add_argument("--tokens", type=int, default=256, help="of a block (default: 256)")
    made.add_argument("--lr", type=float, default=1e-4, help="learning rate (default: 1e-4)")
    return made


def load(options: argparse.Namespace) -> tuple[PreTrainedModel, Any, Tensor]:
    """Return model and tokenizer in float32, and the text as blocks of tokens, int64 (N, T)."""
    given = {"gguf_file": options.gguf} if options.gguf else {}
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32, **given)
    tokenizer = AutoTokenizer.from_pretrained(options.model, **given)
    text = options.text.read_text(encoding="utf-8")
    tokens = torch.tensor(tokenizer(text).input_ids)
    whole = len(tokens) // options.tokens
    if whole < 2:
        raise SystemExit(f"{options.text} has {len(tokens)} tokens: give at least two blocks")
    return model, tokenizer, tokens[: whole * options.tokens].view(whole, -1)


def split(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the blocks of training and those of validation, the last tenth, at least one."""
    last = max(1, len(blocks) // 10)
    return blocks[:-last], blocks[-last:]


@torch.no_grad()
def loss(model: PreTrainedModel, blocks: Tensor) -> float:
    """Return the mean loss per token of blocks (N, T), in nats."""
    training = model.training
    model.eval()
    losses = [
        float(model(block[None], labels=block[None], use_cache=False).loss) for block in blocks
    ]
    model.train(training)
    return sum(losses) / len(losses)


def train(model: PreTrainedModel, blocks: Tensor, options: argparse.Namespace) -> None:
    """Train all parameters, two blocks an update; continue from a checkpoint in the folder."""
    arguments = TrainingArguments(
        str(options.folder / "training"),
        max_steps=options.updates,
        learning_rate=options.lr,
        per_device_train_batch_size=2,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=options.updates // 10,
        logging_steps=max(1, options.updates // 5),
        save_steps=max(1, options.updates // 2),
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    rows = [{"input_ids": block, "labels": block} for block in blocks]
    trainer = Trainer(model, arguments, train_dataset=rows)
    started = any((options.folder / "training").glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=started)


def compare(
    options: argparse.Namespace, layers: list[int] | None, changes: dict[str, Any]
) -> dict[str, float]:
    """Convert a model, train it, write it to the folder, and print its losses beside each other."""
    from lrpe_fairseq import hf

    model, tokenizer, blocks = load(options)
    training, validation = split(blocks)
    found = {"pretrained": loss(model, validation)}
    hf.convert(model, layers=layers, **changes)
    found["converted"] = loss(model, validation)
    train(model, training, options)
    found["trained"] = loss(model, validation)
    model.save_pretrained(options.folder)
    tokenizer.save_pretrained(options.folder)
    for name, value in found.items():
        print(f"{name}: a loss of {value:.4f} on {validation.numel()} tokens")
    return found
