"""How often Eq. 39's denominator is below eps, for every encoding of linear attention.

    python -m benchmarks.denominators                          # random features
    python -m benchmarks.denominators --trained FOLDER DATA    # features of trained models

Random features: phi(x), x ~ N(0, 1), 8 heads of 64, 512 tokens, causal. Trained features: those
of every layer of the language models under FOLDER (each subfolder's checkpoint_best.pt,
linear attention with the normalizer ``rotated`` only) on the validation text of DATA.

Each call writes one run file, results/bench/cpu/denominators.json or denominators-trained.json;
``make docs`` renders results/settings.md from the first.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.encoding import serves_linear
from benchmarks.run import show, write
from lrpe_fairseq.attention.linear import EPS
from lrpe_fairseq.attention.multihead import MultiheadAttention, feature_map
from lrpe_fairseq.encodings import ENCODINGS, QueryKeyEncoding, build_encoding
from lrpe_fairseq.experiments.records.runs import environment

RANDOM, TRAINED = "denominators", "denominators-trained"
HEADS, WIDTH, LENGTH, DRAWS = 8, 64, 512, 20
BLOCKS = 16


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write one run file."""
    parser = argparse.ArgumentParser(prog="benchmarks.denominators")
    parser.add_argument("--trained", nargs=2, metavar=("FOLDER", "DATA"), help="measure models")
    options = parser.parse_args(arguments)
    if options.trained:
        folder, data = options.trained
        part, found = TRAINED, trained_shares(Path(folder), data)
    else:
        part, found = (
            RANDOM,
            {name: random_shares(name) for name in filter(serves_linear, ENCODINGS)},
        )
    if not found:
        parser.error(f"{folder} contains no linear model with the normalizer rotated")
    rows = [{"encoding": name, **summary(values)} for name, values in found.items()]
    show(part, rows)
    settings = {"threads": torch.get_num_threads(), "dtype": "float32"}
    write("cpu", part, {"part": part, **environment(), **settings, "rows": rows})


def summary(found: Tensor) -> dict[str, float]:
    """Return the fraction of clamped denominators and the smallest share (see :func:`shares`)."""
    return {
        "under_eps": (found <= 0).double().mean().item(),
        "smallest_share": found.min().item(),
        "denominators": found.numel(),
    }


def random_shares(name: str) -> Tensor:
    """Return the shares (see :func:`shares`) of ``DRAWS`` draws of random features."""
    encoding = build_encoding(name, WIDTH, HEADS, causal=True).eval()
    generator = torch.Generator().manual_seed(0)
    shape = (2, 1, HEADS, LENGTH, WIDTH)
    draws = (torch.randn(shape, generator=generator) for _ in range(DRAWS))
    return torch.cat([shares(encoding, q, k).flatten() for q, k in draws])


def shares(encoding: QueryKeyEncoding, q: Tensor, k: Tensor) -> Tensor:
    """Return the denominator of Eq. 39 over that of the un-encoded features, (B, H, T).

    At most 0 where the denominator is below eps. q, k (B, H, T, D) are projections before phi.
    """
    positions = torch.arange(q.shape[2])
    plain = (feature_map(q) * feature_map(k).cumsum(2)).sum(-1)
    if encoding.before_feature_map:
        q, k = (feature_map(x) for x in encoding(q, k, positions, positions))
    else:
        q, k = encoding(feature_map(q), feature_map(k), positions, positions)
    log_decay = encoding.log_decay()
    if log_decay is None:
        denominator = (q * k.cumsum(2)).sum(-1)
    else:
        lag = (positions[:, None] - positions).clamp_min(0)
        weights = q @ k.transpose(-1, -2) * torch.exp(log_decay[:, None, None] * lag)
        denominator = weights.tril().sum(-1)
    return torch.where(denominator <= EPS, torch.zeros(()), denominator / plain)


def trained_shares(folder: Path, data: str) -> dict[str, Tensor]:
    """Return the shares of every trained linear model under ``folder``, by encoding."""
    found: dict[str, list[Tensor]] = {}
    for path in sorted(folder.rglob("checkpoint_best.pt")):
        model, text = load(path, data)
        attentions = [m for m in model.modules() if isinstance(m, MultiheadAttention)]
        if attentions[0].attention_type != "linear" or attentions[0].normalizer != "rotated":
            continue
        name = model.decoder.args.position_encoding
        found.setdefault(name, []).append(shares_of_layers(model, attentions, text))
    return {name: torch.cat(parts) for name, parts in found.items()}


def shares_of_layers(
    model: torch.nn.Module, attentions: list[MultiheadAttention], text: Tensor
) -> Tensor:
    """Return the shares of all layers on ``text`` (B, T)."""
    collected = []

    def collect(module: MultiheadAttention, inputs: tuple, keywords: dict) -> None:
        x = keywords.get("query", inputs[0] if inputs else None).transpose(0, 1)
        q, k, _ = module._project(x)
        collected.append(shares(module.encoding, q, k).flatten())

    hooks = [m.register_forward_pre_hook(collect, with_kwargs=True) for m in attentions]
    with torch.no_grad():
        model(text)
    for hook in hooks:
        hook.remove()
    return torch.cat(collected)


def load(path: Path, data: str) -> tuple[torch.nn.Module, Tensor]:
    """Load the model of a checkpoint, and ``BLOCKS`` blocks of validation text (B, T)."""
    from fairseq import checkpoint_utils

    (model,), cfg, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(path)], arg_overrides={"data": data}
    )
    task.load_dataset("valid")
    dataset, length = task.dataset("valid"), cfg.task.tokens_per_sample
    whole = [
        dataset[i]["source"] for i in range(len(dataset)) if len(dataset[i]["source"]) == length
    ]
    return model.eval(), torch.stack(whole[:BLOCKS])


if __name__ == "__main__":
    main()
