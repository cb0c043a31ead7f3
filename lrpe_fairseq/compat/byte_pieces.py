"""Generated text of SentencePiece models with byte fallback."""

import re
from collections.abc import Callable

from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE

from lrpe_fairseq.compat.patching import replace_method

BYTES = re.compile(r"(?:<0x[0-9A-F]{2}>)+")


def join_byte_pieces() -> None:
    """Write the characters that byte pieces spell.

    Break: ``--bpe sentencepiece`` joins pieces by their text, so a model with byte fallback
    writes ``<0xC3><0xA9>`` where it means é.
    """
    replace_method(SentencepieceBPE, "decode", _decoded)


def _decoded(original: Callable[..., str], encoder: SentencepieceBPE, text: str) -> str:
    return BYTES.sub(lambda run: _characters(run[0]), original(encoder, text))


def _characters(run: str) -> str:
    """Return the text of adjacent byte pieces; bytes that are no UTF-8 become U+FFFD."""
    return bytes.fromhex(run.replace("<0x", "").replace(">", "")).decode("utf-8", "replace")
