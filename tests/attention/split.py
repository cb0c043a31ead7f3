"""Processes that compute attention of parts of a text, and compare with the whole.

``python -m tests.attention.split RANK SIZE FOLDER`` is one process; it computes all cases, because
starting processes takes longer than computing.
"""

import contextlib
import json
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.attention.parallel import sequence_parallel
from lrpe_fairseq.encodings import QueryKeyEncoding
from tests.test_every_encoding import NAMES, encoding_of, parts_of, serves

BATCH, WIDTH, HEADS = 2, 16, 2
SHARDED = "fully_shard"
LENGTH = 13
"""Neither 2 nor 4 divides it."""


@dataclass(frozen=True)
class Case:
    """A stack of layers and its text."""

    name: str
    attention_type: str
    masks: str = ""
    """Of the text: "padding", "documents", both separated by a space, or "positions"."""
    length: int = LENGTH
    layers: int = 1
    options: dict = field(default_factory=dict)

    @property
    def id(self) -> str:
        """The case in one word."""
        more = ",".join(f"{key}={value}" for key, value in self.options.items())
        text = self.masks.replace(" ", "+")
        found = (self.name, self.attention_type, text, more, f"{self.length}x{self.layers}")
        return "-".join(part for part in found if part)


TYPES = ("linear", "softmax")
DECOMPOSABLE = [n for n in NAMES if n != "multiplicative"]
DECOMPOSABLE = [n for n in DECOMPOSABLE if isinstance(encoding_of(n), QueryKeyEncoding)]
SCORES = [n for n in NAMES if n not in DECOMPOSABLE and n != "multiplicative"]
MASKS = ("", "documents", "padding", "padding documents")


EVERY_NAME = [
    Case(name, attention_type, masks)
    for turn, (name, attention_type) in enumerate(
        (n, t)
        for n in DECOMPOSABLE + SCORES
        for t in TYPES
        if serves(n, t) and not encoding_of(n).unsplit
    )
    for masks in ("", MASKS[1 + turn % 3])
]
NORMALIZED = [
    Case(name, "linear", masks, options={"normalizer": normalizer})
    for normalizer in ("bounded", "content", "layernorm", "none")
    for name in ("lrpe-type2", "alibi", "gated:path:lrpe-type2", "gated:delta")
    for masks in ("", "padding documents")
]
WINDOWS = [
    Case(name, attention_type, masks, options={"window": 4, **options})
    for attention_type, options in [("linear", {"normalizer": "bounded"}), ("softmax", {})]
    for name in ("rope", "fox", "path", "delta")
    for masks in ("", "padding documents")
    if serves(name, attention_type)
]
PARTS = [
    Case(name, attention_type, masks, options={"parts": "kv-shift,qk-norm,output-gate"})
    for attention_type in TYPES
    for name in ("fox", "path")
    for masks in ("", "padding documents")
]
SHORT = [
    Case(name, attention_type, masks, length=length)
    for attention_type in TYPES
    for name in ("gated:path:lrpe-type2", "selective:rope")
    for masks in ("", "padding documents")
    for length in (4, 5)
]
"""Parts that are shorter than a causal filter."""
PLACED = [Case(name, t, "positions") for t in TYPES for name in ("rope", "ape-tree", "alibi")]
STACKS = [
    Case(name, "hybrid", masks, layers=3)
    for name in ("lrpe-type2", "fox", "gated:path:lrpe-type2", "selective:rope")
    for masks in ("", "padding documents")
]
BY_HEAD = [n for n in NAMES if encoding_of(n).keys_by_head and not encoding_of(n).unsplit]
WINDOW = {"window": 3, "normalizer": "bounded"}
GROUPED = [
    Case(name, attention_type, MASKS[turn % 4], options={"num_kv_heads": 1, **options})
    for turn, name in enumerate(BY_HEAD)
    for attention_type, options in [("softmax", {}), ("linear", WINDOW)]
    if serves(name, attention_type)
]
"""Heads that share keys before the encoding, and have keys of their own behind it."""
CASES = {
    case.id: case
    for cases in (EVERY_NAME, NORMALIZED, WINDOWS, PARTS, SHORT, PLACED, STACKS, GROUPED)
    for case in cases
}


def layers_of(case: Case) -> list[MultiheadAttention]:
    """The layers of a case; those of a hybrid stack alternate."""
    name, options = parts_of(case.name)
    kinds = [case.attention_type] * case.layers
    kinds = ["linear", "softmax", "linear"] if case.attention_type == "hybrid" else kinds
    torch.manual_seed(0)
    found = []
    for kind in kinds:
        own = {"normalizer": "layernorm"} if case.layers > 1 else {}
        own |= {"causal": True, "attention_type": kind, "options": options, **case.options}
        layer = MultiheadAttention(WIDTH, HEADS, position_encoding=name, **own).double().eval()
        for parameter in layer.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)  # tables that start at zero
        found.append(layer)
    if divides_by_almost_zero(found[0], case):
        found[0].normalizer = "none"
    return found


def divides_by_almost_zero(layer: MultiheadAttention, case: Case) -> bool:
    """True if a denominator of Eq. 39 is so small that the quotient has no 12 digits."""
    if not layer.has_denominators:
        return False
    x, _, masks = text_of(case)
    layer.given.starts = masks.get("starts")  # a document has denominators of its own
    with torch.no_grad():
        least = layer.denominators(x).min().item()
    layer.given.starts = None
    return least < 0.1


def text_of(case: Case) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The input of a case, the weights of its loss, and the masks, all of the whole text."""
    generator = torch.Generator().manual_seed(case.length)
    shape = (BATCH, case.length, WIDTH)
    x, weight = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    masks, lots = {}, torch.rand((2, *shape[:2]), generator=generator)
    if "padding" in case.masks:
        masks["key_padding_mask"] = lots[0] < 0.25
        weight = weight.masked_fill(masks["key_padding_mask"].unsqueeze(-1), 0.0)
    if "documents" in case.masks:
        masks["starts"] = lots[1] < 0.2
    if case.masks == "positions":
        masks["positions"] = torch.randperm(case.length, generator=generator) + 3
    return x, weight, masks


def outcome(case: Case, sequence=None) -> dict[str, torch.Tensor]:
    """Output, gradient of x and gradients of the parameters, of this rank's part or of the whole.

    Gradients of parameters are summed over the ranks.
    """
    layers, (x, weight, masks) = layers_of(case), text_of(case)
    if sequence is not None:
        x, weight = sequence.part(x), sequence.part(weight)
        masks = {k: sequence.part(mask, dim=mask.dim() - 1) for k, mask in masks.items()}
    x = x.clone().requires_grad_()
    out = x
    for layer in layers:
        out = out + layer.attend(out, **masks)[0]
    (out.sin() * weight).sum().backward()
    found = {"out": out.detach() * weight.ne(0), "grad of x": x.grad}
    names, parameters = zip(*torch.nn.ModuleList(layers).named_parameters(), strict=True)
    grads = [p.new_zeros(p.shape) if p.grad is None else p.grad for p in parameters]
    if sequence is not None:
        every = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(every)
        pieces = every.split([grad.numel() for grad in grads])
        grads = [piece.view_as(grad) for piece, grad in zip(pieces, grads, strict=True)]
    return found | {f"grad of {name}": grad for name, grad in zip(names, grads, strict=True)}


def differences(case: Case) -> dict[str, float]:
    """The largest error of each result, divided by its largest number or 1."""
    whole, errors = outcome(case), {}
    with sequence_parallel(length=case.length) as sequence:
        found = outcome(case, sequence)
    errors["sent"] = sequence.sent
    for name, ours in found.items():
        theirs = whole[name]
        scale = max(1.0, theirs.abs().max().item())
        theirs = sequence.part(theirs) if name in ("out", "grad of x") else theirs
        errors[name] = (ours - theirs).abs().max().item() / scale
    return errors


class Block(nn.Module):
    """A layer of plain modules, as FSDP2 shards them."""

    def __init__(self, attention_type: str, name: str) -> None:
        super().__init__()
        options = {"attention_type": attention_type, "position_encoding": name, "causal": True}
        self.attention = MultiheadAttention(WIDTH, HEADS, normalizer="layernorm", **options)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, C) -> (B, T, C)."""
        return x + self.out(self.attention.attend(x)[0])


BLOCKS = (("linear", "lrpe-type2"), ("softmax", "fox"), ("linear", "path"), ("softmax", "t5"))


def sharded_differences(rank: int, size: int) -> dict[str, float]:
    """The largest errors of gradients under ``fully_shard``: of rows, and of parts of a text."""
    x = torch.randn(
        size, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    whole = _blocks()
    whole(x).sin().sum().backward()
    found, mesh = {}, init_device_mesh("cpu", (size,))
    for what in ("rows", "text"):
        model = _blocks()
        for part in (*model, model):
            fully_shard(part, mesh=mesh)
        with contextlib.ExitStack() as stack:
            own = x[rank : rank + 1]
            if what == "text":
                own = stack.enter_context(sequence_parallel(length=LENGTH)).part(x)
            model(own).sin().sum().backward()
        pairs = zip(model.parameters(), whole.parameters(), strict=True)
        errors = (ours.grad.full_tensor() * size - theirs.grad for ours, theirs in pairs)
        found[what] = max(error.abs().max().item() for error in errors)
    return found


def _blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(*pair) for pair in BLOCKS)).double()


def main(rank: int, size: int, folder: Path) -> None:
    """Compute the cases that ``cases.json`` names, and write the errors of this rank."""
    torch.set_num_threads(1)
    where = f"file://{folder}/group{size}"
    limit = timedelta(seconds=240)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size, timeout=limit)
    found = {}
    for name in json.loads((folder / "cases.json").read_text()):
        try:
            found[name] = differences(CASES[name])
        except Exception as error:  # all ranks fail alike, or the test ends
            found[name] = {f"{type(error).__name__}: {error}": float("inf")}
    found[SHARDED] = sharded_differences(rank, size)
    (folder / f"{size}-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
