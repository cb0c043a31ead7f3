"""The table of all tables: no table or figure is left out, links exist, figures are computed."""

import re
from pathlib import Path

import pytest

from lrpe_fairseq.experiments.records.files import ROOT
from lrpe_fairseq.experiments.records.tables import load_tables
from lrpe_fairseq.experiments.report import documents
from lrpe_fairseq.experiments.report.results import Results

PRINTED = {
    "LRPE, ICLR": {*(f"Table {n}" for n in range(1, 10)), "Figure 1", "Figure 2"},
    "LRPE, TMLR": {*(f"Table {n}" for n in range(1, 10)), "Figure 1", "Figure 2"},
    "Algebraic Positional Encodings": {
        "Table 1", "Figure 1", "Table 2a", "Table 2b", "Table 2c", "Table 3",
    },
    "Transformer-XL, Appendix B": {"no table or figure"},
    "notes on positional encodings": {"no table or figure"},
}  # fmt: skip
"""Document -> the tables and figures that it prints; one with several parts may have more lines."""


def items():
    return [item for document in documents.documents(ROOT) for item in document["items"]]


def test_every_table_and_figure_of_the_five_documents_has_a_line():
    found = {
        document["document"]: {item["name"].partition(",")[0] for item in document["items"]}
        for document in documents.documents(ROOT)
    }
    assert found == PRINTED


def test_every_line_names_a_table_of_ours_or_a_page_and_says_what_is_missing():
    tables = {table.name: table for table in load_tables(ROOT / "configs" / "tables")}
    for item in items():
        if "page" in item:
            assert (ROOT / item["page"]).is_file(), item
            assert item["answer"]
        else:
            for key in item.get("columns", []):
                tables[item["table"]].column(key)
            assert item["missing"]


def test_every_page_that_the_index_links_in_the_table_of_all_tables_exists():
    text = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
    section = text.partition("## The papers' tables")[2].partition("\n## ")[0]
    links = re.findall(r"\]\(([^)#]+)", section)
    assert len(links) > 20
    for link in links:
        assert (ROOT / "results" / link).exists(), link


TABLE = """
title: Demo
text: Demo.
experiments: [demo]
scales: {small: configs/lm/wikitext2.yaml}
baseline: A0
better: lower
headline: [softmax-valid]
columns:
  - {key: softmax-valid, title: valid, attention: softmax, split: valid, protocol: blocks,
     metric: ppl, paper: {file: demo.csv, metric: PPL}}
  - {key: softmax-other, title: other, attention: softmax, split: test, protocol: blocks,
     metric: ppl}
rows:
"""
NAMES = ["none", "rope", "permuteformer", "alibi", "fox", "lrpe-type1", "lrpe-type2",
         "lrpe-type3", "lrpe-type4", "lrpe-type5", "lrpe-type6"]  # fmt: skip


@pytest.fixture
def checkout(tmp_path):
    """A table of eleven rows, of which ten have a run and eleven a published number."""
    rows = "".join(
        f"  - {{label: A{n}, encoding: '{name}', attention: [softmax], method: M{n}}}\n"
        for n, name in enumerate(NAMES)
    )
    paper = "".join(f"M{n},PPL,{30 + n}\n" for n in range(11))
    files = {
        "configs/tables/demo.yaml": TABLE + rows,
        "results/paper/demo.csv": "method,metric,value\n" + paper,
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    return tmp_path


def run(name, value):
    return {
        "experiment": "demo", "dataset": "d", "task": "language_modeling", "scale": "small",
        "attention_type": "softmax", "position_encoding": name, "seed": 1, "config": {},
        "metrics": {"valid": {"blocks": {"loss": 1.0, "ppl": value, "tokens": 100}}},
    }  # fmt: skip


def lines(checkout: Path, runs, **item):
    item = {"name": "Table 1", "shows": "demo", "table": "demo", "missing": "a reason", **item}
    return documents.lines_of(Results(checkout, runs), item)


def test_scale_rows_seeds_and_agreement_are_those_of_the_runs(checkout):
    runs = {f"demo/{name}": run(name, 40.0 + n) for n, name in enumerate(NAMES[:10])}
    [[title, scale, rows, seeds, agreement, missing]] = lines(checkout, runs)
    assert title == "[Table 1: demo](demo.md)"
    assert (scale, rows, seeds) == ("`small`", "10", "1")
    assert agreement.startswith("1.00 [")
    assert missing == "M10; a reason"


def test_few_rows_have_no_correlation_and_columns_without_runs_are_named(checkout):
    runs = {f"demo/{name}": run(name, 40.0 + n) for n, name in enumerate(NAMES[:3])}
    [line] = lines(checkout, runs, columns=["softmax-valid", "softmax-other"])
    assert line[4] == "3 rows, too few"
    assert line[5].endswith("M9 and M10; `other`; a reason")


def test_a_table_without_runs_says_so_without_a_link(checkout):
    assert lines(checkout, {}) == [["Table 1: demo", "not run", "", "", "", "a reason"]]


def test_rows_of_the_document_are_named_in_a_column_without_published_numbers(checkout):
    runs = {f"demo/{name}": run(name, 40.0) for name in NAMES[:9]}
    for one in runs.values():
        one["metrics"]["test"] = one["metrics"]["valid"]
    [line] = lines(checkout, runs, columns=["softmax-other"])
    assert line[5] == "M9 and M10; a reason"


def test_a_column_that_another_scale_has_is_not_missing(checkout):
    path = checkout / "configs" / "tables" / "demo.yaml"
    two = "scales: {small: configs/lm/wikitext2.yaml, books: configs/lm/gutenberg.yaml}"
    path.write_text(path.read_text().replace("scales: {small: configs/lm/wikitext2.yaml}", two))
    every = {"demo/a": run("rope", 40.0), "demo/b": {**run("rope", 40.0), "scale": "books"}}
    every["demo/b"]["metrics"] = {"test": every["demo/b"]["metrics"]["valid"]}
    first, second = lines(checkout, every, columns=["softmax-valid", "softmax-other"])
    assert [first[1], second[1]] == ["`small`", "`books`"]
    assert not any("`other`" in line[5] or "`valid`" in line[5] for line in (first, second))
