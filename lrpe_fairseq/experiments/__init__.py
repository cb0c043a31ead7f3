"""Experiments: prepare data, train, evaluate, record and report. Six rooms import one way."""
