"""Untrained models of fairseq, their checkpoints, and what an export makes of them.

A module that imports this one is skipped where transformers is absent.
"""

import copy
import functools
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("transformers", reason="the extra [hf] is not installed")

import torch
from fairseq import tasks
from fairseq.models import BaseFairseqModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel
from transformers.utils import logging

from lrpe_fairseq import hf
from tests.end_to_end.commands import PLUGIN, SMALL, TRAINING, configured, save

logging.disable_progress_bar()
logging.set_verbosity_error()

EOS, WORDS = 2, 20
ROBERTA = (
    f"--user-dir {PLUGIN} --task masked_lm --tokens-per-sample 32 --optimizer adam --lr 3e-3 "
    "--arch lrpe_roberta_tiny --encoder-layers 2 --encoder-embed-dim 32 --encoder-ffn-embed-dim 64 "
    "--criterion masked_lm --dropout 0 --attention-dropout 0"
)


class Exported(NamedTuple):
    """A model of fairseq, the exported one, and the folder that it was loaded from."""

    fairseq: BaseFairseqModel
    model: PreTrainedModel
    folder: Path


@functools.cache
def home() -> Path:
    """A folder that lives as long as this process."""
    kept = tempfile.TemporaryDirectory(prefix="lrpe-hf-")
    home.kept = kept
    return Path(kept.name)


@functools.cache
def data() -> Path:
    """A data folder with a dictionary of 20 words and no text."""
    folder = home() / "data" / "bin"
    folder.mkdir(parents=True)
    (folder / "dict.txt").write_text("".join(f"w{i} {WORDS - i}\n" for i in range(WORDS)))
    return folder


def disturb(model: nn.Module, seed: int = 0) -> None:
    """Move all parameters, so that none has the value of the start, which may be zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def language_model(**options: Any) -> tuple[BaseFairseqModel, Any, Path]:
    """A disturbed ``lrpe_lm`` with these model options, its configuration and its checkpoint."""
    return _built(f"{TRAINING} {SMALL} --dropout 0", tuple(options.items()))


def masked_model(**options: Any) -> tuple[BaseFairseqModel, Any, Path]:
    """A disturbed ``lrpe_roberta``; see :func:`language_model`."""
    return _built(ROBERTA, tuple(options.items()))


@functools.cache
def _built(command_line: str, options: tuple) -> tuple[BaseFairseqModel, Any, Path]:
    config = configured(data(), command_line)  # once: to parse takes longer than the rest
    for name, value in options:
        part = config.task if name in ("add_bos_token", "tokens_per_sample") else config.model
        part[name] = value
    torch.manual_seed(1)
    model = tasks.setup_task(config.task).build_model(config.model)
    disturb(model)
    folder = Path(tempfile.mkdtemp(dir=home()))
    return model.eval(), config, save(model, config, folder / "checkpoint.pt")


def exported(**options: Any) -> Exported:
    """An ``lrpe_lm`` with these model options, and its export."""
    return _exported(language_model(**options), AutoModelForCausalLM)


def exported_masked(**options: Any) -> Exported:
    """An ``lrpe_roberta`` with these model options, and its export."""
    return _exported(masked_model(**options), AutoModelForMaskedLM)


_EXPORTED: dict[Path, Exported] = {}


def _exported(made: tuple[BaseFairseqModel, Any, Path], kind: type) -> Exported:
    model, _, checkpoint = made
    if checkpoint not in _EXPORTED:
        folder = checkpoint.parent / "exported"
        hf.export(checkpoint, folder, tokenizer="none")
        _EXPORTED[checkpoint] = Exported(model, kind.from_pretrained(folder).eval(), folder)
    return _EXPORTED[checkpoint]


def aligned(model: nn.Module) -> nn.Module:
    """A copy whose weights are where torch allocates them, at multiples of 64 bytes.

    transformers maps the weights of a file into memory. At other addresses the CPU's libraries sum
    in another order, so that logits differ in their last bit.
    """
    model = copy.deepcopy(model)
    assert all(p.data_ptr() % 64 == 0 for p in model.parameters())
    return model


def in_float64(model: nn.Module) -> nn.Module:
    """A copy in float64."""
    return copy.deepcopy(model).double()


class Adapted(nn.Module):
    """A linear map with an adapter as peft has it: its ``weight`` is that without the adapter."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora = nn.Parameter(torch.ones(1))

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora


class AdaptedLinear(nn.Linear):
    """A subclass whose parameters have the names of those of a linear map."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def subclassed(base: nn.Module) -> nn.Module:
    """A map of the class :class:`AdaptedLinear` with the weights of ``base``."""
    made = copy.deepcopy(base)
    made.__class__ = AdaptedLinear
    return made


def random_words(rows: int, length: int, seed: int = 0) -> Tensor:
    """Indices of words, int64 (rows, length)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, 4 + WORDS, (rows, length), generator=generator)


def padded_left(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """A batch of rows of different lengths, padded on the left, and its attention mask."""
    longest = max(map(len, rows))
    tokens = torch.stack([torch.cat([row.new_ones(longest - len(row)), row]) for row in rows])
    return tokens, (tokens != 1).long()


def logits_of_steps(found: Any) -> Tensor:
    """The logits of every step of ``generate``, (B, T, V)."""
    return torch.stack(found.logits, 1)


GREEDY = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6}
WITH_LOGITS = {**GREEDY, "return_dict_in_generate": True, "output_logits": True}
