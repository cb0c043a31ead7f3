"""Encodings that rotate or permute features: LRPE and its relatives."""
