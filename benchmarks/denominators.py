"""How often Eq. 39's denominator falls under eps, for every encoding: docs/denominators.md.

    python -m benchmarks.denominators [CHECKPOINT_FOLDER DATA]

Random features are phi(x), x ~ N(0, 1), 8 heads of 64, 512 tokens, causal. Trained features are
those of every layer of the language models under CHECKPOINT_FOLDER (each subfolder's
checkpoint_best.pt, linear attention only) on the validation text of DATA.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.training import serves_linear
from lrpe_fairseq.attention.linear import EPS
from lrpe_fairseq.attention.multihead import MultiheadAttention, feature_map
from lrpe_fairseq.encodings import ENCODINGS, QueryKeyEncoding, build_encoding
from lrpe_fairseq.experiments.report.readme import replace_between

PAGE = Path(__file__).resolve().parents[1] / "docs" / "denominators.md"
HEADS, WIDTH, LENGTH, DRAWS = 8, 64, 512, 20
BLOCKS = 16


def main() -> None:
    """Measure and rewrite the table of the page."""
    trained = trained_shares(Path(sys.argv[1]), sys.argv[2]) if len(sys.argv) == 3 else {}
    lines = ["| encoding | random: under eps | random: smallest share | trained: under eps | |"]
    lines += ["|---|---:|---:|---:|---|"]
    for name in filter(serves_linear, ENCODINGS):
        lines.append(f"| `{name}` | " + " | ".join(cells(random_shares(name), trained.get(name))))
    table = "\n".join(lines)
    replace_between(PAGE, "denominators", table)
    print(table)


def cells(random: Tensor, trained: Tensor | None) -> list[str]:
    """A row: share of denominators under eps, and the smallest relative to un-encoded ones."""
    under, after = share_under_eps(random), "not measured"
    if trained is not None:
        after = share_under_eps(trained)
    bad = (random <= 0).any() or (trained is not None and (trained <= 0).any())
    return [under, f"{random.min():.2f}", after, "use `layernorm` or `content` |" if bad else " |"]


def share_under_eps(found: Tensor) -> str:
    """The share of denominators that the clamp raised, in percent."""
    share = (found <= 0).double().mean().item()
    return "< 0.01%" if 0 < share < 5e-5 else f"{share:.2%}"


def random_shares(name: str) -> Tensor:
    """Shares (see :func:`shares`) of ``DRAWS`` draws of random features."""
    encoding = build_encoding(name, WIDTH, HEADS, causal=True).eval()
    generator = torch.Generator().manual_seed(0)
    shape = (2, 1, HEADS, LENGTH, WIDTH)
    draws = (torch.randn(shape, generator=generator) for _ in range(DRAWS))
    return torch.cat([shares(encoding, q, k).flatten() for q, k in draws])


def shares(encoding: QueryKeyEncoding, q: Tensor, k: Tensor) -> Tensor:
    """Denominator of Eq. 39 over that of the un-encoded features, (B, H, T).

    At most 0 where the denominator is under eps. q, k (B, H, T, D) are projections before phi.
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
    """Shares of every trained linear model under ``folder``, by encoding."""
    found: dict[str, list[Tensor]] = {}
    for path in sorted(folder.rglob("checkpoint_best.pt")):
        model, text = load(path, data)
        attentions = [m for m in model.modules() if isinstance(m, MultiheadAttention)]
        if attentions[0].attention_type != "linear" or attentions[0].normalizer != "rotated":
            continue
        name = model.decoder.args.position_encoding
        found.setdefault(name, []).append(shares_of_layers(model, attentions, text))
    return {name: torch.cat(parts) for name, parts in found.items()}


def shares_of_layers(model, attentions: list[MultiheadAttention], text: Tensor) -> Tensor:
    """Shares of all layers on ``text`` (B, T)."""
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
    """The model of a checkpoint, and ``BLOCKS`` blocks of validation text (B, T)."""
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
