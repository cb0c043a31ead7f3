"""Experiments: prepare data, train, evaluate, record and report. Its imports run one way."""
