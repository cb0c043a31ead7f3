"""The generated parts of README.md: the encodings' table and the quickstart's numbers.

``python -m lrpe_fairseq.experiments.report.readme`` rewrites them; ``--check`` tells if stale.
"""

import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path

from lrpe_fairseq.encodings import ENCODINGS, Encoding, QueryKeyEncoding, build_encoding
from lrpe_fairseq.encodings.lrpe import CORES, LRPE, PROJECTIONS
from lrpe_fairseq.experiments.report import quickstart

ROOT = Path(__file__).resolve().parents[3]
README = ROOT / "README.md"
QUICKSTART = ROOT / "results" / "quickstart" / "runs"


def main() -> None:
    """Rewrite README.md, or with ``--check`` say whether it is stale."""
    text = README.read_text(encoding="utf-8")
    fresh = render(text)
    if "--check" not in sys.argv:
        README.write_text(fresh, encoding="utf-8")
    elif fresh != text:
        sys.exit("README.md is stale: run python -m lrpe_fairseq.experiments.report.readme")


def render(text: str) -> str:
    """``text`` with every generated part rendered anew."""
    parts: dict[str, Callable[[], str]] = {
        "encodings": encodings_table,
        "quickstart": quickstart_numbers,
    }
    for name, part in parts.items():
        text = between(text, name, part())
    return text


def between(text: str, name: str, content: str) -> str:
    """``text`` with ``content`` between ``<!-- name -->`` and ``<!-- /name -->``."""
    pattern = re.compile(f"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"there is no place marked <!-- {name} --> ... <!-- /{name} -->")
    return pattern.sub(lambda found: f"{found[1]}{content}\n{found[2]}", text)


def replace_between(path: Path, name: str, content: str) -> None:
    """:func:`between` on a file."""
    path.write_text(between(path.read_text(encoding="utf-8"), name, content), encoding="utf-8")


def encodings_table() -> str:
    """One row for every name of ENCODINGS, from the built encoding itself."""
    rows = ["| `--position-encoding` | what it is | linear | softmax | learned parameters |"]
    rows += ["|---|---|:-:|:-:|---:|"]
    for name in ENCODINGS:
        encoding = build_encoding(name, head_dim=64, num_heads=8, causal=True)
        linear = "yes" if encoding.serves_linear else "–"
        learned = sum(p.numel() for p in encoding.parameters() if p.requires_grad)
        rows.append(f"| `{name}` | {describe(encoding)} | {linear} | yes | {learned:,} |")
    free = f"P in {{{', '.join(PROJECTIONS)}}}, Lambda in {{{', '.join(CORES)}}}"
    rows.append(f"| `lrpe:<P>:<Lambda>` | the free form: {free} | yes | yes | |")
    return "\n".join(rows)


def describe(encoding: Encoding) -> str:
    """What the encoding is: P x Lambda, or the first sentence of its class."""
    if isinstance(encoding, LRPE):
        names = [_name_of(PROJECTIONS, encoding.projection), _name_of(CORES, encoding.core)]
        return " x ".join(names)
    sentence = (inspect.getdoc(type(encoding)) or "").split(". ")[0].split("\n\n")[0]
    kind = "" if isinstance(encoding, QueryKeyEncoding) else " (needs the score matrix)"
    return " ".join(sentence.split()).rstrip(".") + kind


def quickstart_numbers() -> str:
    """The quickstart's table and the order that its committed runs support."""
    return quickstart.numbers(quickstart.rows(quickstart.published(QUICKSTART)))


def read_result(path: Path) -> str | None:
    """The text of a result in this folder, None if there is none."""
    return path.read_text(encoding="utf-8") if path.exists() else None


def _name_of(table: dict[str, type], module: object) -> str:
    return next(name for name, kind in table.items() if type(module) is kind)


if __name__ == "__main__":
    main()
