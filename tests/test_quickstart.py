"""The quickstart: its table, and the orders that it states."""

from lrpe_fairseq.experiments.commands import quickstart
from lrpe_fairseq.experiments.report import quickstart as report
from lrpe_fairseq.experiments.report.quickstart import Row


def row(encoding: str, *ppl: float, attention: str = "linear") -> Row:
    """A row whose seeds are 1, 2, ..."""
    return Row(attention, encoding, dict(enumerate(ppl, start=1)))


# --- the table and the order --------------------------------------------------------------------


def test_a_row_is_compared_with_base_of_the_same_attention():
    found = [
        row("none", 100.0, 102.0),
        row("rope", 90.0, 91.8),
        row("none", 80.0, 80.0, attention="softmax"),
        row("lrpe-type2", 60.0, 60.0, attention="softmax"),
    ]
    lines = [" ".join(line.split()) for line in report.table(found).splitlines()]
    assert lines[2].startswith("| linear | none (Base) | 101.00 ± 1.41 | — ")
    assert lines[3].startswith("| linear | rope | 90.90 ± 1.27 | -10 % |")
    assert lines[5].startswith("| softmax | lrpe-type2 | 60.00 ± 0.00 | -25 % |")


def test_one_seed_has_no_deviation_and_supports_no_order():
    found = [row("none", 100.0), row("rope", 1.0)]
    assert "±" not in report.table(found[:1])
    assert report.order(found) == ["linear attention: rope ≈ Base"]


def test_the_order_names_neighbors_that_are_not_separated():
    found = [row("none", 10.0, 10.1, 10.2), row("rope", 8.0, 8.2, 8.3)]
    found.append(row("lrpe-type2", 8.1, 8.2, 8.4))
    assert report.order(found) == ["linear attention: rope ≈ lrpe-type2 < Base"]


# --- what is committed --------------------------------------------------------------------------


def test_every_row_is_published_with_the_same_three_seeds():
    found = report.rows(report.published(quickstart.RUNS))
    assert [(r.attention, r.encoding) for r in found] == quickstart.METHODS
    assert {tuple(r.ppl) for r in found} == {(1, 2, 3)}


def test_the_published_runs_have_the_settings_of_the_configuration():
    runs = [run for run in report.published(quickstart.RUNS) if run["seed"] == 1]
    published = {(run["attention_type"], run["position_encoding"]): run for run in runs}
    for method in quickstart.methods(1):
        run = published[method.attention_type, method.position_encoding]
        assert method.differences(run["config"]) == set()


def test_every_relative_encoding_beats_base_in_the_published_runs():
    found = report.rows(report.published(quickstart.RUNS))
    base = {row.attention: row for row in found if row.encoding == "none"}
    assert all(
        report.separated(row, base[row.attention], found) for row in found if row.encoding != "none"
    )
