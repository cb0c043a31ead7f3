"""Kinds of values: how the values of a metric are compared and counted."""

from lrpe_fairseq.experiments.records.protocols import BEYOND

LOGARITHMIC = {"ppl", "word_ppl", "document_ppl"}
PERCENT = {"f1", "matthews", "pearson", "spearman"}
LOSSES = {"loss", "delta", BEYOND, "gain"}
COUNTS = {  # fraction -> metric with the number of tested examples, and value of 100 %
    "accuracy": ("examples", 100.0),
    "top5": ("examples", 100.0),
    "answer_accuracy": ("samples", 1.0),
    "token_accuracy": ("samples", 1.0),  # tokens of one sample are not independent
    "exact_match": ("samples", 1.0),
}


def kind_of(metrics: set[str]) -> str:
    """Return the kind of values (``orders.UNITS``) of the metrics that a column shows or averages.

    >>> kind_of({"ppl"}), kind_of({"accuracy"}), kind_of({"accuracy", "matthews"})
    ('perplexity', 'fraction', 'percent')
    """
    if metrics <= LOGARITHMIC:
        return "perplexity"
    if metrics <= COUNTS.keys():
        return "fraction"
    if metrics <= PERCENT | {"accuracy"}:
        return "percent"
    if metrics == {"bleu"}:
        return "bleu"
    return "loss" if all(m in LOSSES or m.startswith("loss-") for m in metrics) else "plain"
