"""A picture changes only with what it shows: neither with a new encoding nor with another table."""

import dataclasses
import itertools

import pytest

from lrpe_fairseq.encodings import ENCODINGS
from lrpe_fairseq.experiments.records.files import ROOT
from lrpe_fairseq.experiments.records.methods import public_name
from lrpe_fairseq.experiments.report import docs, pages, plots
from lrpe_fairseq.experiments.report.results import results_of
from tests.report.test_columns import TABLE, checkout

NAMES = [name for name in ENCODINGS if public_name(name) == name]
FREE = ("lrpe:identity:rotation-learned", "lrpe:identity:unitary", "fox,fox,none", "3-gram counts")
NEW = ("a-new-one", "newest", "zz-last")


@pytest.fixture
def more_encodings():
    """New names before, between and after the others."""
    before = dict(ENCODINGS)
    middle = len(before) // 2
    items = list(before.items())
    first, second, third = ((name, type(name, (ENCODINGS["none"],), {})) for name in NEW)
    ENCODINGS.clear()
    ENCODINGS.update([first, *items[:middle], second, *items[middle:], third])
    yield
    ENCODINGS.clear()
    ENCODINGS.update(before)


ALONE = {name: plots.styles([name])[name] for name in (*NAMES, *FREE)}


@pytest.mark.usefixtures("more_encodings")
@pytest.mark.parametrize("name", ALONE)
def test_the_style_of_a_name_does_not_change_when_a_name_is_added(name):
    assert plots.styles([name])[name] == ALONE[name]
    together = plots.styles([*NEW, name, *NAMES])
    assert together[name] == ALONE[name]


@pytest.mark.usefixtures("more_encodings")
def test_different_encodings_of_a_picture_have_different_styles():
    methods = [*NAMES, *NEW, *FREE]
    found = plots.styles(methods)
    assert len({(own["color"], own["marker"]) for own in found.values()}) == len(methods)
    colliding = [f"method-{n}" for n in range(60)]  # some have one place by their hashes
    found = plots.styles(colliding)
    assert len({(own["color"], own["marker"]) for own in found.values()}) == len(colliding)


def test_variants_of_a_method_have_its_color_and_marker():
    variants = ["fox", "gated:fox", "path:fox", "gated:path:fox", "fox, layernorm", "fox (linear)*"]
    found = plots.styles(variants)
    assert {(own["color"], own["marker"]) for own in found.values()} == {("C5", "o")}
    assert found["gated:fox"]["markerfacecolor"] == "white"
    assert found["path:fox"]["fillstyle"] == "left"
    assert found["fox, layernorm"]["linestyle"] == "--"


def test_n_grams_are_grey_and_take_no_place_of_a_method():
    methods = [plots.NGRAMS, "fox", plots.CACHED]
    found = plots.styles(methods)
    assert list(found) == methods
    assert found["fox"] == ALONE["fox"]
    both = found[plots.NGRAMS], found[plots.CACHED]
    assert all(own["color"] == "grey" and own["marker"] == "" for own in both)
    assert both[0]["linestyle"] != both[1]["linestyle"]


def test_every_listed_name_is_an_encoding_and_has_one_place():
    listed = [name for names in plots.LOOKS.values() for name in names.split() if name != "-"]
    assert len(set(listed)) == len(listed)
    assert set(listed) <= set(NAMES)
    assert all(len(names.split()) <= len(plots.COLORS) for names in plots.LOOKS.values())


@pytest.fixture
def root(tmp_path):
    """Two tables of equal rows; runs of the first fill cells of a third too."""
    checkout(tmp_path)
    for name, experiments in (("other", "[other]"), ("third", "[third, demo]")):
        text = TABLE.replace("title: Demo", f"title: {name}")
        text = text.replace("experiments: [demo]", f"experiments: {experiments}")
        (tmp_path / "configs" / "tables" / f"{name}.yaml").write_text(text)
    runs = tmp_path / "results" / "runs"
    for path in (runs / "demo").glob("*.json"):
        copy = runs / "other" / path.name
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(path.read_text().replace('"demo"', '"other"'))
    (tmp_path / "docs").mkdir()
    results_of.cache_clear()
    yield tmp_path
    results_of.cache_clear()


def drawn(root):
    """The pictures that were written, without the scale and the data in their names."""
    return {path.name.partition("-")[0] for path in root.rglob("*.png")}


@pytest.mark.parametrize(
    ("table", "new", "expected"),
    [
        ("other", (), {"other"}),
        ("demo", (), {"demo"}),
        ("other", ("other/rope-1.json",), {"other"}),
        ("demo", ("demo/rope-1.json",), {"demo", "third"}),
        ("third", ("demo/rope-1.json",), {"demo", "third"}),
        ("without-runs", (), set()),
    ],
)
def test_a_table_draws_its_own_pictures_and_those_that_show_its_new_runs(
    root, table, new, expected
):
    assert docs.main_of_table(table, new, root) == 0
    assert drawn(root) == expected
    assert {path.stem for path in (root / "results").glob("*.csv")} == {"demo", "other", "third"}


def test_all_pictures_are_drawn_without_a_table(root):
    assert docs.main(["results", "--root", str(root)]) == 0
    assert drawn(root) == {"demo", "other", "third"}


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ("grid", set()),  # its rows have no verdict: a line on another page
        (
            "extrapolation",
            {"extrapolation-lengths", "extrapolation-wikitext-2-bpe-small", "choosing-speed"},
        ),
        ("catalogue", {"catalogue-wikitext-2-bpe-small"}),
    ],
)
def test_a_table_of_this_repository_draws_its_own_pictures_only(table, expected):
    found = docs.pictures_of(ROOT, table, ())
    assert {
        path.removeprefix("results/figures/").removesuffix(".png") for path in found
    } == expected


def test_names_beside_curves_keep_their_distance_and_move_as_little_as_possible():
    assert plots.spread([0.1, 0.5, 0.9], 0.2) == [0.1, 0.5, 0.9]
    assert plots.spread([0.0, 1.0, 1.0], 0.2) == [0.0, 0.9, 1.1]
    crowded = [0.5, 0.51, 0.52, 0.53, 0.8]
    places = plots.spread(crowded, 0.1)
    gaps = [b - a for a, b in itertools.pairwise(places)]
    assert min(gaps) >= 0.1 - 1e-9
    assert sum(places) == pytest.approx(sum(crowded))


def panel(attention, values, marks=None):
    rows = {f"m{n}": [value] for n, value in enumerate(values)}
    return plots.Panel(
        f"{attention} attention, valid", "x", rows, kind="perplexity", marks=marks or {}
    )


def drawn_by(monkeypatch, draw):
    """The figure that a function of this module saves."""
    figures = []
    monkeypatch.setattr(plots, "save", lambda figure, path: figures.append(figure))
    draw()
    return figures[0]


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_panels_that_differ_in_attention_only_have_one_range_and_a_far_value_is_a_number(
    monkeypatch, tmp_path
):
    both = [panel("Linear", [90, 95, 100, 100, 110, 900]), panel("Softmax", [80, 85, 90, 92])]
    figure = drawn_by(monkeypatch, lambda: plots.dots(tmp_path / "a.png", both))
    first, second = figure.axes
    assert first.get_xlim() == second.get_xlim()
    assert first.get_xlim()[1] < 150
    assert "900 \u2192" in texts(first)
    assert not any("\u2192" in text for text in texts(second))


def test_a_far_point_stands_at_the_upper_edge_with_its_number(monkeypatch, tmp_path):
    rows = {f"m{n}": (50 + n, 100 + n) for n in range(7)} | {"far": (53, 700)}
    one = plots.Panel("Linear attention, valid", "x", rows, "y", "perplexity")
    figure = drawn_by(monkeypatch, lambda: plots.points(tmp_path / "a.png", [one]))
    assert "far: 700 \u2191" in texts(figure.axes[0])
    assert figure.axes[0].get_ylim()[1] < 200


def test_curves_are_named_at_their_ends_in_panels_of_one_range(monkeypatch, tmp_path):
    curves = {"rope": [(128, 80, 79, 81), (256, 900, 800, 950)], "fox": [(128, 78, 77, 79)] * 2}
    both = [plots.Panel(f"{kind} attention", "x", curves) for kind in ("linear", "softmax")]
    figure = drawn_by(monkeypatch, lambda: plots.lines(tmp_path / "a.png", both, 128, 200))
    first, second = figure.axes
    assert first.get_ylim() == second.get_ylim()
    assert first.get_ylim()[1] == pytest.approx(200)
    assert {"rope: 900 \u2191", "fox", " training length"} == set(texts(first))
    assert figure.legends == []


def test_budgets_are_curves_over_updates_and_other_columns_are_not():
    results = results_of(ROOT)
    by_updates = pages._by_updates(results.headlines(results.sheets_of("budget")[0]))
    assert [one.title for one in by_updates] == ["linear attention", "softmax attention"]
    xs = [x for x, *_ in by_updates[1].rows["rope"]]
    assert xs == [1800, 5400, 16200]
    assert plots.NGRAMS in by_updates[0].rows
    for table in ("table2", "extrapolation", "budget-mlm"):
        assert pages._by_updates(results.headlines(results.sheets_of(table)[0])) == []


def test_a_picture_beside_a_papers_values_says_what_it_is():
    results = results_of(ROOT)
    [sheet] = [each for each in results.sheets_of("table2") if each.scale == "annealed"]
    note = pages._note(sheet, results.headlines(sheet))
    assert "only orders can be compared" in note
    assert note.endswith("Ours have one seed, so these orders may be chance.")


def test_a_number_of_tokens_in_a_title_is_not_one_of_updates():
    results = results_of(ROOT)
    context = results.column("medium", "linear-test", "medium-5m")
    assert pages._title(context) == "Linear attention, 512"
    assert pages._title(results.column("budget", "linear-1800")) == (
        "Linear attention, 1,800 updates"
    )


def test_columns_without_a_panel_are_named_below_the_picture():
    results = results_of(ROOT)
    view = results.column("extrapolation", "softmax-paired-128")
    few = dataclasses.replace(
        results.column("extrapolation", "linear-paired-128"), cells={"RoPE": {1: 9.0}}
    )
    note = pages._of_dots([few, view])
    assert note.endswith("Too few rows for a panel: `linear, paired 128`.")
    assert "Too few" not in pages._of_dots([view])
