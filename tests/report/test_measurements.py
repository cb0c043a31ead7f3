"""One verdict for a pair on all pages: measurements, named contrasts, priors of a release."""

import itertools
import json
import shutil

import pytest
import yaml

from lrpe_fairseq.experiments.records.console import UserError
from lrpe_fairseq.experiments.records.files import ROOT
from lrpe_fairseq.experiments.records.tables import load_tables
from lrpe_fairseq.experiments.report import measurements, orders, priors
from lrpe_fairseq.experiments.report.pages import pages
from lrpe_fairseq.experiments.report.results import Results, results_of
from tests.report.test_columns import TABLE, checkout, measured, save


@pytest.fixture
def root(tmp_path):
    return checkout(tmp_path)


def with_another_page(root):
    """A second table, which shows the runs of two rows of the first one."""
    table = yaml.safe_load(TABLE)
    table["title"] = "Other"
    table["baseline"] = "one"
    rows = [{"label": "one", "encoding": "none"}, {"label": "two", "encoding": "rope"}]
    table["rows"] = [{**row, "attention": ["linear"]} for row in rows]
    table["columns"] = [{**table["columns"][0], "key": "perplexity", "title": "p"}]
    del table["headline"], table["columns"][0]["paper"]
    (root / "configs" / "tables" / "other.yaml").write_text(yaml.safe_dump(table))
    return Results(root)


def test_every_pair_has_one_verdict_on_all_pages_of_this_repository():
    found: dict[tuple, set] = {}
    for view in results_of(ROOT).views():
        shown = view.column.split, view.column.protocol, view.column.metric, *view.column.mean_of
        for a, b in itertools.permutations(view.ranked(), 2):
            pair = shown, view.identity(a), view.identity(b)
            verdict = view.verdict(a, b)
            interval = (verdict.size, verdict.low, verdict.high) if verdict.known else ()
            found.setdefault(pair, set()).add((verdict.name, *interval))
    assert len(found) > 40_000
    assert [pair for pair, verdicts in found.items() if len(verdicts) > 1] == []


def test_pages_that_share_runs_share_their_rows_and_verdicts(root):
    results = with_another_page(root)
    first, other = results.column("demo", "ppl"), results.column("other", "perplexity")
    assert other.measurement is first.measurement
    assert len(first.measurement.cells) == 4
    assert other.identity("two") == first.identity("RoPE")
    assert other.verdict("two", "one") == first.verdict("RoPE", "Base")
    alone = orders.Measurement({row: other.scaled[row] for row in ("one", "two")})
    assert alone.verdict("two", "one") != other.verdict("two", "one")  # the rest of the page counts


def test_a_pair_of_one_attention_type_has_its_verdict_in_a_column_of_any_attention_too(root):
    path = root / "configs" / "tables" / "demo.yaml"
    mixed = yaml.safe_load(path.read_text())
    stack = {"label": "stack", "encoding": "rope,none", "attention": ["linear,softmax"]}
    mixed |= {"title": "Mixed", "rows": [*mixed["rows"], stack]}
    mixed["columns"] = [{**mixed["columns"][0], "attention": "any"}]
    del mixed["headline"], mixed["columns"][0]["paper"]
    (root / "configs" / "tables" / "mixed.yaml").write_text(yaml.safe_dump(mixed))
    for seed in (1, 2, 3):
        several = {"attention_type": "linear,softmax", "label": "stack"}
        save(root, "rope,none", seed, measured(45.0 + seed, seed), **several)
    results = Results(root)
    own, other = results.column("demo", "ppl"), results.column("mixed", "ppl")
    assert other.measurement is not own.measurement
    assert other.verdict("RoPE", "Base") == own.verdict("RoPE", "Base")
    across = other.measurement.verdict(other.identity("stack"), other.identity("Base"))
    assert across.known
    assert other.verdict("stack", "Base") == across


def test_columns_of_other_trainings_evaluations_and_metrics_are_other_measurements(root):
    table = next(t for t in load_tables(ROOT / "configs" / "tables") if t.name == "budget")
    keys = {measurements.key_of(ROOT, table, "annealed", "d", c).text() for c in table.columns}
    assert len(keys) == len(table.columns)
    long = measurements.key_of(ROOT, table, "annealed", "d", table.column("softmax-16200"))
    assert long.training == ("16200", "256", "None")
    catalogue = next(t for t in load_tables(ROOT / "configs" / "tables") if t.name == "catalogue")
    second = next(t for t in load_tables(ROOT / "configs" / "tables") if t.name == "table2")
    one, two = (measurements.key_of(ROOT, t, "small", "d", t.column("linear-test"))
                for t in (catalogue, second))  # fmt: skip
    assert one == two


def test_a_row_with_two_values_in_a_measurement_is_refused(root):
    results = with_another_page(root)
    view = results.column("other", "perplexity")
    changed = {**view.cells, "two": {seed: value + 1 for seed, value in view.cells["two"].items()}}
    object.__setattr__(view, "cells", changed)
    with pytest.raises(ValueError, match="has two values in the measurement"):
        measurements.gathered(root, results.views())


# --- contrasts -----------------------------------------------------------------------------------


def test_a_contrast_that_was_named_has_its_own_error(root):
    named = [{"table": "demo", "scale": "small",
              "pairs": [{"column": "ppl", "a": "RoPE", "b": "Base"}]}]  # fmt: skip
    (root / "results" / "paper" / "contrasts.yaml").write_text(yaml.safe_dump(named))
    view = Results(root).column("demo", "ppl")
    error = view.measurement.error
    assert error(view.identity("RoPE"), view.identity("Base")) == orders.PRIMARY
    assert error(view.identity("Base"), view.identity("RoPE")) == orders.PRIMARY
    assert error(view.identity("Type2"), view.identity("Base")) == orders.EXPLORATORY


def test_a_page_shows_the_contrasts_that_were_named(root):
    pairs = [
        {"column": "ppl", "a": "RoPE", "b": "Base"},
        {"column": "ppl", "a": "Other", "b": "Base"},
    ]
    named = [{"table": "demo", "scale": "small", "pairs": pairs}]
    (root / "results" / "paper" / "contrasts.yaml").write_text(yaml.safe_dump(named))
    path = root / "configs" / "tables" / "demo.yaml"
    table = yaml.safe_load(path.read_text())
    table["rows"].append({"label": "Other", "encoding": "alibi", "attention": ["linear"]})
    path.write_text(yaml.safe_dump(table))
    view = Results(root).column("demo", "ppl")
    shown = pages(root)["results/demo.md"]
    name = "linear, " + view.column.title
    assert f"| {name} | `rope` | `none, sinusoidal` | {view.versus('RoPE', 'Base')} |" in shown
    assert "\n\nNot trained yet: 1 more." in shown


def test_the_contrasts_of_this_repository_name_rows_that_exist_and_are_at_most_ten_per_scale():
    tables = {table.name: table for table in load_tables(ROOT / "configs" / "tables")}
    count: dict[tuple[str, str], set] = {}
    for one in measurements.contrasts(ROOT):
        table = tables[one.table].at(one.scale)
        column = table.column(one.column)
        assert table.row(one.a).has(column)
        assert table.row(one.b).has(column)
        count.setdefault((one.table, one.scale), set()).add((one.column, one.a, one.b))
    long, books = ("contrast", "long"), ("hybrid-books", "medium-5m")
    assert count.keys() == {long, books, ("medium", "medium"), ("medium", "medium-5m")}
    assert all(len(pairs) <= round(0.05 / orders.PRIMARY) for pairs in count.values())


# --- priors --------------------------------------------------------------------------------------


def test_a_frozen_prior_keeps_a_verdict_when_rows_are_added(root):
    before = Results(root).column("demo", "ppl")
    priors.freeze(root, "0.1.0")
    kept = before.verdict("RoPE", "Base")
    for seed, value in enumerate((70.0, 90.0, 50.0), start=1):  # a row that scatters
        save(root, "spe", seed, measured(value, seed))
    after = Results(root).column("demo", "ppl")
    assert "SPE" in after.rows
    assert after.verdict("RoPE", "Base") == kept
    shutil.rmtree(root / "results" / "priors")
    assert Results(root).column("demo", "ppl").verdict("RoPE", "Base") != kept


def test_the_priors_of_the_last_release_are_used(root):
    folder = root / "results" / "priors"
    folder.mkdir()
    key = Results(root).column("demo", "ppl").key.text()
    for release, strength in (("0.9", 3.0), ("0.10", 4.0)):
        listed = {"priors": {key: [strength, 0.0, -8.0, 3.0]}}
        (folder / f"{release}.json").write_text(json.dumps(listed))
    assert Results(root).column("demo", "ppl").measurement.prior.strength == 4.0


def test_a_release_freezes_its_priors_once(root):
    path = priors.freeze(root, "0.1.0")
    first = path.read_text()
    assert {key.split()[0] for key in json.loads(first)["priors"]} == {"small"}
    with pytest.raises(UserError, match="name another release, or pass --replace"):
        priors.freeze(root, "0.1.0")
    priors.freeze(root, "0.1.0", replace=True)
    assert path.read_text() == first
    with pytest.raises(UserError, match=r"a version number such as 0\.2\.0, not 'next'"):
        priors.freeze(root, "next")
