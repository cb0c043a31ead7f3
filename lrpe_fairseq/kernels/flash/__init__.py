"""Softmax attention with biases, gates and masks: definition and Triton."""
