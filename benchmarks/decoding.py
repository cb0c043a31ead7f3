"""Decoding with a linear and a softmax decoder: speed and state size by output length.

Both start from a state of the given length, filled in blocks, and continue token by token.
"""

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import Timing, contest
from benchmarks.training import dictionary_of
from lrpe_fairseq.models.translation import LRPETransformer, LRPETransformerConfig

LENGTHS = (32, 64, 128, 512, 1024, 2048, 4096, 8192)
SOURCE, ROWS, WINDOW = 32, 4, 4  # ROWS: one sentence with beam size 4
BLOCK = 512
ENCODINGS = {"linear": "lrpe-type2", "softmax": "lrpe-type2"}


def measure(device: str, rounds: int, lengths: Sequence[int] = LENGTHS) -> list[dict]:
    """Return rows of {length, contestant, seconds, spread, tokens_per_second, speed_up, flatness,
    state_mb}.

    A decoder of ``lrpe_transformer`` (6 x 512) has generated ``length`` tokens for each of ``ROWS``
    hypotheses (mean over rounds); ``seconds`` is the time of ``WINDOW`` further tokens.
    ``speed_up``: speed of the linear decoder over the contestant. ``flatness``: time over that of
    the same decoder at length 64 (or the shortest). All ratios are within rounds. ``state_mb``:
    size of the self-attention states.
    """
    ahead = (rounds + 1) * WINDOW // 2  # half of the tokens of all rounds, warm-up included
    longest = max(lengths) + 2 * ahead
    models = {kind: build_model(kind, longest).to(device).eval() for kind in ENCODINGS}
    decoders = {
        (n, kind): Decoder(models[kind], max(0, n - ahead)) for n in lengths for kind in ENCODINGS
    }
    timings = contest({key: decoder.window for key, decoder in decoders.items()}, rounds)
    first = 64 if 64 in lengths else lengths[0]
    return [_row(*key, timings, first, d.state_bytes) for key, d in decoders.items()]


def check() -> None:
    """Raise AssertionError unless token-by-token decoding equals the parallel forward pass."""
    for kind in ENCODINGS:
        decoder = Decoder(build_model(kind, 64).eval(), 0)
        with torch.no_grad():
            whole, _ = decoder.model.decoder(decoder.tokens[:, :40], encoder_out=decoder.encoded)
            single = torch.cat([decoder.next_token() for _ in range(40)], 1)
        torch.testing.assert_close(single, whole, rtol=1e-3, atol=1e-4)


class Decoder:
    """Decodes random tokens one by one, like beam search, after a prefix of ``length`` tokens."""

    def __init__(self, model: LRPETransformer, length: int) -> None:
        """Encode one source and fill the self-attention states in blocks."""
        self.model = model
        device = next(model.parameters()).device
        generator = torch.Generator().manual_seed(0)
        longest = model.decoder.max_target_positions
        self.tokens = torch.randint(4, 1000, (ROWS, longest), generator=generator).to(device)
        source, sizes = self.tokens[:, :SOURCE], torch.full((ROWS,), SOURCE)
        with torch.no_grad():
            self.encoded = model.encoder(source, sizes)
        self._state: dict[str, Any] = {}
        self._done = length
        self._fill()

    @torch.no_grad()
    def _fill(self) -> None:
        for layer in self.model.decoder.layers:
            for start in range(0, self._done, BLOCK):
                block = min(BLOCK, self._done - start)
                x = torch.randn(block, ROWS, layer.embed_dim, device=self.tokens.device)
                layer.self_attn(x, incremental_state=self._state)

    @property
    def state_bytes(self) -> int:
        """Return the bytes of the self-attention states, including reserved capacity."""
        found = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for key, value in self._state.items()
            if key.startswith("lrpe_attention")
            for tensor in tensors(value)
        }
        return sum(found.values())

    def window(self) -> None:
        """Decode the next ``WINDOW`` tokens."""
        for _ in range(WINDOW):
            self.next_token()

    @torch.no_grad()
    def next_token(self) -> Tensor:
        """Return the decoder's output (ROWS, 1, V) for the next token."""
        self._done += 1
        previous = self.tokens[:, : self._done]
        return self.model.decoder(previous, self.encoded, incremental_state=self._state)[0]


def tensors(value: Any) -> Iterable[Tensor]:
    """Yield every tensor in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from tensors(inner)


def build_model(attention_type: str, longest: int) -> LRPETransformer:
    """Build ``lrpe_transformer`` with this decoder attention and a synthetic dictionary."""
    words = dictionary_of(1000)
    config = LRPETransformerConfig(max_source_positions=SOURCE, max_target_positions=longest)
    config.encoder, config.decoder = config.encoder(), config.decoder()
    config.decoder.attention_type = attention_type
    config.decoder.position_encoding = ENCODINGS[attention_type]
    task = SimpleNamespace(source_dictionary=words, target_dictionary=words)
    torch.manual_seed(0)
    return LRPETransformer.build_model(config, task)


def _row(
    length: int, kind: str, timings: dict[tuple[int, str], Timing], first: int, state: int
) -> dict:
    timing = timings[length, kind]
    return {
        "length": length,
        "contestant": kind,
        "seconds": timing.median,
        "spread": timing.spread,
        "tokens_per_second": ROWS * WINDOW / timing.median,
        "speed_up": timing.ratio(timings[length, "linear"]),
        "flatness": timing.ratio(timings[first, kind]),
        "state_mb": state / 1e6,
    }
