"""Algebraic encodings of sequences and trees, and the codes of nodes."""
