"""Where the code behind the published numbers departs from the papers it compares.

Every departure has a name; ``EncodingOptions.fidelity`` holds the names that are switched on.
None is on by default. Whoever implements one reads its name; nobody reads this table for it.
"""

from collections.abc import Iterable

DEPARTURES: dict[str, str] = {
    "spe-along-batch": (
        "SPE's codes are indexed by the place in the batch and constant along the sequence, so "
        "that they carry no position at all."
    ),
    "spe-after-feature-map": (
        "SPE filters phi(q) and phi(k), so that the features which linear attention sums are "
        "signed, instead of filtering q and k and applying phi to the result."
    ),
    "spe-noise-at-eval": (
        "SPE draws new noise at every forward in evaluation too, so that scores are random and "
        "decoding token by token disagrees with the parallel form."
    ),
    "spe-one-sine": "SineSPE has one sine per feature where SPE's own experiments have 5 to 10.",
    "permuteformer-shared-permutation": (
        "PermuteFormer uses one permutation, drawn from the seed 0xdeadbeefdeadbeef, for all "
        "heads and layers, instead of one per head."
    ),
    "permuteformer-bidirectional-ratio": (
        "PermuteFormer keeps the weight r^(s-t) in bidirectional models, where it grows without "
        "bound for t > s."
    ),
    "t5-shared-bias": "T5 has one bias for all heads of a layer instead of one per head.",
    "t5-unit-init": (
        "T5's biases start from N(0, 1), nn.Embedding's default, instead of N(0, 1/(H D))."
    ),
    "xl-no-dropout": (
        "Transformer-XL is trained without dropout of any kind, where every other row has 0.1."
    ),
    "embed-dim-scale": (
        "Softmax attention with any relative encoding scales by (H D)^-0.5 instead of D^-0.5; "
        "Base alone, stock attention in the language model, keeps D^-0.5."
    ),
    "padding-ignored": (
        "Both attentions see padding as tokens, and positions count it, from the left."
    ),
}
"""Name -> what the published code does, in one sentence."""


def parse_departures(text: str) -> frozenset[str]:
    """The departures that ``--fidelity TEXT`` names.

    ``correct`` is none, ``published`` is all, else a comma-separated list of their names.
    Raises: ValueError, listing the known ones, if one is unknown.

    >>> sorted(parse_departures("t5-unit-init,t5-shared-bias"))
    ['t5-shared-bias', 't5-unit-init']
    """
    if text in ("correct", "published"):
        return frozenset(DEPARTURES if text == "published" else ())
    return check_departures(name.strip() for name in text.split(","))


def check_departures(names: Iterable[str]) -> frozenset[str]:
    """``names`` as a set; ValueError, listing the known ones, if one is unknown.

    >>> sorted(check_departures(["t5-unit-init"]))
    ['t5-unit-init']
    """
    chosen = frozenset(names)
    unknown = sorted(chosen - DEPARTURES.keys())
    if unknown:
        raise ValueError(
            f"unknown departures {', '.join(unknown)}; choose correct, published, or a list of "
            f"{', '.join(DEPARTURES)}"
        )
    return chosen
