"""Memory, bytes and hours at the papers' size, as the pages show them."""

import json

import pytest

from benchmarks import estimates, sequence_parallel
from lrpe_fairseq.attention.parallel import bytes_sent
from lrpe_fairseq.experiments.records.files import ROOT
from lrpe_fairseq.experiments.report import scale

GB = 1e9


def saved(name):
    return json.loads((ROOT / scale.BENCH / f"{name}.json").read_text())


def row(criterion, tokens, gigabytes):
    return {"criterion": criterion, "tokens": tokens, "peak": gigabytes * GB}


def test_the_longest_text_is_what_n_cards_hold_by_the_line_through_the_largest_batches():
    # 2 GB, and 1 MB for every token; Adam needs more in the smallest batch
    rows = [row("ours", 3000, 5), row("ours", 1000, 3), row("ours", 10, 2.5), row("other", 10, 9)]
    assert scale.line_of(rows, "ours") == pytest.approx((2 * GB, 1e6))
    assert scale.longest_texts(rows, "ours") == [14_000, 28_000, 56_000]


def test_a_page_without_measurements_says_so(tmp_path):
    tables = (scale.criteria_table, scale.bytes_table, scale.times_table, scale.batches_table)
    assert {table(tmp_path) for table in tables} == {"Not measured."}
    assert scale.hours_table(tmp_path) == "Not computed."


def test_the_hours_of_a_page_are_those_that_the_estimate_computes():
    (row,) = (
        r for r in saved("estimates")["rows"] if (r["table"], r["precision"]) == ("table4", "fp32")
    )
    assert estimates.estimated("table4", "fp32") == row


def test_hours_are_marked_as_arithmetic():
    said = scale.hours_table(ROOT)
    assert "This is arithmetic for `v100x8`" in said
    assert "nothing is measured" in said
    assert [line.split("|")[1:3] for line in said.splitlines() if "table2" in line] == [
        [" `table2` ", " fp32 "],
        [" `table2` ", " fp16 "],
    ]


@pytest.mark.parametrize("encoding", ["fox", "path"])
def test_the_bytes_of_a_page_are_those_that_are_counted(encoding):
    counted = saved("sequence-parallel")["bytes"]
    for row in counted["rows"]:
        if row["encoding"] == encoding and row["attention"] == "linear":
            layer = sequence_parallel.layer_of("linear", encoding)
            sent = bytes_sent(layer, counted["length"], row["processes"])
            assert sent / counted["length"] == row["bytes"]
