"""The site: its data, its staged pages, its build, and its explorer in a browser."""

import functools
import http.server
import importlib.util
import json
import re
import shutil
import statistics
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from lrpe_fairseq.experiments.report.results import results_of

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "docs" / "site"


def module(name):
    """A module of docs/site, which is no package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SITE))
        spec = importlib.util.spec_from_file_location(f"site_{name}", SITE / f"{name}.py")
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        patch.setattr(sys, "path", [p for p in sys.path if p != str(SITE)])
    return loaded


conf, explorer_data, make_site, staging = map(
    module, ("conf", "explorer_data", "make_site", "staging")
)

# --- the numbers of the explorer ------------------------------------------------------------------


@pytest.fixture(scope="module")
def results():
    return results_of(ROOT)


@pytest.fixture(scope="module")
def data(results):
    return explorer_data.data(results, {"results/extrapolation"})


@pytest.fixture(scope="module")
def lines(data):
    return [dict(zip(data["fields"], line, strict=True)) for line in data["lines"]]


def test_every_cell_of_every_table_has_one_line_with_its_mean_deviation_seeds_and_paper(
    results, lines
):
    seen = iter(lines)
    for sheet in results.sheets:
        for column in sheet.table.columns:
            view = results.view(sheet, column.key)
            for row in view.rows:
                values, line = list(view.cells[row].values()), next(seen)
                paper = view.paper.get(row) if column.comparable else None
                spread = statistics.stdev(values) if len(values) > 1 else None
                assert (line["table"], line["scale"]) == (sheet.table.name, sheet.scale)
                assert (line["method"], line["column"]) == (view.names[row], column.key)
                assert line["seeds"] == len(values)
                assert line["mean"] == pytest.approx(statistics.fmean(values), rel=1e-5)
                assert line["paper"] == (paper and pytest.approx(paper, rel=1e-5))
                assert line["deviation"] == (
                    spread if spread is None else pytest.approx(spread, rel=1e-5, abs=1e-12)
                )
    assert next(seen, None) is None


def test_a_curve_has_one_value_for_each_context(lines):
    curves = {}
    for line in lines:
        if line["context"]:
            name = (line["table"], line["dataset"], line["scale"], line["attention"])
            curves.setdefault((*name, line["method"]), []).append(line["context"])
    assert any(len(contexts) >= 5 for contexts in curves.values())
    assert {name: c for name, c in curves.items() if len(set(c)) < len(c)} == {}


def test_no_two_columns_of_a_table_have_one_name(lines):
    columns = {}
    for line in lines:
        key = (line["table"], line["attention"], line["measure"], line["dataset"], line["scale"])
        columns.setdefault(key, set()).add(line["column"])
    assert {name: keys for name, keys in columns.items() if len(keys) > 1} == {}


def test_what_the_explorer_shows_first_exists(lines):
    script = (SITE / "static" / "explorer.js").read_text("utf-8")
    table, attention, measure = re.search(
        r'FIRST = {\s*table: "(.*?)", attention: "(.*?)", measure: "(.*?)"', script
    ).groups()
    wanted = {"table": table, "attention": attention, "measure": measure}
    assert sum(wanted.items() <= line.items() for line in lines) > 20
    group = re.search(r'FIRST_CURVES = "(.*?)"', script)[1].split("/")
    curves = re.findall(r'"(.*?)"', re.search(r"FIRST_LINES = \[(.*?)\]", script, re.DOTALL)[1])
    assert len(curves) >= 8
    assert set(curves) <= {
        f"{line['attention']}:{line['method']}"
        for line in lines
        if line["context"] and [line["table"], line["dataset"], line["scale"]] == group
    }


def test_a_table_links_its_page_if_there_is_one(data):
    assert data["tables"]["extrapolation"]["page"] == "results/extrapolation"
    assert data["tables"]["table2"]["page"] == ""


def test_the_data_are_a_script_without_numbers_that_json_does_not_have(data):
    text = explorer_data.script(data)
    assert text.startswith("window.RESULTS = ")
    assert json.loads(text.removeprefix("window.RESULTS = ").rstrip(";\n")) == data
    with pytest.raises(ValueError, match="JSON"):
        explorer_data.script({"lines": [[float("inf")]]})


# --- the staged pages -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page", "text", "staged"),
    [
        ("docs/a.md", "[r](../README.md#set-up)", "[r](../index.md#set-up)"),
        ("README.md", "[r](results/README.md)", "[r](results/index.md)"),
        ("results/table2.md", "[r](README.md) [t](table4.md#x)", "[r](index.md) [t](table4.md#x)"),
        ("docs/a.md", "[s](#here) [w](https://a.b/README.md)", None),
        ("README.md", "[l](LICENSE)", "[l](files/LICENSE.md)"),
        (
            "docs/a.md",
            "[y](../configs/lm/base.yaml)",
            "[y](../files/configs/lm/base.yaml.md)",
        ),
        ("results/table2.md", "[c](table2.csv)", "[c](../files/results/table2.csv)"),
        (
            "results/table2.md",
            "[r](runs/table2)",
            "[r](../files/results/runs/table2/index.md)",
        ),
        ("results/table2.md", "![p](figures/table2-wikitext-2-bpe-small.png)", None),
        ("README.md", "[![P](https://a.b/c.png)](https://a.b)", "[P](https://a.b)"),
        ("docs/a.md", "one $`a_1`$, two $`b`$", "one {math}`a_1`, two {math}`b`"),
        ("docs/a.md", "```\n[r](absent.md) $`a`$\n```\n", None),
        (
            "docs/a.md",
            "  ```sh\n  [r](absent.md)\n  ```\n[l](../LICENSE)",
            "  ```sh\n  [r](absent.md)\n  ```\n[l](../files/LICENSE.md)",
        ),
    ],
)  # fmt: skip
def test_a_page_changes_only_where_the_site_needs_it(page, text, staged):
    assert staging.for_site(Path(page), text, ROOT) == (staged or text)


def test_a_link_to_a_file_that_does_not_exist_is_refused():
    with pytest.raises(FileNotFoundError, match="absent"):
        staging.for_site(Path("docs/a.md"), "[a](absent.md)", ROOT)


def test_a_file_with_backticks_is_shown_as_a_whole():
    page = staging.file_page("a.sh", "echo ````\n")
    assert "`````bash\necho ````\n`````\n" in page


def test_every_page_of_the_repository_is_in_a_table_of_contents(tmp_path):
    names = staging.stage(ROOT, tmp_path / "source")
    found = {"index"}
    for folder in ("", "results", "data-prep"):
        text = (tmp_path / "source" / folder / "index.md").read_text("utf-8")
        for listed in re.findall(r"```{toctree}\n(?::[^\n]*\n)*\n(.*?)```", text, re.DOTALL):
            found |= {str(Path(folder, name)) for name in listed.split()}
    assert set(names) <= found
    others = found - set(names) - {"index"}
    assert [n for n in others if not [*(SITE / "pages").glob(f"{n}.*")]] == []


# --- docstrings, and the bundle of DataTables -----------------------------------------------------


@pytest.mark.parametrize(
    ("line", "escaped"),
    [
        ("of |s - t|, 2*3 and R_(s-t)", r"of \|s - t\|, 2\*3 and R\_(s-t)"),
        ("``a|b*c_`` and :class:`x_`", "``a|b*c_`` and :class:`x_`"),
        ("q_s of _private snake_case", "q_s of _private snake_case"),
    ],
)
def test_mathematics_in_a_docstring_is_no_markup(line, escaped):
    assert conf.escaped(line) == escaped


def test_fields_of_a_docstring_become_paragraphs_and_sections_stay():
    docstring = [
        "What.",
        "",
        "a: of",
        "    two lines.",
        "b, c: x.",
        "Args:",
        "    d: y.",
        "        z.",
    ]
    assert conf.for_sphinx(docstring) == [
        "What.", "", "", "**a:** of", "two lines.", "", "**b, c:** x.",
        "Args:", "    d: y.", "        z.",
    ]  # fmt: skip


def test_a_module_becomes_a_script_that_sets_its_default_export():
    module = "var vh=1;var Go=2;export{Go as ITable,vh as default,Tt as jQuery};\n/* end */"
    assert make_site.classic(module) == (
        "(() => {var vh=1;var Go=2;window.DataTable = vh;\n/* end */})();"
    )
    with pytest.raises(ValueError, match="no default export"):
        make_site.classic("export{a as b}")


# --- the build ------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def sphinx():
    for name in ("sphinx", "myst_parser", "furo", "latex2mathml", "itables", "plotly"):
        pytest.importorskip(name, reason=f"{name} is not installed: make site")


@pytest.fixture(scope="module")
def site(sphinx, tmp_path_factory):
    """The folder of the built site; the build fails on any warning."""
    base = tmp_path_factory.mktemp("site")
    output = base / "html"
    assert make_site.main(["--source", str(base / "source"), "--output", str(output)]) == 0
    return output


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("link", "dead"),
    [
        ("[x](other.md#there-is-one)", ""),
        ("[x](#nowhere)", "nowhere"),
        ("[x](other.md#nowhere)", "nowhere"),
        ("[x](absent.md)", "absent"),
    ],
)
def test_the_build_fails_on_a_dead_link_or_anchor(sphinx, tmp_path, capfd, link, dead):
    source = tmp_path / "source"
    for folder in ("raw", "static"):
        (source / folder).mkdir(parents=True)
    for name in ("conf.py", "mathml.py"):
        shutil.copyfile(SITE / name, source / name)
    for name in ("site.css", "favicon.svg"):
        shutil.copyfile(SITE / "static" / name, source / "static" / name)
    (source / "index.md").write_text(f"# Top\n\n{link}\n\n```{{toctree}}\nother\n```\n")
    (source / "other.md").write_text("# Other\n\n## There is one\n")
    assert make_site.build(source, tmp_path / "html") == (1 if dead else 0)
    said = capfd.readouterr().err
    assert dead in said if dead else said == ""


class Links(HTMLParser):
    """The ids of a page, its links, and what it loads."""

    def __init__(self, page):
        super().__init__()
        self.ids, self.links, self.loaded = {""}, [], []
        self.feed(page.read_text("utf-8"))

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.ids |= {found["id"]} if "id" in found else set()
        self.links += [found["href"]] if tag == "a" and found.get("href") else []
        loads = found.get("src") or (found.get("href") if tag == "link" else None)
        self.loaded += [loads] if loads else []


@pytest.mark.exhaustive
def test_every_link_of_the_site_leads_to_a_page_and_an_anchor_and_nothing_comes_from_elsewhere(
    site,
):
    pages = {page: Links(page) for page in site.rglob("*.html")}
    assert len(pages) > 60
    dead = []
    for page, own in pages.items():
        assert [path for path in own.loaded if urlsplit(path).netloc] == [], page
        for link in [*own.links, *own.loaded]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            path = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            there = path.is_file()
            anchors = pages[path].ids if path in pages else {parts.fragment}
            if not there or unquote(parts.fragment) not in anchors:
                dead.append(f"{page.relative_to(site)}: {link}")
    assert dead == []


# --- the explorer in a browser --------------------------------------------------------------------

CHROMIUM = [
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip


TEXTS = "[...document.querySelectorAll(arguments[0])].map((x) => x.innerText.trim())"


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files without a log."""

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address(site):
    """The address of a server of the site."""
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("chromium and chromedriver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in [*CHROMIUM, f"--user-data-dir={tmp_path_factory.mktemp('browser')}"]:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield Browser(browser)
    browser.quit()


class Browser:
    """What the tests do with the browser."""

    def __init__(self, driver):
        self.driver = driver
        self.js = driver.execute_script

    def open(self, address, width=1280):
        """Open an address in a window of a width, and wait for the explorer."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.get("about:blank")
        self.driver.get_log("browser")
        self.driver.get(address)
        if "explore" in address:
            self.until("return document.documentElement.dataset.explorer === 'ready'")
        return self

    def until(self, condition):
        """Wait until JavaScript returns true."""
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, 60).until(lambda _: self.js(condition))

    def errors(self):
        """What the console says."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def column(self, title):
        """The cells of a column of the table, as text."""
        heads = self.js(f"return {TEXTS}", "#lines thead th")
        selector = f"#lines tbody tr td:nth-child({heads.index(title) + 1})"
        return self.js(f"return {TEXTS}", selector)

    def click(self, title):
        """Click the heading of a column."""
        heads = self.driver.find_elements("css selector", "#lines thead th")
        next(head for head in heads if head.text.strip() == title).click()

    def choose(self, name, value):
        """Choose a value of a list, or type it."""
        script = (
            "const field = document.querySelector(`[name='${arguments[0]}']`);"
            "field.value = arguments[1];"
            "for (const kind of ['input', 'change'])"
            "  field.dispatchEvent(new Event(kind, {bubbles: true}));"
        )
        self.js(script, name, value)

    def pick(self, ending):
        """Pick the curves whose names have an ending, and no others."""
        self.js(
            "const all = [...document.querySelectorAll('#picks input')];"
            "for (const each of all) each.checked = each.value.endsWith(arguments[0]);"
            "all[0].dispatchEvent(new Event('change', {bubbles: true}));",
            ending,
        )

    def traces(self):
        """The names of the curves that the picture has."""
        return self.js("return document.getElementById('plot').data.map((x) => x.name)")

    def state(self):
        """What a reader sees."""
        about = self.js("return document.getElementById('about').innerText")
        return about, self.column("method"), self.column("ours"), self.traces()


def means(cells):
    """The numbers before the deviations."""
    return [float(cell.split()[0]) for cell in cells]


@pytest.mark.exhaustive
def test_a_click_on_a_heading_sorts_the_table(address, browser):
    browser.open(
        f"{address}/explore.html#?table=extrapolation&attention=softmax&measure=perplexity at 512"
    )
    assert means(browser.column("ours")) != sorted(means(browser.column("ours")))
    browser.click("ours")
    first = means(browser.column("ours"))
    assert len(first) == 25
    assert first == sorted(first)
    browser.click("ours")
    last = means(browser.column("ours"))
    assert last == sorted(last, reverse=True)
    assert last[0] > first[-1]
    assert "sort=mean%3Adesc" in browser.driver.current_url
    assert browser.errors() == []


@pytest.mark.exhaustive
def test_lists_and_the_search_filter_the_table(address, browser, lines):
    browser.open(f"{address}/explore.html#?")
    assert f"{len(lines)} of {len(lines)} lines" in browser.state()[0]
    browser.choose("table", "table2")
    browser.choose("attention", "linear")
    browser.choose("method", "LRPE-type")
    of_table = [x for x in lines if x["table"] == "table2" and x["attention"] == "linear"]
    wanted = [line for line in of_table if "lrpe-type" in line["method"]]
    about, methods, *_ = browser.state()
    assert about.startswith(f"{len(wanted)} of {len(lines)} lines: table2, ")
    assert methods == [line["method"] for line in wanted]
    papers = [f"{line['paper']:.2f}" if line["paper"] else "" for line in wanted]
    assert browser.column("paper") == papers
    assert browser.errors() == []


@pytest.mark.exhaustive
def test_a_link_that_is_opened_again_restores_filters_order_and_curves(address, browser):
    browser.open(f"{address}/explore.html")
    usual = browser.state()
    browser.choose("table", "books")
    browser.choose("attention", "softmax")
    browser.choose("measure", "perplexity at 8192")
    browser.click("ours")
    browser.click("ours")
    browser.pick(":rope")
    browser.js("document.querySelector('[name=log]').click()")
    chosen, link = browser.state(), browser.driver.current_url
    assert chosen != usual
    assert chosen[3] == ["rope, softmax"] or set(chosen[3]) == {"rope, linear", "rope, softmax"}
    browser.open(link)
    assert browser.state() == chosen
    assert browser.js("return document.getElementById('plot').layout.yaxis.type") == "log"
    browser.open(f"{address}/explore.html")
    assert browser.state() == usual
    browser.js("window.location.hash = arguments[0]", link.partition("#")[2])
    browser.until("return document.querySelector('[name=table]').value === 'books'")
    assert browser.state() == chosen
    assert browser.errors() == []


@pytest.mark.exhaustive
def test_an_anchor_of_the_explorer_changes_no_choice(address, browser):
    browser.open(f"{address}/explore.html#?table=table2")
    before = browser.state()
    browser.js("window.location.hash = '#curves-by-context'")
    assert browser.state() == before
    assert browser.errors() == []


@pytest.mark.exhaustive
def test_the_explorer_opens_without_a_server(site, browser):
    browser.open(f"{(site / 'explore.html').as_uri()}#?table=table2&sort=mean:asc")
    assert len(browser.column("ours")) == 25
    assert browser.traces()
    loaded = "return performance.getEntriesByType('resource').map((x) => x.name)"
    assert [name for name in browser.js(loaded) if not name.startswith("file://")] == []
    assert browser.errors() == []


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "page", ["explore", "index", "docs/encodings", "results/extrapolation", "api/attention"]
)
def test_a_page_is_readable_at_400_pixels(address, browser, page):
    browser.open(f"{address}/{page}.html", width=400)
    assert browser.js("return document.documentElement.scrollWidth") <= 400
    assert browser.errors() == []
    if page == "explore":
        box = "const x = document.querySelector('#lines').getBoundingClientRect();"
        left, right = browser.js(f"{box} return [x.left, x.right]")
        assert left >= 0
        assert right <= 400


@pytest.mark.exhaustive
def test_the_search_finds_a_page(address, browser):
    browser.open(f"{address}/search.html?q=stick-breaking")
    browser.until("return document.querySelectorAll('#search-results li a').length > 0")
    assert "Encodings" in browser.js(f"return {TEXTS}", "#search-results li a")
    assert browser.errors() == []
