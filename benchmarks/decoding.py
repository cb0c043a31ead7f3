"""Decoding with a linear and a softmax decoder: speed and state against the output's length."""

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import Timing, contest
from benchmarks.training import dictionary_of
from lrpe_fairseq.models.translation import LRPETransformer, LRPETransformerConfig

LENGTHS = (32, 128, 512, 1024, 2048, 4096)
SOURCE, ROWS, WINDOW = 32, 4, 16  # ROWS: one sentence with beam 4
ENCODINGS = {"linear": "lrpe-type2", "softmax": "lrpe-type2"}


def measure(device: str, rounds: int, lengths: Sequence[int] = LENGTHS) -> list[dict]:
    """Rows of {length, contestant, seconds, spread, tokens_per_second, speed_up, state_mb}.

    A decoder of ``lrpe_transformer`` (6 x 512) has put out ``length`` tokens for each of ``ROWS``
    hypotheses; ``seconds`` are those of the next ``WINDOW`` ones. ``speed_up`` is the linear
    decoder's over the contestant, ``state_mb`` the size of the self-attention states.
    """
    decoders = {
        kind: Decoder(kind, device, max(lengths) + 8 * WINDOW * rounds) for kind in ENCODINGS
    }
    rows = []
    for length in lengths:
        for decoder in decoders.values():
            decoder.go_to(length)
        timings = contest({kind: d.window for kind, d in decoders.items()}, rounds)
        rows += [_row(length, kind, timings, d.state_bytes) for kind, d in decoders.items()]
    return rows


class Decoder:
    """Decodes random tokens one by one, as beam search does."""

    def __init__(self, attention_type: str, device: str, longest: int) -> None:
        """Build the model and encode one source."""
        self._model = build_model(attention_type, longest).to(device).eval()
        generator = torch.Generator().manual_seed(0)
        source = torch.randint(4, 1000, (ROWS, SOURCE), generator=generator).to(device)
        with torch.no_grad():
            self._encoded = self._model.encoder(source, torch.full((ROWS,), SOURCE))
        self._state: dict[str, Any] = {}
        self._tokens = torch.randint(4, 1000, (ROWS, longest), generator=generator).to(device)
        self._done = 0
        self.state_bytes = 0

    def go_to(self, length: int) -> None:
        """Put out tokens until there are ``length``; from the start if there are more."""
        if self._done > length:
            self._state, self._done = {}, 0
        while self._done < length:
            self._step()
        self.state_bytes = sum(
            tensor.numel() * tensor.element_size()
            for key, value in self._state.items()
            if key.startswith("lrpe_attention")
            for tensor in tensors(value)
        )

    def window(self) -> None:
        """The next ``WINDOW`` tokens."""
        for _ in range(WINDOW):
            self._step()

    @torch.no_grad()
    def _step(self) -> None:
        self._done += 1
        previous = self._tokens[:, : self._done]
        self._model.decoder(previous, encoder_out=self._encoded, incremental_state=self._state)


def tensors(value: Any) -> Iterable[Tensor]:
    """Every tensor in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from tensors(inner)


def build_model(attention_type: str, longest: int) -> LRPETransformer:
    """``lrpe_transformer`` with this attention in the decoder, on a made-up dictionary."""
    words = dictionary_of(1000)
    config = LRPETransformerConfig(max_source_positions=SOURCE, max_target_positions=longest)
    config.encoder, config.decoder = config.encoder(), config.decoder()
    config.decoder.attention_type = attention_type
    config.decoder.position_encoding = ENCODINGS[attention_type]
    task = SimpleNamespace(source_dictionary=words, target_dictionary=words)
    torch.manual_seed(0)
    return LRPETransformer.build_model(config, task)


def _row(length: int, kind: str, timings: dict[str, Timing], state: int) -> dict:
    timing = timings[kind]
    return {
        "length": length,
        "contestant": kind,
        "seconds": timing.median,
        "spread": timing.spread,
        "tokens_per_second": ROWS * WINDOW / timing.median,
        "speed_up": timing.ratio(timings["linear"]),
        "state_mb": state / 1e6,
    }
