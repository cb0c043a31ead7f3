"""The configurations at scale ``paper`` are those that TMLR LRPE prints in Table 8."""

import re

import pytest

from lrpe_fairseq.experiments.records.files import CONFIGS, ROOT, load_config
from lrpe_fairseq.experiments.report.paper import read_table
from lrpe_fairseq.experiments.runner import identity

CONFIG = {
    "ALM": CONFIGS / "lm" / "wikitext103.yaml",
    "BLM": CONFIGS / "roberta" / "pretrain-wikibook.yaml",
}
SIDE = {"ALM": "decoder", "BLM": "encoder"}
EXCEPTIONS = {
    ("Seqence length", "BLM"): "51 is a misprint of 512, as in ICLR LRPE, Table 7",
}
NOT_IN_A_CONFIGURATION = ("Data", "Tokenizer method", "Vocab size")
SIDES = {"Encoder layers": "encoder", "Decoder layers": "decoder"}
NAMES = {"inverse_sqrt": "Inverse sqrt", "polynomial_decay": "Polynomial decay"}


def printed() -> dict[tuple[str, str], str]:
    """(setting, column) -> the printed text, for language models."""
    cells = read_table(ROOT / "results" / "paper" / "tmlr-table8.csv")
    return {(c["setting"], c["column"]): c["printed"] for c in cells if c["column"] in CONFIG}


def number(text: str) -> float:
    """``50k updates`` -> 50000."""
    found = re.match(r"([\d.e-]+)(k?)", text)
    return float(found[1]) * (1000 if found[2] else 1)


def ours(setting: str, column: str, known: dict) -> object:
    """The value of our configuration, ``known`` by command-line names."""
    side = SIDE[column]
    if setting in SIDES:
        return known[f"{side}-layers"] if SIDES[setting] == side else 0
    samples = known["max-tokens"] * known["update-freq"][0] / known["tokens-per-sample"]
    return {
        "Hidden dimensions": known[f"{side}-embed-dim"],
        "Number of heads": known[f"{side}-attention-heads"],
        "FFN dimensions": known[f"{side}-ffn-embed-dim"],
        "FFN activation function": known["activation-fn"].capitalize(),
        "Seqence length": known["tokens-per-sample"],
        "Total batch size": samples,
        "Number of updates": known["max-update"],
        "Warmup steps": known["warmup-updates"],
        "Peak learning rate": known["lr"][0],
        "Learning rate scheduler": NAMES[known["lr-scheduler"]],
        "Optimizer": known["optimizer"].capitalize(),
        "Adam ε": known["adam-eps"],
        "Adam (β1, β2)": known["adam-betas"],
        "Weight decay": known["weight-decay"],
    }[setting]


@pytest.mark.parametrize("column", CONFIG)
def test_every_printed_setting_is_ours_or_an_exception_with_a_reason(column: str) -> None:
    known = identity.options(identity.resolved(load_config(CONFIG[column])))
    different = set()
    for (setting, own), text in printed().items():
        if own != column or setting in NOT_IN_A_CONFIGURATION:
            continue
        value = ours(setting, column, known)
        same = text == value if isinstance(value, str) else number(text) == pytest.approx(value)
        if not same:
            different.add((setting, column))
    assert different == {key for key in EXCEPTIONS if key[1] == column}
