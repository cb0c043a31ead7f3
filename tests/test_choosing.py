"""docs/choosing.md: ranks with ties, the short answer, findings, and checked statements."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from lrpe_fairseq.experiments.families.plan import load_named
from lrpe_fairseq.experiments.records.choices import FILE, VERDICTS, Statement, load_choices
from lrpe_fairseq.experiments.records.files import ROOT
from lrpe_fairseq.experiments.records.layout import load_table
from lrpe_fairseq.experiments.records.runs import read_runs, write_run
from lrpe_fairseq.experiments.report import boards, cells, choosing, claims, pages
from lrpe_fairseq.experiments.report.sheet import sheets
from tests.test_results import make_run, ppl

TABLE = """
title: Demo
text: A table.
experiments: [demo]
scales: {small: configs/small.yaml}
baseline: Base
better: lower
options: {model.attention_normalizer: rotated, model.no_token_positional_embeddings: false}
columns:
  - {key: linear, title: valid, attention: linear, split: valid, protocol: blocks, metric: ppl,
     paper: {file: demo.csv, split: valid}}
rows:
  - {label: Base, encoding: none, attention: [linear], method: Base}
  - {label: NoPE, encoding: none, attention: [linear],
     overrides: {model.no_token_positional_embeddings: true}}
  - {label: RoPE, encoding: rope, attention: [linear], method: RoPE}
  - {label: RoPE-LN, encoding: rope, attention: [linear],
     overrides: {model.attention_normalizer: layernorm}}
  - {label: Type4, encoding: lrpe-tmlr-type3, attention: [linear]}
  - {label: PER, encoding: permuteformer, attention: [linear]}
"""
CHOICES = """
aspects:
  - {key: lm, title: LM, text: perplexity., command: make docs, better: lower,
     sources: [{table: demo, scale: small, linear: linear}]}
  - {key: speed, title: speed, text: relative., command: make bench, better: higher, quality: false,
     benchmark: table9}
figure: [lm, speed]
ratios: {file: none.csv, table: demo, scale: small, short: linear, long: linear}
findings:
  - {title: Rotations, table: demo, scale: small,
     text: "RoPE has [[RoPE | linear]], NoPE [[NoPE | linear]]."}
statements:
  - {source: A paper, text: "RoPE has [[paper RoPE | linear]]", table: demo, scale: small,
     column: linear, first: RoPE, others: [Base], verdict: supported}
"""
DEMO_CSV = "method,split,value,std,printed,note\nBase,valid,30.0,,30.0,\nRoPE,valid,20.0,,20.0,\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in {
        "configs/tables/demo.yaml": TABLE,
        "configs/choosing.yaml": CHOICES,
        "results/paper/demo.csv": DEMO_CSV,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "results" / "runs").mkdir()
    return tmp_path


def save(root: Path, encoding: str, *values: float, **config: object) -> None:
    for seed, value in enumerate(values, 1):
        run = make_run(
            position_encoding=encoding, seed=seed, metrics=ppl(value), config=config or {"x": 1}
        )
        name = f"{encoding}-{len(config)}-{seed}.json".replace(":", "-")
        write_run(root / "results" / "runs" / "demo" / name, run)


def page(root: Path) -> str:
    return choosing.pages(root)[choosing.PAGE]


def edit(root: Path, old: str, new: str) -> None:
    text = (root / FILE).read_text()
    assert old in text
    (root / FILE).write_text(text.replace(old, new))


def line(text: str, start: str) -> str:
    return next(row for row in text.splitlines() if row.startswith(start))


def test_without_runs_the_page_says_not_measured_and_states_nothing(root: Path) -> None:
    text = page(root)
    assert "| LM | not measured | not measured |" in text
    assert "Published statements" not in text
    assert choosing.pictures(root) == {}


def test_the_index_and_the_pages_of_the_tables_that_it_reads_link_it_first(root: Path) -> None:
    link = "\n\n[Which encoding?](../docs/choosing.md) compares the encodings across tables and"
    other = TABLE.replace("title: Demo", "title: Other")
    (root / "configs" / "tables" / "other.yaml").write_text(other)
    save(root, "none", 50.0)
    texts = pages.pages(root)
    assert texts["results/README.md"].startswith(f"# Results{link}")
    assert texts["results/demo.md"].startswith(f"# Demo{link}")
    assert "choosing.md" not in texts["results/other.md"]
    (root / FILE).unlink()
    assert "choosing.md" not in "".join(pages.pages(root).values())


def test_ranks_are_shared_where_no_order_is_supported(root: Path) -> None:
    save(root, "none", 50.0, 50.1)
    save(root, "rope", 40.0, 40.1)
    save(root, "lrpe:householder:permutation", 39.0, 40.6)  # one seed ahead of RoPE, one behind
    save(root, "none", 60.0, **{"model.no_token_positional_embeddings": True})
    save(root, "rope", 30.0, **{"model.attention_normalizer": "layernorm", "x": 2})
    text = page(root)
    assert line(text, "| `rope` |").startswith("| `rope` | **40.05† (1–2)** | — |")
    assert line(text, "| `lrpe-type4` |").startswith("| `lrpe-type4` | **39.80† (1–2)** |")
    assert line(text, "| `none` with sinusoids |").startswith(
        "| `none` with sinusoids | 50.05 (3) |"
    )
    assert line(text, "| `none` |").startswith("| `none` | 60.00 (–) |")
    assert line(text, "| `rope` with `layernorm` |").startswith(
        "| `rope` with `layernorm` | 30.00† (–) |"
    )
    assert (
        "| LM | `lrpe-type4` (39.80) and `rope` (40.05), of 3 methods; not ranked, with a "
        "better mean: `rope` with `layernorm` (30.00) | not measured |" in text
    )
    assert "RoPE has 40.05, NoPE 60.00." in text


def test_seeds_that_differ_much_do_not_make_a_method_the_best(root: Path) -> None:
    """No order separates the last method from the first two, but its mean is far behind theirs."""
    save(root, "rope", 40.0, 40.1)
    save(root, "lrpe-type4", 50.0, 50.1)
    save(root, "none", 60.0, 5000.0)
    save(root, "permuteformer", 50.0, 50.1)
    board = boards.boards(root, load_choices(root / FILE), {"demo": demo(root)})["lm", "linear"]
    scores = boards.values(board)
    assert not claims.ahead(scores["`rope`"], scores[boards.SINUSOIDAL], "lower")
    others = {"`lrpe-type4`": (2, 4), "`permuteformer`": (2, 4)}
    assert board.ranks == {"`rope`": (1, 2), **others, boards.SINUSOIDAL: (1, 4)}
    assert boards.leading(board) == ["`rope`"]
    assert boards.cell(board, boards.SINUSOIDAL) == "2530 (1–4)"
    assert "| LM | `rope` (40.05), of 4 methods |" in page(root)


def test_where_the_baseline_leads_the_answer_says_so(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(root, "rope", 40.0, 40.1)
    save(root, "none", 40.1, 40.0)
    save(root, "permuteformer", 70.0, 70.1)
    monkeypatch.setattr(choosing, "MOST", 0)
    best = "no method is ahead of `none` with sinusoids (40.05); best mean"
    assert f"| LM | {best}: " in page(root)


def test_findings_without_runs_are_counted(root: Path) -> None:
    save(root, "rope", 40.0, 40.1)
    save(root, "none", 60.0, **{"model.no_token_positional_embeddings": True})
    left = "Left out, because a cell has no runs yet: 1 of the findings."
    assert left not in page(root)
    more = '  - {title: PER, table: demo, scale: small, text: "[[PER | linear]]"}'
    edit(root, "statements:", f"{more}\nstatements:")
    assert left in page(root)


def test_a_mean_behind_that_of_a_beaten_method_is_not_one_of_the_best(root: Path) -> None:
    save(root, "rope", 40.0, 40.1)
    save(root, "lrpe-type4", 50.0, 50.1)
    save(root, "none", 45.0, 58.0)
    save(root, "permuteformer", 70.0, 70.1)
    save(root, "rope", 71.0, 71.1, attention_normalizer="layernorm")
    board = boards.boards(root, load_choices(root / FILE), {"demo": demo(root)})["lm", "linear"]
    assert board.ranks["`rope`"] == (1, 2)
    assert board.ranks["`lrpe-type4`"] == (2, 3)
    assert board.ranks[boards.SINUSOIDAL] == (1, 3)  # ahead of two, but its mean is 51.5
    assert boards.leading(board) == ["`rope`"]


def test_a_method_that_has_not_learned_the_task_is_marked_and_has_no_rank(root: Path) -> None:
    edit(root, "linear: linear}]}", "linear: linear}],\n     "
         "learned: {linear: linear, softmax: linear, least: 45}}")  # fmt: skip
    save(root, "none", 50.0, 50.1)
    save(root, "rope", 60.0, 60.1)
    save(root, "lrpe-type4", 40.0, 47.0)
    text = page(root)
    assert line(text, "| `lrpe-type4` |").startswith("| `lrpe-type4` | 43.50†‡ (–) |")
    assert line(text, "| `rope` |").startswith("| `rope` | 60.05† (2) |")
    assert "‡: not learned; with a seed it is below 45 at the training length" in text
    edit(root, "least: 45", "least: 70")
    assert "| LM | not learned (43.50 to 60.05 over 3 rows) |" in page(root)
    edit(root, "sources: [{table: demo, scale: small, linear: linear}],", "benchmark: table9,")
    with pytest.raises(ValueError, match="learned of lm needs sources"):
        page(root)


def test_the_short_answer_names_the_smaller_side_and_counts_better_values_of_one_seed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(root, "rope", 40.0, 40.1)
    save(root, "lrpe-type4", 40.0, 40.1)
    save(root, "none", 50.0, 50.1)
    for place, name in enumerate(("none", "rope")):
        other = {"model.no_token_positional_embeddings": True} if name == "none" else {}
        other |= {"model.attention_normalizer": "layernorm"} if name == "rope" else {}
        save(root, name, 30.0 + place, **other)
    monkeypatch.setattr(choosing, "MOST", 1)
    text = page(root)
    assert (
        "| LM | all 3 methods (40.05) but `none` with sinusoids (50.05); not ranked, with a better "
        "mean: `none` (30.00) and 1 more |" in text
    )
    monkeypatch.setattr(choosing, "MOST", 0)
    assert "| LM | 2 of 3 methods (40.05);" in page(root)


def test_a_column_without_ranks_shows_values_and_is_not_in_the_answers(root: Path) -> None:
    edit(root, "quality: false,\n", "quality: false, ranked: false,\n")
    edit(root, "benchmark: table9", "metric: peak_memory_mb, decimals: 0, "
         "sources: [{table: demo, scale: small, linear: linear}]")  # fmt: skip
    for encoding, memory in (("none", 500), ("rope", 400)):
        for seed in (1, 2):
            run = make_run(position_encoding=encoding, seed=seed, metrics=ppl(40.0),
                           config={"x": 1}, peak_memory_mb=memory + seed)  # fmt: skip
            write_run(root / "results" / "runs" / "demo" / f"{encoding}{seed}.json", run)
    text = page(root)
    assert line(text, "| `rope` |").endswith(" | 402 |")
    assert "| speed |" not in text.partition("## All measurements")[0]
    assert "speed, linear" not in text


def test_a_later_row_of_a_method_is_one_of_its_own_with_the_options_that_it_changes(
    root: Path,
) -> None:
    table = root / "configs" / "tables" / "demo.yaml"
    text = table.read_text().replace("-embeddings: false}", "-embeddings: false, period: 1}", 1)
    other = "{label: PER-2, encoding: permuteformer, attention: [linear], overrides: {period: 2}}"
    table.write_text(f"{text}  - {other}\n")
    save(root, "permuteformer", 20.0, 20.2, period=2)
    assert "`permuteformer` |" not in page(root)
    save(root, "permuteformer", 30.0, 30.2, period=1, more=0)
    assert "| 30.10† (2) |" in line(page(root), "| `permuteformer` |")
    assert "| **20.10† (1)** |" in line(page(root), "| `permuteformer` with `period` 2 |")
    edit(root, "long: linear}", "long: linear, rows: [PER-2]}")
    ratios = root / "results" / "paper" / "none.csv"
    head = "method,encoding,attention,dataset,trained,length,metric,split,value,std,printed,note\n"
    cell = "PER,permuteformer,linear,Books,512,{0},PPL,,{1},,{1},\n"
    ratios.write_text(head + cell.format(512, "20.0") + cell.format(1024, "30.0"))
    ratio = "| `permuteformer` with `period` 2 | Books, 512 to 1024 | 1.500 | 1.000 |"
    assert ratio in page(root)


def test_a_method_that_diverged_is_not_called_unmeasured(root: Path) -> None:
    save(root, "rope", 40.0, 40.1)
    save(root, "none", 50.0)
    lost = {"valid": {"blocks": {"diverged": 1, "tokens": 1000}}}
    for encoding, seed in (("none", 2), ("lrpe-type4", 1), ("lrpe-type4", 2)):
        run = make_run(position_encoding=encoding, seed=seed, metrics=lost, config={"x": 1})
        write_run(root / "results" / "runs" / "demo" / f"lost-{encoding}-{seed}.json", run)
    text = page(root)
    assert line(text, "| `lrpe-type4` |").startswith("| `lrpe-type4` | diverged | — |")
    assert line(text, "| `none` with sinusoids |").startswith(
        "| `none` with sinusoids | 50.00 (–), diverged |"
    )
    alone = "one of 2 methods has several seeds without a divergence"
    assert f"| LM | {alone}: `rope` (40.05) |" in text
    save(root, "none", 60.0, 60.1)  # one more seed diverges, so the only order has no rank
    run = make_run(position_encoding="none", seed=3, metrics=lost, config={"x": 1})
    write_run(root / "results" / "runs" / "demo" / "lost-none-3.json", run)
    (root / "results" / "runs" / "demo" / "lost-none-2.json").unlink()
    assert f"| LM | {alone}: `rope` (40.05) |" in page(root)


def test_a_method_for_causal_attention_has_no_cell_in_a_column_of_bidirectional_models(
    root: Path,
) -> None:
    save(root, "rope", 40.0, 40.1)
    choices = load_choices(root / FILE)
    for bidirectional, shown in ((False, "—"), (True, "n/a")):
        aspect = dataclasses.replace(choices.aspects[0], bidirectional=bidirectional)
        board = boards.board(root, aspect, "linear", {"demo": demo(root)})
        assert boards.cell(board, "`rope`") != "n/a"
        assert boards.cell(board, "`rope` with `layernorm`") == "—"
        assert boards.cell(board, "`fox`") == boards.cell(board, "`gated:rope`") == shown


def test_every_run_of_the_language_model_of_this_repository_is_on_the_page() -> None:
    """A normalizer that was measured must not be called unmeasured."""
    choices, found = choosing._read(ROOT)
    known = boards.boards(ROOT, choices, found)["lm", "linear"]
    [sheet] = found["normalizers"]
    measured = {
        boards.method(row.encoding, {**sheet.table.options, **column.overrides})
        for row in sheet.table.rows
        for column in sheet.table.columns
        if sheet.ours(row, column)
    }
    assert len(measured) > 10
    assert measured <= {row.label for row in known.table.rows}


def save_speeds(root: Path, *encodings: str) -> None:
    rows = [{"attention": "linear", "encoding": name, "relative_speed": 1 - n / 10}
            for n, name in enumerate(encodings)]  # fmt: skip
    path = root / "results" / "bench" / "cpu" / "table9.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"part": "table9", "rows": rows}))


def save_three(root: Path) -> None:
    """Quality and speed of three methods, the fewest of a picture."""
    names = ("none", "rope", "lrpe-type4")
    for place, name in enumerate(names):
        save(root, name, 50.0 + place, 50.1 + place)
    save_speeds(root, *names)


def test_a_benchmark_of_another_device_is_read_from_its_folder(root: Path) -> None:
    save_three(root)
    edit(root, "benchmark: table9", "benchmark: table9, device: cuda")
    assert line(page(root), "| `rope` |").endswith(" — |")
    bench = root / "results" / "bench"
    (bench / "cpu").rename(bench / "cuda")
    assert line(page(root), "| `rope` |").endswith(" 0.90 (–) |")


def test_the_caption_names_the_methods_whose_speed_is_not_measured(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_three(root)
    assert "Absent" not in page(root)
    save(root, "none", 60.0, **{"model.no_token_positional_embeddings": True})
    save(root, "rope", 30.0, **{"model.attention_normalizer": "layernorm", "x": 2})
    said = "Absent because their speed is not measured: 2 methods with linear attention"
    assert f"{said} (`none` and `rope` with `layernorm`)." in " ".join(page(root).split())
    monkeypatch.setattr(choosing, "MOST_ABSENT", 1)
    assert f"{said}." in " ".join(page(root).split())


def test_the_axes_of_the_picture_say_what_is_measured(root: Path) -> None:
    save_three(root)
    [panel] = choosing.pictures(root)[choosing.PICTURE].keywords["found"]
    assert (panel.x, panel.y) == ("speed (higher is better)", "LM (lower is better)")
    edit(root, "title: speed,", "title: speed, axis: words per second,")
    edit(root, "title: LM,", "title: LM, axis: perplexity of words,")
    [panel] = choosing.pictures(root)[choosing.PICTURE].keywords["found"]
    assert panel.x == "words per second (higher is better)"
    assert panel.y == "perplexity of words (lower is better)"


def test_a_finding_waits_for_every_cell_that_it_names(root: Path) -> None:
    save(root, "rope", 40.0, 40.1)
    assert "RoPE has" not in page(root).partition("Published statements")[0]


@pytest.mark.parametrize(
    ("base", "state"),
    [((50.0, 50.1), "supported"), ((30.0, 30.1), "contradicted"), ((40.1, 40.0), "open"),
     ((50.0,), "unmeasured")],
)  # fmt: skip
def test_a_statement_is_shown_only_where_the_runs_support_its_verdict(
    root: Path, base: tuple[float, ...], state: str
) -> None:
    save(root, "none", *base)
    save(root, "rope", 40.0, 40.1)
    found = {"demo": demo(root)}
    for verdict in VERDICTS:
        claim = Statement(
            "A paper", "RoPE has [[paper RoPE | linear]]", "demo", "small", "linear", "RoPE",
            ["Base"], verdict,
        )  # fmt: skip
        assert choosing.state(claim, found) == state
        assert bool(choosing.statement(claim, found)) == (verdict == state)
    if state == "supported":
        said = "Ours, [demo](../results/demo.md), column `valid`: RoPE (40.05) is ahead of"
        assert f"- Supported: RoPE has 20.0 (A paper). {said}" in " ".join(page(root).split())


def demo(root: Path) -> list:
    table = load_table(root / "configs" / "tables" / "demo.yaml")
    return sheets(root, table, read_runs(root / "results" / "runs"))


def test_a_statement_that_the_published_table_does_not_make_is_refused(root: Path) -> None:
    edit(root, "first: RoPE, others: [Base]", "first: Base, others: [RoPE]")
    save(root, "none", 50.0, 50.1)
    with pytest.raises(
        ValueError, match=r"puts Base ahead of RoPE in linear of demo, but it prints"
    ):
        page(root)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("NoPE [[NoPE | linear]]", "NoPE 60", "a text states 60 itself"),
        ("NoPE [[NoPE | linear]]", "RoPE is best", "a note says 'best' itself"),
        ("NoPE [[NoPE | linear]]", "NoPE is lower", "a note says 'lower' itself"),
        ("text: relative.", "text: 2 runs.", "a text states 2 itself"),
        ("text: relative.", "text: relative., axis: 2 runs", "a text states 2 itself"),
        (
            "verdict: supported",
            "verdict: perhaps",
            "a verdict must be one of supported, contradicted, open, not perhaps",
        ),
        ("benchmark: table9", "bench: table9", "a aspect has no key bench"),
        ("figure: [lm, speed]", "figure: [lm]", "figure needs the keys of a quality and of a cost"),
    ],
)
def test_a_wrong_configuration_gets_one_sentence(root: Path, old: str, new: str, said: str) -> None:
    edit(root, old, new)
    with pytest.raises(ValueError, match=said):
        load_choices(root / FILE)


def test_sources_of_one_column_need_one_configuration(root: Path) -> None:
    other = TABLE.replace("configs/small.yaml", "configs/other.yaml")
    (root / "configs" / "tables" / "other.yaml").write_text(other)
    edit(
        root, "linear: linear}]}", "linear: linear}, {table: other, scale: small, linear: linear}]}"
    )
    save(root, "rope", 40.0)
    with pytest.raises(ValueError, match="sources of lm have the configurations"):
        page(root)


# --- this repository --------------------------------------------------------------------------


def test_every_measured_statement_of_this_repository_holds() -> None:
    """If this fails, change the verdict or the statement in configs/choosing.yaml."""
    choices, found = choosing._read(ROOT)
    states = {
        f"{claim.first} | {claim.column} of {claim.table}": (
            claim.verdict,
            choosing.state(claim, found),
        )
        for claim in choices.statements
    }
    wrong = {k: v for k, (k2, v) in states.items() if v not in (k2, choosing.UNMEASURED)}
    assert wrong == {}
    assert sum(verdict == state for verdict, state in states.values()) >= 3


def test_every_source_and_finding_names_cells_that_exist() -> None:
    choices, tables = load_choices(ROOT / FILE), {}
    for path in (ROOT / "configs" / "tables").glob("*.yaml"):
        tables[path.stem] = load_table(path)
    for aspect in choices.aspects:
        for source in aspect.sources:
            for key in filter(None, (source.linear, source.softmax)):
                column = tables[source.table].at(source.scale).column(key)
                assert column.attention in (
                    source.linear and "linear",
                    source.softmax and "softmax",
                )
                assert column.better == aspect.better or aspect.metric
    for given in (*choices.findings, *choices.statements):
        for reference in choosing.references.references(given.text):
            table = tables[given.table].at(given.scale)
            table.column(reference.column)
            assert [table.row(label) for label in choosing.references.labels(reference)]
    for claim in choices.statements:
        table = tables[claim.table].at(claim.scale)
        assert [table.row(label) for label in (claim.first, *claim.others)]
        table.column(claim.column)


def every_run(name: str, keys: set[str], labels: tuple[str, ...] = ("",)) -> dict[str, dict]:
    """Two made-up runs for every cell of some columns, or of the columns that these average.

    labels: the rows have labels that start with one of them.
    """
    table, found = load_named(name), {}
    columns = {inner: table.column(inner) for key in keys
               for inner in (table.column(key).mean_of or [key])}  # fmt: skip
    for place, row in enumerate(table.rows):
        for key, column in columns.items():
            for seed in (1, 2) if row.has(column) and row.label.startswith(labels) else ():
                measured = {column.metric: 50.0 + place + seed / 10, "loss": 1.0, "delta": 0.2}
                metrics = {column.split: {column.protocol: measured}}
                metrics.setdefault("valid", {}).setdefault("whole", {"loss": 1.0})
                found[f"{name}/{row.label}-{key}-{seed}"] = make_run(
                    experiment=name,
                    position_encoding=row.encoding,
                    attention_type=column.attention,
                    seed=seed,
                    dataset=column.dataset or "data",
                    metrics=metrics,
                    config={"optimization.lr": [0.003], "task.tokens_per_sample": 128}
                    | table.options | row.overrides | column.overrides,
                )  # fmt: skip
    return found


def test_the_page_fills_in_when_the_missing_tables_have_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Runs of one table are in one cell each: another column of a cell has a run of its own."""
    named = ("NoPE", "RoPE", "Type1", "Type2", "Type4", "Type8", "FoX")
    made = every_run("extrapolation", {"linear-paired-2048", "softmax-paired-2048"})
    made |= every_run("extrapolation", {"linear-paired-128", "softmax-paired-128"}, named)
    made |= every_run("extrapolation", {"linear-clamped-2048"}, ("Type1", "Type2", "Type4"))
    made |= every_run("listops", {"linear", "softmax", "linear-longer", "softmax-longer"})
    made |= every_run("images", {"linear-flat", "softmax-flat"})
    made |= every_run("synthetic", {"softmax-mqar-tokens-2x"})
    monkeypatch.setattr(choosing, "read_runs", lambda folder: made)
    text = page(ROOT)
    for attention, start in (("linear", "| `rope` | — |"), ("softmax", "| `t5` |")):
        own = text.partition(f"| {attention} attention | LM")[2]
        # LM, translation, memory, digits of T5, other lengths of recall or all of linear models
        assert line(own, start).count("| — ") <= 6
    assert "- **Types 1 and 4 of LRPE, linear attention.** The change" in text
    assert "- **Decays beyond the training length, linear attention.** " in text
    assert "`gated:lrpe-type2`" in text


def test_no_row_reaches_the_guess_on_expressions_longer_than_those_of_training() -> None:
    """What listops.yaml and choosing.yaml say. If this fails, compare the rows in these columns."""
    text = (ROOT / "data-prep" / "listops" / "README.md").read_text(encoding="utf-8")
    root = float(line(text, "| 100-400 |").split("|")[3])
    [sheet] = choosing._read(ROOT)[1]["listops"]
    means = [
        cells.mean(scores)
        for row in sheet.table.rows
        for key in ("linear-longer", "softmax-longer")
        if (scores := sheet.ours(row, sheet.table.column(key)))
    ]
    assert len(means) > 10
    assert max(means) < root


def test_the_axes_of_the_picture_of_this_repository_say_what_is_measured() -> None:
    for panel in choosing.pictures(ROOT)[choosing.PICTURE].keywords["found"]:
        assert panel.y == "validation perplexity (lower is better)"
        assert panel.x == "training speed relative to sinusoidal positions (higher is better)"


def test_contexts_have_a_matrix_of_their_own_whose_columns_share_a_text() -> None:
    text = page(ROOT).partition("### At which length?")[2]
    assert "- context 128, as in training, context 256, context 512, context 1024: test" in text
    assert "| context 1024 ↓ | context 2048 ↓ | window at 2048 ↓ | beyond window ↑ |" in text


def test_the_short_answer_has_the_shortest_and_the_longest_context_only() -> None:
    text = page(ROOT).partition("## What was found")[0]
    assert "| context 128, as in training |" in text
    assert "| context 2048 |" in text
    assert "| context 512 |" not in text


def test_the_short_answer_is_on_the_first_screen() -> None:
    text = (ROOT / choosing.PAGE).read_text(encoding="utf-8").splitlines()
    assert text.index("## The short answer") < 12
    assert next(n for n, row in enumerate(text) if row.startswith("| LM |")) < 20
    assert claims.RULE.split(".")[0].split()[0] in " ".join(text[:10])


def test_the_readme_shows_the_answers_of_the_aspects_in_summary(root: Path) -> None:
    edit(root, "figure: [lm, speed]", "figure: [lm, speed]\nsummary: [lm]")
    save(root, "rope", 40.0, 40.1)
    save(root, "none", 50.0, 50.1)
    shown = choosing.summary(root)
    assert shown.splitlines()[2:] == ["| LM | `rope` (40.05), of 2 methods | not measured |"]
    assert shown in page(root)
    edit(root, "summary: [lm]", "summary: [ml]")
    with pytest.raises(ValueError, match="summary needs keys of aspects"):
        choosing.summary(root)


def test_the_page_does_not_depend_on_the_order_of_the_runs(root: Path) -> None:
    save(root, "rope", 40.0, 40.1)
    save(root, "none", 50.0, 50.1)
    first = page(root)
    shutil.rmtree(root / "results" / "runs")
    save(root, "none", 50.0, 50.1)
    save(root, "rope", 40.0, 40.1)
    assert page(root) == first
