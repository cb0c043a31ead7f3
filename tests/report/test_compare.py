"""The command that compares two rows prints the verdicts of the pages."""

import pytest

from lrpe_fairseq.experiments.commands import compare
from lrpe_fairseq.experiments.records.files import ROOT
from lrpe_fairseq.experiments.report.results import results_of


def test_every_column_of_both_rows_has_the_verdict_of_the_pages(capsys):
    assert compare.main(["extrapolation", "stick-breaking", "rope", "--scale", "small"]) == 0
    heading, titles, *lines = capsys.readouterr().out.splitlines()
    assert heading.startswith("extrapolation, small, ")
    assert heading.endswith(": stick-breaking (first) against rope (second)")
    assert titles.split("  ")[0:2] == ["", "column"]
    assert titles.endswith("  the first against the second")
    assert lines[-2:] == ["", compare.INTERVALS]
    shown = {line.split()[0]: line for line in lines[:-2]}
    assert not [key for key in shown if not key.startswith("softmax-")]
    for key in ("softmax-paired-128", "softmax-paired-2048", "softmax-truncated"):
        view = results_of(ROOT).column("extrapolation", key)
        mean = view.text("stick-breaking")
        assert shown[key].split()[1] == mean
        assert shown[key].endswith("  " + view.versus("stick-breaking", "RoPE"))


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["extrapolation", "FoX, open", "fox, fox-bias 3.0"], "both names mean the row FoX, open"),
        (["extrapolation", "FoX, open", "RoPE", "--scale", "huge"], "has no scale 'huge'"),
        (["extrapolation", "RoPE", "nope, layernorm"], "has no row"),
        (["medium", "Type2", "FoX, open"], "no column of medium has values of both rows"),
    ],
)
def test_rows_that_cannot_be_compared_are_refused(words, error, capsys):
    assert compare.main(words) == 2
    assert error in capsys.readouterr().err
