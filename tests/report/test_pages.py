"""The pages: text, sizes, statements, and that every number comes from a run."""

import csv
import dataclasses
import io
import re

import pytest
import yaml

from lrpe_fairseq.experiments.records.files import ROOT
from lrpe_fairseq.experiments.records.tables import load_tables
from lrpe_fairseq.experiments.report import choosing, columns, constants, pages
from lrpe_fairseq.experiments.report.results import Results, results_of
from tests.report.test_columns import MEANS, checkout, column, measured, save


@pytest.fixture
def root(tmp_path):
    return checkout(tmp_path)


def rendered(root):
    results_of.cache_clear()
    return pages.pages(root)


def test_a_page_has_verdict_picture_grid_and_files(root):
    text = rendered(root)["results/demo.md"]
    flat = " ".join(text.split())
    assert text.startswith("# Demo\n\nA table.\n")
    assert (
        "- Linear attention, valid, 3 seeds, provisional. Unbeaten: `permuteformer, layernorm` "
        "40.30. Against the baseline `none, sinusoidal` 60.30: 3 better."
    ) in flat
    assert "tied" not in flat
    assert "![Perplexity: ours against the paper's](figures/demo-wikitext-2-small.png)" in text
    assert "| method | valid | paper | accuracy |" in text
    points = columns.size(column(root, "acc").verdict("RoPE", "Base").visible, "fraction")
    assert f"| `rope` | 50.30±0.10 ✓ | 33.00 | 49.90±0.10 ? {points} |" in text
    assert "Signs are against the baseline" in flat
    assert "12 runs (0.0 h) on A CPU: [runs/demo](runs/demo)" in flat
    assert "`scripts/run_table.sh demo`" in flat


def test_a_verdict_counts_what_is_unresolved_with_what_would_have_shown(root):
    for seed, value in enumerate((59.0, 61.0, 60.5), start=1):
        save(root, "rope", seed, measured(value, seed))
    text = " ".join(rendered(root)["results/demo.md"].split())
    view = column(root)
    visible = columns.size(view.verdict("RoPE", "Base").visible, view.kind)
    assert "60.30: 2 better and 1 unresolved. For the unresolved one, " in text
    assert f"one, {visible} % would have shown." in text
    assert f"| `rope` | {view.text('RoPE')} ? {visible} |" in text


def test_no_generated_page_calls_rows_tied():
    answers = (ROOT / "README.md").read_text().partition("<!-- answer -->")[2]
    texts = {path: path.read_text() for path in (ROOT / "results").glob("*.md")}
    texts["README.md"] = answers.partition("<!-- /answer -->")[0]
    texts["docs/choosing.md"] = (ROOT / "docs" / "choosing.md").read_text()
    assert len(texts) > 30
    assert not [path for path, text in texts.items() if re.search(r"\btied\b", text)]


def test_a_rank_correlation_needs_ten_rows(root):
    view = column(root)
    assert pages.rank_correlation(view) == ""
    names = [f"r{n}" for n in range(12)]
    more = dataclasses.replace(
        view,
        cells={name: {1: 50.0 + n} for n, name in enumerate(names)},
        paper={name: 30.0 + n % 7 for n, name in enumerate(names)},
        runs={name: {1: name} for name in names},
    )
    assert re.search(
        r"paper: 0\.\d\d \[-?0\.\d\d, [01]\.\d\d\] over 12 rows", pages.rank_correlation(more)
    )


def test_the_csv_has_every_number(root):
    lines = list(csv.DictReader(io.StringIO(rendered(root)["results/demo.csv"])))
    assert len(lines) == len(MEANS) * 3
    first = lines[0]
    assert (first["method"], first["column"], first["seeds"]) == ("none, sinusoidal", "ppl", "3")
    assert float(first["mean"]) == pytest.approx(60.3)
    assert (float(first["paper"]), first["scale"]) == (34.0, "small")
    assert first["verdict"] == ""  # the baseline against itself
    rope = next(line for line in lines if (line["row"], line["column"]) == ("RoPE", "ppl"))
    found = column(root).verdict("RoPE", "Base")
    assert rope["verdict"] == "better"
    assert float(rope["difference"]) == pytest.approx(found.size, rel=1e-4)
    assert float(rope["low"]) < float(rope["difference"]) < float(rope["high"]) < 0


def test_a_table_without_runs_has_no_page(root):
    for run in (root / "results" / "runs" / "demo").glob("*.json"):
        run.unlink()
    assert not rendered(root).keys() & {"results/demo.md", "results/demo.csv"}


def test_a_seed_alone_supports_no_order_and_a_lost_row_is_marked(root):
    for run in (root / "results" / "runs" / "demo").glob("*-[23].json"):
        run.unlink()
    save(root, "rope", 1, {"valid": {"blocks": {"diverged": 1}}})
    text = rendered(root)["results/demo.md"]
    assert "1 seed: no verdicts (`permuteformer, layernorm` 40.20 to" in " ".join(text.split())
    assert "| `rope` | not finite | 33.00 |" in text


def test_a_page_names_the_rows_and_columns_that_have_no_value(root):
    text = rendered(root)["results/demo.md"]
    assert "\n\nRows without a value here: `spe`.\n\n" in text
    assert "Columns without a value" not in text
    path = root / "configs" / "tables" / "demo.yaml"
    other = "  - {key: other, title: other, attention: linear, split: test, protocol: blocks,"
    changed = f"{other} metric: ppl}}\nheadline: [ppl, other]"
    path.write_text(path.read_text().replace("headline: [ppl, acc]", changed))
    text = rendered(root)["results/demo.md"]
    assert "Rows without a value here: `spe`. Columns without a value: `other`." in text


def test_a_column_with_own_trainings_that_the_page_does_not_show_is_named(root):
    path = root / "configs" / "tables" / "demo.yaml"
    own = "  - {key: own, title: own, attention: linear, split: valid, protocol: blocks,"
    own += " metric: accuracy, config: configs/own.yaml, dataset: own}\nheadline: [ppl, acc]"
    path.write_text(path.read_text().replace("headline: [ppl, acc]", own))
    assert "Columns without a value: `own`." in rendered(root)["results/demo.md"]


def test_a_page_of_several_scales_has_the_machines_of_each(root):
    path = root / "configs" / "tables" / "demo.yaml"
    two = "scales: {small: configs/small.yaml, large: configs/large.yaml}"
    path.write_text(path.read_text().replace("scales: {small: configs/small.yaml}", two))
    card = {"cpu": "A CPU", "gpus": ["A GPU"]}
    save(root, "rope", 4, measured(50.0, 1), scale="large", hardware=card)
    text = rendered(root)["results/demo.md"]
    assert "13 runs (0.0 h; `small`: 12 on A CPU; `large`: 1 on A GPU): [runs/demo]" in text


def test_the_index_shows_verdicts_before_one_seed_and_how_many_rows_were_trained(root):
    path = root / "configs" / "tables" / "demo.yaml"
    two = "scales: {large: configs/large.yaml, small: configs/small.yaml}"
    path.write_text(path.read_text().replace("scales: {small: configs/small.yaml}", two))
    save(root, "rope", 4, measured(10.0, 1), scale="large")
    results = Results(root)
    _, _, shown = choosing._first(results, results.tables["demo"])
    assert shown == "linear `permuteformer, layernorm` 40.30, 4 of 5 rows"


def test_the_hours_of_all_runs_are_those_of_their_files(root):
    save(root, "rope", 4, measured(50.0, 1), wall_seconds=7200, hardware={"gpus": ["A GPU"]})
    save(root, "rope", 5, measured(50.0, 1), wall_seconds=36000)
    text = choosing._hours(Results(root))
    assert text.startswith("14 runs, 10.0 h on CPUs and 2.0 h on GPUs")


def test_columns_are_compared_with_the_first_where_the_table_says_so(root):
    path = root / "configs" / "tables" / "demo.yaml"
    second = "  - {key: test, title: test, attention: linear, split: test, protocol: blocks,"
    changed = f"{second} metric: ppl}}\ncompare: columns\nheadline: [ppl, test]"
    path.write_text(path.read_text().replace("headline: [ppl, acc]", changed))
    for encoding in ("none", "rope"):
        both = measured(MEANS[encoding], 1)
        test = {"blocks": {"ppl": both["valid"]["blocks"]["ppl"] * 1.1}}
        save(root, encoding, 1, {**both, "test": test})
    page = rendered(root)["results/demo.md"]
    said = "Linear attention, relative to valid, 3 seeds: test +10.0 to +10.0 % (2 rows)."
    assert said in page  # of the seed that both columns have
    [rope] = [line for line in page.splitlines() if line.startswith("| `rope`")]
    valid, _, test = rope.strip("| ").split(" | ")[1:]  # the paper's column is between them
    assert (valid.endswith(" (1)"), test.endswith(" (1)")) == (False, True)


def test_a_table_without_verdicts_is_a_line_on_the_page_of_another(root):
    path = root / "configs" / "tables" / "demo.yaml"
    path.write_text(path.read_text() + "page: other\n")
    assert "| `rope` |" in rendered(root)["results/other.md"]
    for run in (root / "results" / "runs" / "demo").glob("*-[23].json"):
        run.unlink()
    page = rendered(root)["results/other.md"]
    assert "No row has a verdict, so only the CSV has the numbers." in page
    assert "| `rope` |" not in page
    assert "rope" in rendered(root)["results/demo.csv"]
    assert not pages.pictures(root)


def test_every_picture_is_drawn_and_equal_content_has_equal_bytes(root):
    results_of.cache_clear()
    [(path, draw)] = pages.pictures(root).items()
    draw(root / path)
    first = (root / path).read_bytes()
    draw(root / path)
    assert (root / path).read_bytes() == first


def test_a_sentence_that_the_runs_contradict_is_refused():
    assert choosing.expect(True) == ""
    with pytest.raises(ValueError, match="do not support a sentence of README"):
        choosing.expect(False)


def test_a_statement_of_a_paper_holds_is_not_reproduced_or_is_unresolved(root):
    view = column(root)
    assert choosing.verdict(view, "PER-LN", ["Base", "RoPE"]) == "holds"
    assert choosing.verdict(view, "RoPE", ["Base", "PER-LN"]) == "not reproduced at this scale"
    assert view.mark("RoPE", "Type2") == "equal"
    assert choosing.verdict(view, "RoPE", ["Base", "Type2"]) == "not reproduced at this scale"
    assert choosing.verdict(view, "SPE", ["Base"]) == "unresolved"  # not run


def test_a_statement_shows_the_papers_numbers_and_ours(root):
    given = {"claim": "c", "source": "s", "table": "demo", "scale": "small", "column": "ppl"}
    stated = [{**given, "first": "PER-LN", "others": ["Base"]}]
    (root / "results" / "paper" / "statements.yaml").write_text(yaml.safe_dump(stated))
    [found] = choosing.statements(Results(root))
    ours = "valid: `permuteformer, layernorm` 40.30, `none, sinusoidal` 60.30"
    assert (found["paper"], found["ours"]) == ("31.00, 34.00", ours)
    assert found["verdict"] == "holds"


def test_the_statements_of_this_repository_name_rows_and_columns_that_exist():
    tables = {table.name: table for table in load_tables(ROOT / "configs" / "tables")}
    for given in yaml.safe_load((ROOT / "results" / "paper" / "statements.yaml").read_text()):
        table = tables[given["table"]]
        assert given["scale"] in table.scales
        at = table.at(given["scale"])
        assert at.column(given["column"])
        assert all(at.row(label).has(at.column(given["column"])) for label in given["others"])
        assert at.row(given["first"])


def test_a_mean_of_tasks_stands_beside_that_of_constant_answers(root):
    path = root / "configs" / "tables" / "demo.yaml"
    mean = "  - {key: mean, title: mean, attention: linear, mean_of: [acc], better: higher}"
    text = path.read_text().replace("headline: [ppl, acc]", f"{mean}\nheadline: [mean]")
    own = "metric: accuracy, dataset: wikitext-2, better: higher}"
    path.write_text(text.replace("metric: accuracy, better: higher}", own))
    assert "Constant answers" not in rendered(root)["results/demo.md"]
    (root / "results" / "bench").mkdir()
    (root / constants.FILE).write_text('{"wikitext-2": 45.0}')
    text = rendered(root)["results/demo.md"]
    assert "|  | mean | wikitext-2 |" in text
    assert "| most frequent class | 45.0 | 45.0 |" in text
    assert "| rows, linear | 39.9 to 59.9 | 39.9 to 59.9 |" in text
    results = Results(root)
    assert choosing._first(results, results.tables["demo"])[2].endswith("; constant answers 45.00")
