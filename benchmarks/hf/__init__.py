"""Measurements of models in transformers, which docs/huggingface.md shows."""
