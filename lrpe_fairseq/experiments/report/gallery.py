"""The generated parts of hand-written pages, README.md and docs/, and the picture of the encodings.

A part stands between ``<!-- name -->`` and ``<!-- /name -->``. docs/encodings.md is read from the
classes of ENCODINGS.
"""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from lrpe_fairseq.attention.softmax import encoded_weights
from lrpe_fairseq.attention.tokens import tokens_of
from lrpe_fairseq.encodings import (
    CORES,
    ENCODINGS,
    FAMILIES,
    PROJECTIONS,
    Encoding,
    EncodingOptions,
    build_encoding,
    canonical_name,
    options_of_encodings,
)
from lrpe_fairseq.encodings.core.protocols import ScoreEncoding
from lrpe_fairseq.encodings.fidelity import DEPARTURES
from lrpe_fairseq.encodings.none import Unchanged
from lrpe_fairseq.experiments.records import methods
from lrpe_fairseq.experiments.report import choosing, markdown, plots, pretrained, scale
from lrpe_fairseq.experiments.report.pages import verdict
from lrpe_fairseq.experiments.report.results import results_of

VERSIONS = "results/versions"
SHEET = "docs/encodings.png"
FAMILY = "lrpe"
"""The entry of all types of LRPE."""
WRAPPED = {"selective:<name>": "selective:rope", "gated-channel:<name>": "gated-channel:rope"}
"""Free forms with an entry of their own -> a name of which it is written."""
MECHANISMS = {
    "none": "Without an encoding",
    "rotation": "Rotation: queries and keys are transformed by position",
    "decay": "Decay: weights fall by a constant factor per token",
    "gate": "Gate: weights fall by a factor that each token computes",
    "transport": "Transport: every token moves the keys before it",
    "bias": "Bias: a function of the distance is added to the score",
    "content": "Content: what a distance adds depends on query and key",
    "tree and grid": "Tree and grid: positions are more than a number",
}
"""Mechanism of a card -> heading of its encodings."""
POSITION = {
    "exact": "s - t only",
    "in expectation": "s - t only, on average over the random code",
    "no": "more than s - t",
}
"""Relative -> on what a score depends."""
YES = {True: "yes", False: "–"}
TOKENS, CONTENTS = 24, 32
"""Tokens of a panel of the contact sheet, and random contents that are averaged."""


def pages(root: Path) -> dict[str, str]:
    """Return path -> text of every page with its marked parts rendered anew."""
    marked = {
        "README.md": {"answer": choosing.answer(root), "quickstart": choosing.quickstart(root)},
        "docs/encodings.md": {
            "encodings": encodings_table(),
            "gallery": entries(),
            "options": options_table(),
        },
        "docs/fidelity.md": {
            "departures": departures_table(),
            "measured": departures_measured(root),
        },
        "docs/installing.md": {"versions": versions_table(root)},
        "docs/huggingface.md": {"families": families_table(root), **pretrained.parts(root)},
        "docs/fairseq.md": {
            "criteria": scale.criteria_table(root),
            "bytes": scale.bytes_table(root),
            "times": scale.times_table(root),
        },
        "docs/running.md": {"hours": scale.hours_table(root), "batches": scale.batches_table(root)},
    }
    texts = {path: (root / path).read_text(encoding="utf-8") for path in marked}
    for path, parts in marked.items():
        for name, content in parts.items():
            texts[path] = markdown.between(texts[path], name, content)
    return texts


def pictures(root: Path) -> dict[str, Callable[[Path], None]]:
    """Return the contact sheet of the encodings."""
    return {SHEET: contact_sheet}


# --- docs/encodings.md --------------------------------------------------------------------------


def built(name: str, grid_width: int = 0) -> Encoding:
    """Return the encoding of one causal layer with 8 heads of 64."""
    options = EncodingOptions(grid_width=grid_width)
    return build_encoding(name, head_dim=64, num_heads=8, causal=True, options=options)


def encodings_table() -> str:
    """Return one row per name of ENCODINGS, read from the built encoding."""
    rows = []
    for name in ENCODINGS:
        encoding = built(name)
        linear = encoding.serves_linear
        both = not encoding.causal_only
        learned = sum(p.numel() for p in encoding.parameters() if p.requires_grad)
        # All types of LRPE have one entry.
        link = f"[`{name}`](#{FAMILY if _is_lrpe(name) else name})"
        row = [link, encoding.summary(), acts_on(encoding), YES[linear], YES[both]]
        rows.append([*row, f"{learned:,}", encoding.scales or "–"])
    for prefix, family in FAMILIES.items():
        text = f"the free form {family.rest}"
        example = f"{prefix}:rope" if f"{prefix}:rope" in family.names else family.names[0]
        row = [f"`{family.pattern}`", text, acts_on(built(example)), YES[True]]
        rows.append([*row, YES[not family.causal_only], "", ""])
    head = ["name", "description", "acts on", "linear", "bidirectional", "learned parameters"]
    head += ["`--context-scaling` scales"]
    return markdown.table(head, rows)


def acts_on(encoding: Encoding) -> str:
    """Return what an encoding changes: q and k, the scores, or both.

    Called with q and k, the first ones do all of their work.
    """
    if isinstance(encoding, ScoreEncoding):
        return "scores"
    only = encoding.form(None, torch.zeros(1, dtype=torch.int64)).has_only()
    beside = not only or encoding.forget_gate is not None or encoding.reflections is not None
    if isinstance(encoding, Unchanged):
        return "scores" if beside else "–"
    return "q, k and scores" if beside else "q and k"


def options_table() -> str:
    """Return one row per option of an encoding, from the classes of ENCODINGS."""
    rows = []
    for option in options_of_encodings().values():
        choices = option.metadata["choices"]
        flag = "--" + option.name.replace("_", "-")
        flag += f" {{{','.join(choices)}}}" if choices else ""
        rows.append([f"`{flag}`", option.default, option.metadata["help"]])
    return markdown.table(["option of an encoding", "default", "description"], rows)


# --- entries --------------------------------------------------------------------------------------


def entries() -> str:
    """Return the entries of all encodings and WRAPPED by mechanism; LRPE's types have one.

    Trap: in a block between $$ GitHub applies Markdown first, which turns "\\," into a comma.
    """
    by_mechanism: dict[str, dict[str, Encoding]] = {mechanism: {} for mechanism in MECHANISMS}
    for title, name in ({name: name for name in ENCODINGS} | WRAPPED).items():
        encoding = built("lrpe-type2" if _is_lrpe(name) else name)
        mechanism = encoding.card.mechanism if encoding.card else "none"
        by_mechanism[mechanism][FAMILY if _is_lrpe(name) else title] = encoding
    spec = built("lrpe-type2").spec
    return markdown.rendered(
        "gallery.md.j2",
        mechanisms={MECHANISMS[key]: members for key, members in by_mechanism.items() if members},
        position=_position,
        grid=_types(),
        parts={name: kind(spec).latex for name, kind in {**PROJECTIONS, **CORES}.items()},
    ).rstrip()


def _types() -> str:
    """Return the names of LRPE by P and Lambda."""
    names: dict[tuple[str, str], list[str]] = {}
    for name in ENCODINGS:
        if _is_lrpe(name) or name == "rope":
            _, projection, core = canonical_name(name).split(":")
            names.setdefault((projection, core), []).append(f"`{name}`")
    rows = (
        [f"`{core}`", *(", ".join(names.get((p, core), [])) for p in PROJECTIONS)] for core in CORES
    )
    return markdown.table(["Lambda \\ P", *(f"`{p}`" for p in PROJECTIONS)], rows)


def _is_lrpe(name: str) -> bool:
    return name.startswith("lrpe-")


def _position(encoding: Encoding) -> str:
    """Say on what the score depends, from the capability fields."""
    promised = encoding.properties
    if promised.contextual:
        sentence = "counted in context, from the tokens in between"
    else:
        distance = promised.relative_by
        sentence = f"{distance} only" if distance else POSITION[promised.relative]
    # Beyond it, such as FIRE's threshold, the score knows more than the lag.
    if promised.relative_up_to is not None:
        sentence += f", up to position {promised.relative_up_to:,}"
    if encoding.reads_grid:
        on_grid = built(encoding.name, grid_width=8).properties
        more = "" if on_grid.relative == "exact" else "more than "
        sentence += f"; on a grid (`--grid-width`) {more}the differences of rows and columns"
    if encoding.without_absolute:
        sentence += "; for models without absolute positions"
    return sentence


# --- the contact sheet ----------------------------------------------------------------------------


def contact_sheet(path: Path) -> None:
    """Draw the weights of every method's causal softmax attention before training, as a PNG."""
    public = [name for name in ENCODINGS if methods.public_name(name) == name]
    shown = [name for name in public if not built(name).no_softmax]
    columns = 8
    rows = math.ceil(len(shown) / columns)
    figure = plots.blank(1.25 * columns, 1.42 * rows)
    every = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in every:
        axes.set_axis_off()
    for axes, name in zip(every, shown, strict=False):
        # The root shows small weights too.
        axes.imshow(weights(name).sqrt(), cmap="viridis", vmin=0, vmax=1)
        axes.set_title(name, fontsize=8)
    figure.supxlabel(f"key, 1 to {TOKENS}", fontsize=8)
    figure.supylabel(f"query, 1 to {TOKENS} from the top", fontsize=8)
    plots.save(figure, path)


@torch.no_grad()
def weights(name: str) -> Tensor:
    """Return the weights of one head over equal tokens, (TOKENS, TOKENS), means over contents.

    Queries and keys are one random vector. The head is the second of four of width 32.
    """
    torch.manual_seed(0)
    heads, width = 4, 32
    encoding = build_encoding(name, head_dim=width, num_heads=heads, causal=True).eval()
    # Equal tokens: what differs between keys is the position alone.
    x = torch.randn(CONTENTS, 1, heads * width).expand(-1, TOKENS, -1)
    q = k = 1.5 * x.unflatten(-1, (heads, width)).transpose(1, 2)
    tokens = tokens_of(x)
    gates = encoding.log_gates(x)
    if gates is not None:
        # In float64, as attention sums them.
        tokens = tokens._replace(sums=gates.double().cumsum(-1))
    transport, _ = encoding.transport(
        x, tokens.positions, tokens.padding, tokens.starts, history={}
    )
    tokens = tokens._replace(transport=transport)
    if encoding.decomposable:
        q, k = encoding.forward(q, k, tokens.positions, tokens.positions)
    return encoded_weights(encoding, q, k, tokens, tokens, causal=True)[:, 1].mean(0)


# --- docs/fidelity.md, docs/installing.md and docs/huggingface.md --------------------------------


def departures_table() -> str:
    """Return a table with one row per departure that ``--fidelity`` accepts."""
    head = ("name", "the paper says", "the authors' code did", "ours does")
    rows = [
        (f"`{name}`", departure.paper, departure.code, departure.ours)
        for name, departure in DEPARTURES.items()
    ]
    return markdown.table(head, rows)


def departures_measured(root: Path) -> str:
    """Return the finding of the table ``fidelity`` at every scale with runs."""
    results = results_of(root)
    sentences = [verdict(s.table, results.headlines(s)) for s in results.sheets_of("fidelity")]
    return "\n".join(sentences) or "Not measured."


def versions_table(root: Path) -> str:
    """Return a row per tested pair of Python and torch, then why tests were skipped."""
    numbers = {path: re.findall(r"\d+", path.stem) for path in (root / VERSIONS).glob("*.json")}
    # By version numbers: 3.9 comes before 3.12.
    files = sorted(numbers, key=lambda path: list(map(int, numbers[path])))
    results = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    return markdown.rendered("versions.md.j2", results=results).rstrip()


PRETRAINED = "results/bench/hf-families.json"
"""Written by ``python -m benchmarks.families``."""


def families_table(root: Path) -> str:
    """Return a row per pretrained model that was converted to the same encoding."""
    path = root / PRETRAINED
    if not path.exists():
        return "Not measured."
    measured = json.loads(path.read_text(encoding="utf-8"))
    head = ("model", "what is converted", "largest logit", "float32", "float64")
    rows = [
        (
            row["model"],
            row["converted"],
            f"{row['largest_logit']:.1f}",
            f"{row['float32']:.1e}",
            f"{row['float64']:.1e}" if "float64" in row else "–",
        )
        for row in measured["rows"]
    ]
    versions = measured["versions"]
    made_with = f"torch {versions['torch']}, transformers {versions['transformers']}, on a CPU."
    return f"{markdown.table(head, rows)}\n\n{made_with}"
