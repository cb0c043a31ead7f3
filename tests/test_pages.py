"""Every command, option, path and Python block of the pages is one that works today.

Shell blocks and code in backquotes are parsed by the programs that they name, without running a
training; so are the commands in the heads of the configurations. CONTRIBUTING's recipe for an
encoding is followed in a copy of the repository; its recipe for a family is followed in
test_families.py.
"""

import argparse
import importlib.util
import os
import pkgutil
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from fairseq import options

import lrpe_fairseq.models  # noqa: F401  (registers the archs)
from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.encodings import ENCODINGS
from lrpe_fairseq.experiments.commands import (
    eval_classifier,
    eval_lm,
    eval_mt,
    finetune_glue,
    run_table,
    train_row,
)
from lrpe_fairseq.experiments.families import load_named
from tests.toy_checkout import add_entry

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("data-prep/*/README.md")])
HEADS = sorted(p for p in ROOT.glob("configs/**/*.yaml") if p.read_text("utf-8").startswith("#"))
FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
EXAMPLES = re.compile(r"yours|letters|<|\*|\.\.\.|…|runs/table8|/(work|\.installed)")
"""Paths of what a reader makes, or patterns of paths."""

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page, language):
    """The fenced blocks of ``page`` in ``language`` ("" for shell), without their indent."""
    found = FENCED.findall(page.read_text(encoding="utf-8"))
    return [
        re.sub(f"^{indent}", "", text, flags=re.MULTILINE)
        for indent, named, text in found
        if named == language
    ]


def inline(page):
    """What stands between backquotes outside fenced blocks, line breaks as spaces."""
    prose = FENCED.sub("", page.read_text(encoding="utf-8"))
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]


class Parsed(Exception):
    """Ends a program after it has read its command line."""


def parse_only(main, words):
    """Call ``main`` up to the end of its parser, which exits for words that it does not take."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_end(parser, given):
        parse(parser, given)
        raise Parsed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_end)
        with pytest.raises(Parsed):
            main(words)


STARTS = ("make ", "scripts/", "data-prep/", "python ", "fairseq-", ".venv/bin/", "PROCS=")
SHELL_ONLY = {"echo", "hf", "lm_eval", "pip", "source", "srun", "tensorboard"}
PARSERS = {
    "scripts/run_table.sh": run_table._parse,
    "scripts/train_lm.sh": lambda words: train_row._parse(["table2", *words]),
    "scripts/pretrain_roberta.sh": lambda words: train_row._parse(["table8", *words]),
    "scripts/train_mt.sh": lambda words: train_row._parse(["table4", *words]),
    "scripts/train_classifier.sh": train_row._parse,
    "scripts/finetune_glue.sh": finetune_glue._parse,
    "scripts/eval_classifier.sh": partial(parse_only, eval_classifier.main),
    "scripts/eval_lm.sh": partial(parse_only, eval_lm.main),
    "scripts/eval_mt.sh": partial(parse_only, eval_mt.main),
}


def commands(page):
    """The words of every command of ``page``, without variables before it."""
    yield from split([*blocks(page, ""), *(c for c in inline(page) if f"{c} ".startswith(STARTS))])


def split(texts):
    """The words of every program in the lines of ``texts``, without variables before it."""
    lines = (line for text in texts for line in text.replace("\\\n", " ").splitlines())
    for program in (program for line in lines for program in line.split(" | ")):
        words = shlex.split(program, comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            words.pop(0)
        if words:
            yield words


def check_command(name, words):
    """Fail unless the program ``name`` exists and takes ``words``."""
    name = name.removeprefix(".venv/bin/")
    in_prose = not words or words[0] in ("--protocols",)  # names an option, not a whole command
    complete = not in_prose and not {"...", "…"} & set(words)
    if name == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert [w for w in words if "=" not in w and f"\n{w}:" not in makefile] == []
    elif name.startswith(("scripts/", "data-prep/")):
        assert os.access(ROOT / name, os.X_OK if name.endswith(".sh") else os.R_OK)
        if complete and name in PARSERS:
            PARSERS[name](words)
    elif name == "python":
        check_python(words)
    elif name.startswith("fairseq-"):
        if complete and words[0] != "--task":  # a task named in prose is no whole command
            check_fairseq(name, words)
    elif name == "torchrun":  # the program that it starts, after its own options
        first = next(n for n, word in enumerate(words) if "fairseq-" in word)
        check_command(words[first], words[first + 1 :])
    else:
        assert name in SHELL_ONLY, f"nothing checks the command {name}"


def check_python(words):
    """A module that can be imported, a file that exists, or code that compiles."""
    if words[0] == "-m":
        assert importlib.util.find_spec(words[1]), words
        assert all(
            (ROOT / w).exists() for w in words[2:] if w.startswith(("tests/", "benchmarks/"))
        )
    elif words[0] == "-c":
        compile(words[1], "-c", "exec")
    else:
        assert (ROOT / words[0]).is_file(), words
        if words[0].startswith("data-prep/") and not {"...", "…"} & set(words):
            parse_only(runpy.run_path(str(ROOT / words[0]))["main"], words[1:])


FAIRSEQ = {
    "fairseq-train": options.get_training_parser,
    "fairseq-eval-lm": options.get_eval_lm_parser,
    "fairseq-generate": options.get_generation_parser,
    "fairseq-interactive": partial(options.get_generation_parser, interactive=True),
    "fairseq-validate": options.get_validation_parser,
    "fairseq-preprocess": options.get_preprocessing_parser,
}


def check_fairseq(name, words):
    """fairseq's own parser takes the words; a configuration of hydra's exists."""
    if name == "fairseq-hydra-train":
        folder, config = (words[words.index(w) + 1] for w in ("--config-dir", "--config-name"))
        assert (ROOT / folder.replace("$PWD", str(ROOT)) / f"{config}.yaml").is_file()
    elif name == "fairseq-preprocess":
        FAIRSEQ[name]().parse_args(words)
    else:
        args = options.parse_args_and_arch(FAIRSEQ[name](), words)
        assert name != "fairseq-train" or any(n.endswith("position_encoding") for n in vars(args))


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


@by_page
def test_every_command_of_a_page_is_taken_by_the_program_that_it_names(page):
    for name, *words in commands(page):
        check_command(name, words)


def test_a_command_that_does_not_exist_is_found(tmp_path):
    page = tmp_path / "page.md"
    lines = ["make absent", "scripts/run_table.sh table2 --absent", "absent x"]
    lines += ["python data-prep/books/prepare.py pg18 --dest data/pg18"]
    lines += ["scripts/eval_lm.sh checkpoint.pt data --absent"]
    page.write_text("\n".join(["```", *lines, "```\n"]))
    for name, *words in commands(page):
        with pytest.raises((AssertionError, SystemExit)):
            check_command(name, words)


def head_commands(config):
    """The words of every command in the comment that begins ``config``: indented, or in quotes."""
    head = re.match(r"(?:#.*\n)*", config.read_text(encoding="utf-8"))[0]
    lines = re.sub(r"^# ?", "", head, flags=re.MULTILINE)
    indented = "\n".join(re.findall(r"^  .*$", lines, re.MULTILINE))
    quoted = (" ".join(code.split()) for code in re.findall(r"`([^`]+)`", lines))
    yield from split([indented, *(code for code in quoted if code.startswith(STARTS))])


@pytest.mark.parametrize("config", HEADS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_in_the_head_of_a_configuration_is_taken(config):
    for name, *words in head_commands(config):
        check_command(name, words)
        if name == "scripts/run_table.sh":
            parsed = run_table._parse(words)
            table = load_named(parsed.table)
            parsed.scale, parsed.seeds = parsed.scale or run_table.usual_scale(table), 1
            assert run_table._select(table, parsed)


ARCHS = {
    "language_modeling": "lrpe_lm",
    "masked_lm": "lrpe_roberta",
    "translation": "lrpe_transformer",
    "lrpe_classification": "lrpe_classifier",
    "lrpe_images": "lrpe_vit",
    "lrpe_transduction": "lrpe_transformer",
}


@cache
def known_options():
    """The options of fairseq's commands with each of our archs, and those of our programs."""
    parsers = [parser() for name, parser in FAIRSEQ.items() if name != "fairseq-train"]
    for task, arch in ARCHS.items():
        parsers.append(options.get_training_parser())
        words = ["x", "--task", task, "--arch", arch, "--optimizer", "adam"]
        options.parse_args_and_arch(parsers[-1], [*words, "--lr-scheduler", "inverse_sqrt"])
    found = {o for parser in parsers for a in parser._actions for o in a.option_strings}
    programs = [*ROOT.glob("lrpe_fairseq/**/*.py"), *ROOT.glob("benchmarks/**/*.py")]
    programs += [*ROOT.glob("data-prep/*/*.py"), *ROOT.glob("scripts/*.sh")]
    texts = [path.read_text(encoding="utf-8") for path in programs]
    texts.append((ROOT / "configs" / "slurm.yaml").read_text(encoding="utf-8"))
    found |= {o for text in texts for o in re.findall(r"--[a-z][a-z0-9-]*", text)}
    return found | {"--" + key.replace("_", "-") for key in re.findall(r"^(\w+):", texts[-1], re.M)}


@by_page
def test_every_option_that_a_page_names_exists(page):
    named = {
        word for code in inline(page) for word in re.findall(r"(?<!\S)--[a-z][a-z0-9-]*", code)
    }
    patterns = {o for o in named if o.endswith("-")} | {"--yours-base", "--flag", "--no-flag"}
    foreign = {"--joined-dictionary", "--no-build-isolation", "--index-url"}
    foreign |= {"--mean-pool-gating-network", "--mean-pool-gating-network-encoder-dim"}
    assert named - patterns - foreign - known_options() == set()


@by_page
def test_every_path_that_a_page_names_exists(page):
    rooms = r"(?:lrpe_fairseq|configs|scripts|data-prep|results|docs|benchmarks|tests)/[^\s`:,)]*"
    named = {
        path.rstrip("/.")
        for code in inline(page)
        for path in re.findall(rf"(?<![\w/.]){rooms}", code)
        if not EXAMPLES.search(path)
    }
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


@by_page
def test_every_name_of_this_package_in_a_page_can_be_imported(page):
    text = page.read_text(encoding="utf-8")
    for name in set(re.findall(r"\blrpe_fairseq(?:\.[A-Za-z]\w+)+", text)):
        if not name.endswith("letters") and not EXAMPLES.search(name):
            pkgutil.resolve_name(name)


@by_page
def test_every_link_between_pages_leads_somewhere(page):
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    local = {target for target in targets if "://" not in target}
    assert [target for target in sorted(local) if not (page.parent / target).exists()] == []


def anchors(page):
    """The anchors of the headings of a page, as GitHub and the site make them."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    words = (re.sub(r"\[([^]]*)\]\([^)]*\)|`", r"\1", head) for head in heads)
    return {re.sub(r"[^\w\- ]", "", word.strip().lower()).replace(" ", "-") for word in words}


@pytest.mark.parametrize("page", [*PAGES, *sorted(ROOT.glob("results/*.md"))], ids=str)
def test_every_anchor_of_a_link_is_a_heading(page):
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", text):
        if "://" not in target:
            found = anchors((page.parent / target).resolve() if target else page)
            assert anchor in found, f"{target}#{anchor}"


def test_the_readme_links_every_page():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    wanted = [page.relative_to(ROOT).as_posix() for page in PAGES if page.name != "README.md"]
    assert [page for page in wanted if f"]({page})" not in readme] == []


@by_page
def test_the_python_of_a_page_runs(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    languages = {named for _, named, _ in FENCED.findall(page.read_text(encoding="utf-8"))}
    assert languages <= {
        "",
        "python",
        "math",
        "bibtex",
        "yaml",
        "text",
    }  # no block escapes the checks
    found = blocks(page, "python")
    if page.name == "CONTRIBUTING.md":
        assert len(found) == 4  # followed below, and in test_families.py
        return
    if page.name == "huggingface.md":
        pytest.importorskip("transformers", reason="the page needs transformers")
        export_a_model(tmp_path / "my-model")
    if page.name == "python.md":  # tests/test_readme.py loads the checkpoint of README
        found = [text for text in found if "runs/mine" not in text]
        assert len(found) == 3
    names = {}
    for text in found:
        exec(compile(text, page.name, "exec"), names)


def export_a_model(folder):
    """Write the exported model that docs/huggingface.md reads."""
    from lrpe_fairseq import hf
    from tests.hf.models import language_model

    *_, checkpoint = language_model(attention_type="linear", position_encoding="lrpe-type2")
    hf.export(checkpoint, folder)


PROPERTIES = "minus_s or norms or half_types or incremental or do_not_fit"
DRIVER = """
import sys
import pytest

suite = ["-p", "no:cacheprovider", "--noconftest", "tests/test_every_encoding.py", "-k"]
status = pytest.main([*suite, f"yours and ({sys.argv[1]})"])
from fairseq import options
import lrpe_fairseq.models
from lrpe_fairseq.experiments.report import docs

parser = options.get_training_parser("language_modeling")
words = "x --arch lrpe_lm_tiny --position-encoding yours --yours-base 50".split()
base = options.parse_args_and_arch(parser, words).yours_base
for page, content in docs.render(docs.ROOT, ["marked"]).items():  # without the pictures
    (docs.ROOT / page).write_text(content)
print("driver:", int(status), base, lrpe_fairseq.__file__)
"""


def follow_the_recipe(folder):
    """CONTRIBUTING's encoding in a copy of the repository: its file, its line, its import."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    ignored = shutil.ignore_patterns("__pycache__", "work")
    for name in ("lrpe_fairseq", "tests", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    path = re.search(r"Write the file\*\* `(lrpe_fairseq/encodings/.*?)`", text)[1]
    (folder / path).write_text(blocks(ROOT / "CONTRIBUTING.md", "python")[0])
    line = re.search(r"Add the line\*\* `(.*?)` to `ENCODINGS`", text)[1]
    table = folder / "lrpe_fairseq" / "encodings" / "__init__.py"
    module = path.removesuffix(".py").replace("/", ".")
    imported = f"from {module} import Yours"
    add_entry(table, "ENCODINGS: dict[str, Constructor] = {\n", line, imported)


@pytest.mark.parametrize(("number", "name"), [(1, "Ramp"), (2, "Cap")])
def test_the_score_encodings_of_the_recipe_decode_and_train(number, name, monkeypatch):
    code = {}
    exec(compile(blocks(ROOT / "CONTRIBUTING.md", "python")[number], name, "exec"), code)
    monkeypatch.setitem(ENCODINGS, name, code[name])
    options = {"attention_type": "softmax", "position_encoding": name}
    module, x = MultiheadAttention(16, 2, causal=True, **options), torch.randn(2, 7, 16)
    plain = MultiheadAttention(16, 2, causal=True, **{**options, "position_encoding": "none"})
    plain.load_state_dict(module.state_dict(), strict=False)
    whole, state, parts = module.attend(x)[0], None, []
    assert (whole - plain.attend(x)[0]).abs().max() > 1e-6
    whole.sum().backward()
    assert all(p.grad is not None for p in module.encoding.parameters())
    for s in range(7):
        part, state = module.attend(x[:, s : s + 1], None, state, True)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    assert (module.encoding.form((-6, 6), torch.arange(7)).table is not None) == (name == "Ramp")


def test_an_encoding_is_one_file_and_one_line(tmp_path):
    follow_the_recipe(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    given = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    command = [sys.executable, "-W", "ignore", "-c", DRIVER, PROPERTIES]
    done = subprocess.run(command, **given)
    said = done.stdout
    assert f"driver: 0 50.0 {tmp_path}" in said, said + done.stderr
    assert int(re.search(r"(\d+) passed", said)[1]) >= 10
    page = (tmp_path / "docs" / "encodings.md").read_text(encoding="utf-8")
    assert "| [`yours`](#yours) | Features j and j + D/2 turn by" in page
    assert "| `--yours-base` | 100.0 |" in page
