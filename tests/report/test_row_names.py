"""Rows of tables are found by their labels and by the names of encodings and methods."""

import pytest

from lrpe_fairseq.experiments.families import load_named
from lrpe_fairseq.experiments.records.methods import names, row_named, rows_named


def labels(table, name):
    return [row.label for row in rows_named(load_named(table), name)]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("RoPE", ["RoPE"]),
        ("rope", ["RoPE"]),
        ("ROPE", ["RoPE"]),
        ("fox, fox-bias 3.0", ["FoX, open"]),
        ("lrpe-type2", ["Type2"]),
        ("lrpe-type2, layernorm", ["Type2-LN"]),
        ("lrpe:identity:rotation", ["RoPE", "RoPE-LN", "RoPE, content", "RoPE, none"]),
        ("none", ["NoPE", "Sinusoidal", "NoPE-LN"]),
        ("t5", ["T5"]),
    ],
)
def test_a_label_in_any_case_a_method_or_an_encoding_names_rows(name, found):
    assert labels("extrapolation", name) == found


def test_a_pattern_of_encodings_names_the_rows_that_have_it():
    [row] = rows_named(load_named("hybrid-lm"), "fox,fox,fox,none")
    assert row.encoding == "fox,fox,fox,none"


@pytest.mark.parametrize("table", ["table2", "books"])
def test_every_name_that_a_page_shows_names_one_row(table):
    loaded = load_named(table)
    shown = names(loaded)
    for label, method in shown.items():
        assert [row.label for row in rows_named(loaded, method)] == [label]


@pytest.mark.parametrize("name", ["ropee", "lrpe-type9", "FoX, opne"])
def test_an_unknown_row_is_refused_with_the_nearest_name(name):
    with pytest.raises(ValueError, match=rf"table extrapolation has no row {name!r}; did you mean"):
        labels("extrapolation", name)


@pytest.mark.parametrize("name", ["$(id)", "a,", ""])
def test_a_row_without_a_near_name_is_refused_with_all_labels(name):
    with pytest.raises(ValueError, match=r"has no row .*; it has NoPE; Sinusoidal; RoPE; SPE; "):
        labels("extrapolation", name)


def test_a_command_for_one_row_refuses_an_encoding_of_several():
    with pytest.raises(ValueError, match=r"several rows of none: choose one of NoPE; Base$"):
        row_named(load_named("catalogue"), "none")
    assert row_named(load_named("table2"), "none").label == "Base"
