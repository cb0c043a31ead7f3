"""Encodings of the score matrix, and ALiBi's constant decay."""
