"""Copy the repository's pages to a folder that Sphinx builds.

The Markdown stays as it is. Only what a site needs is changed in the copies: README.md becomes
index.md, links to files that are no pages lead to copies of these files, mathematics has MyST's
syntax, and pictures of other hosts (badges) become links.
"""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

PAGES = (
    "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "results/*.md",
    "results/paper/README.md", "data-prep/README.md", "data-prep/*/README.md",
)  # fmt: skip
"""Patterns of the pages of the repository."""
GUIDE = (
    "docs/choosing", "docs/encodings", "docs/python", "docs/running", "docs/huggingface",
    "docs/fairseq", "docs/speed", "docs/fidelity", "docs/installing",
)  # fmt: skip
"""The order of the guide in the sidebar; pages of docs/ that are not named here follow."""
API = ("api/encodings", "api/attention", "api/models", "api/huggingface")
PROJECT = ("CONTRIBUTING", "CHANGELOG", "data-prep/index")
DOWNLOADS = (".csv", ".gz", ".json")
"""Files that a link downloads; other files are shown on a page of their own."""
LANGUAGES = {".yaml": "yaml", ".cff": "yaml", ".py": "python", ".sh": "bash"}
FENCED = re.compile(r"(^ *(`{3,})[^\n]*\n.*?^ *\2 *$)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
BADGE = re.compile(r"!\[([^\]]*)\]\(https?://[^)]*\)")
INLINE_MATH = re.compile(r"\$(`[^`\n]+`)\$")


def stage(root: Path, target: Path) -> list[str]:
    """Copy the pages of ``root`` to the new folder ``target``; return their names for Sphinx."""
    shutil.rmtree(target, ignore_errors=True)
    pages = [path.relative_to(root) for pattern in PAGES for path in sorted(root.glob(pattern))]
    linked: set[str] = set()
    for page in pages:
        text = (root / page).read_text(encoding="utf-8")
        linked |= set(files_of(page, text, root))
        _write(target / staged_name(page), for_site(page, text, root))
    for path in sorted(linked):
        _stage_file(root, target, path)
    for picture in sorted([*root.glob("docs/*.png"), *root.glob("results/figures/*.png")]):
        _copy(picture, target / picture.relative_to(root))
    names = [staged_name(page).with_suffix("").as_posix() for page in pages]
    _add_contents(target, names)
    return names


def staged_name(page: Path) -> Path:
    """Return the path of a page in the site's source.

    >>> staged_name(Path("results/README.md")).as_posix(), staged_name(Path("docs/a.md")).as_posix()
    ('results/index.md', 'docs/a.md')
    """
    return page.with_name("index.md") if page.name == "README.md" else page


def is_page(path: str) -> bool:
    """True if ``path``, relative to the root, is a page of the site."""
    return any(Path(path).match(p) and path.count("/") == p.count("/") for p in PAGES)


def for_site(page: Path, text: str, root: Path) -> str:
    """Return the text of ``page`` with the links, mathematics and pictures of the site."""

    def link(found: re.Match) -> str:
        return found[1] + new_target(page, found[2], root) + (found[3] or "") + found[4]

    def changed(prose: str) -> str:
        prose = BADGE.sub(r"\1", prose)
        prose = INLINE_MATH.sub(r"{math}\1", prose)
        return LINK.sub(link, prose)

    # every third part is a fenced block, followed by its fence
    parts = FENCED.split(text)
    return "".join(
        changed(part) if place % 3 == 0 else part if place % 3 == 1 else ""
        for place, part in enumerate(parts)
    )


def new_target(page: Path, target: str, root: Path) -> str:
    """Return what a link of ``page`` to ``target`` leads to in the site.

    Raises: FileNotFoundError for a file that does not exist.
    """
    if "://" in target or target.startswith("mailto:"):
        return target
    path = _resolved(page, target)
    if not (root / path).exists():
        raise FileNotFoundError(f"{page} links {target}, which does not exist")
    if is_page(path):
        path = staged_name(Path(path)).as_posix()
    elif (root / path).is_dir():
        path = f"files/{path}/index.md"
    elif path.endswith(DOWNLOADS):
        path = f"files/{path}"
    elif not path.endswith(".png"):
        path = f"files/{path}.md"
    return os.path.relpath(path, staged_name(page).parent.as_posix() or ".")


def files_of(page: Path, text: str, root: Path) -> Iterator[str]:
    """Yield the files and folders that ``page`` links and that are no pages and no pictures."""
    for found in LINK.finditer(FENCED.sub("", BADGE.sub("", text))):
        if "://" in found[2] or found[2].startswith("mailto:"):
            continue
        path = _resolved(page, found[2])
        if not is_page(path) and not path.endswith(".png") and (root / path).exists():
            yield path


def _resolved(page: Path, target: str) -> str:
    return os.path.normpath(page.parent / target).replace(os.sep, "/")


def _stage_file(root: Path, target: Path, path: str) -> None:
    """Copy a linked file or folder, and write the page that shows it."""
    source, copy = root / path, target / "files" / path
    if source.is_dir():
        files = sorted(p for p in source.iterdir() if p.is_file())
        for file in files:
            _copy(file, target / "raw" / "files" / path / file.name)
        _write(copy / "index.md", folder_page(path, [file.name for file in files]))
    elif path.endswith(DOWNLOADS):
        _copy(source, copy)
    else:
        page = file_page(path, source.read_text(encoding="utf-8"))
        _write(copy.with_name(f"{copy.name}.md"), page)


def folder_page(path: str, files: list[str]) -> str:
    """Return the page of a folder, which links copies of its files."""
    items = "\n".join(f'<li><a href="{name}">{name}</a></li>' for name in files)
    listed = f'<ul class="files">\n{items}\n</ul>'
    return f"---\norphan: true\n---\n\n# {path}\n\n{len(files)} files.\n\n{listed}\n"


def file_page(path: str, text: str) -> str:
    """Return the page that shows a file of text."""
    longest = max(map(len, re.findall(r"`+", text)), default=0)
    fence, language = "`" * max(3, longest + 1), LANGUAGES.get(Path(path).suffix, "text")
    return f"---\norphan: true\n---\n\n# {path}\n\n{fence}{language}\n{text.rstrip()}\n{fence}\n"


def _add_contents(target: Path, names: list[str]) -> None:
    """Add the tables of contents that the sidebar shows."""
    of_docs = [name for name in names if name.startswith("docs/")]
    guide = [*(name for name in GUIDE if name in of_docs)]
    guide += [name for name in of_docs if name not in GUIDE]
    project = [name for name in PROJECT if name in names]
    parts = [
        contents("Guide", guide),
        contents("Results", ["explore", "results/index"]),
        contents("Reference", list(API)),
        contents("Project", project),
    ]
    _append(target / "index.md", "".join(parts))
    for folder in ("results", "data-prep"):
        inside = [n.removeprefix(f"{folder}/") for n in names if n.startswith(f"{folder}/")]
        _append(target / folder / "index.md", contents("", [n for n in inside if n != "index"]))


def contents(caption: str, names: list[str]) -> str:
    """Return a table of contents that only the sidebar shows."""
    head = ["```{toctree}", ":hidden:", *([f":caption: {caption}"] if caption else [])]
    return "\n" + "\n".join([*head, "", *names, "```"]) + "\n"


def _append(path: Path, text: str) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(text)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
