"""docs/encodings.md: tables, gallery and picture, read from the classes of ENCODINGS."""

import math
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
from lrpe_fairseq.experiments.report import frame, markdown, plots

SHEET = "docs/encodings.png"
FAMILY = "lrpe"
"""The entry of all types of LRPE."""
WRAPPED = {"selective:<name>": "selective:rope"}
"""Free forms with an entry of their own -> a name of which it is written."""
MECHANISMS = {
    "none": "Without an encoding",
    "rotation": "Rotation: queries and keys are transformed by position",
    "decay": "Decay: weights fall by a constant factor per token",
    "gate": "Gate: weights fall by a factor that each token computes",
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


def built(name: str, grid_width: int = 0) -> Encoding:
    """Return the encoding of one causal layer with 8 heads of 64."""
    options = EncodingOptions(grid_width=grid_width)
    return build_encoding(name, head_dim=64, num_heads=8, causal=True, options=options)


def encodings_table() -> str:
    """Return one row per name of ENCODINGS, read from the built encoding."""
    rows = []
    for name in ENCODINGS:
        encoding = built(name)
        linear, both = encoding.serves_linear, not encoding.causal_only
        learned = sum(p.numel() for p in encoding.parameters() if p.requires_grad)
        link = f"[`{name}`](#{FAMILY if _is_lrpe(name) else name})"
        row = [link, encoding.summary(), YES[linear], YES[both], f"{learned:,}"]
        rows.append([*row, encoding.scales or "–"])
    for family in FAMILIES.values():
        text = f"the free form {family.rest}"
        rows.append([f"`{family.form}`", text, YES[True], YES[not family.causal_only], "", ""])
    head = ["name", "description", "linear", "bidirectional", "learned parameters"]
    head += ["`--context-scaling` scales"]
    return markdown.table(head, rows)


def options_table() -> str:
    """Return one row per option of an encoding, from the classes of ENCODINGS."""
    rows = []
    for own in options_of_encodings().values():
        choices = own.metadata["choices"]
        flag = "--" + own.name.replace("_", "-")
        flag += f" {{{','.join(choices)}}}" if choices else ""
        rows.append([f"`{flag}`", own.default, own.metadata["help"]])
    return markdown.table(["option of an encoding", "default", "description"], rows)


# --- entries --------------------------------------------------------------------------------------


def entries() -> str:
    """Return the entries of all encodings and WRAPPED by mechanism; LRPE's types have one."""
    found: dict[str, list[str]] = {mechanism: [] for mechanism in MECHANISMS}
    for title, name in ({name: name for name in ENCODINGS} | WRAPPED).items():
        card = built(name).card
        mine = found[card.mechanism if card else "none"]
        text = lrpe_entry() if _is_lrpe(name) else entry(name, title)
        if text not in mine:
            mine.append(text)
    parts = ([f"### {MECHANISMS[key]}", *texts] for key, texts in found.items() if texts)
    return "\n\n".join(text for part in parts for text in part)


def entry(name: str, title: str) -> str:
    """Return the entry of one encoding: equation and properties.

    Trap: in a block between $$ GitHub applies Markdown first, which turns "\\," into a comma.
    """
    encoding = built(name)
    lines, card = [f"#### `{title}`", ""], encoding.card
    if card is not None:
        lines += ["```math", card.equation, "```", ""]
    lines += [f"- Position: {_position(encoding)}"]
    if card is not None:
        lines += [f"- Cost: {card.cost}", f"- Beyond training: {card.beyond}"]
        lines += [f"- Source: {card.source}"]
    return "\n".join(lines)


def lrpe_entry() -> str:
    """Return the entry of the LRPE family: the equation, every P and Lambda, and their names."""
    names: dict[tuple[str, str], list[str]] = {}
    for name in ENCODINGS:
        if _is_lrpe(name) or name == "rope":
            _, projection, core = canonical_name(name).split(":")
            names.setdefault((projection, core), []).append(f"`{name}`")
    grid = [
        [f"`{core}`", *(", ".join(names.get((p, core), [])) for p in PROJECTIONS)] for core in CORES
    ]
    some = built("lrpe-type2")
    spec = some.spec
    parts = [f"- `{n}`: $`{kind(spec).latex}`$" for n, kind in {**PROJECTIONS, **CORES}.items()]
    equation = r"\mathrm{Re}\big[(\Lambda^{(s)} P q_s)^{\mathsf H} \Lambda^{(t)} P k_t\big]"
    lines = [f"#### `{FAMILY}`", "", "```math", equation, "```", ""]
    lines += [markdown.table(["Lambda \\ P", *(f"`{p}`" for p in PROJECTIONS)], grid), "", *parts]
    lines += [f"- Position: {_position(some)}"]
    lines += [
        "- Cost: O(D) per token, with `fourier` O(D^2)",
        f"- Beyond training: {some.card.beyond}; a permutation repeats after its period",
        f"- Source: {some.card.source}",
    ]
    return "\n".join(lines)


def _is_lrpe(name: str) -> bool:
    return name.startswith("lrpe-")


def _position(encoding: Encoding) -> str:
    """Say on what the score depends, from the capability fields."""
    promised = encoding.properties
    if promised.contextual:
        said = "counted in context, from the tokens in between"
    else:
        own = promised.relative_by
        said = f"{own} only" if own else POSITION[promised.relative]
    if promised.relative_up_to is not None:
        said += f", up to position {promised.relative_up_to:,}"
    if encoding.reads_grid:
        on_grid = built(encoding.name, grid_width=8).properties
        more = "" if on_grid.relative == "exact" else "more than "
        said += f"; on a grid (`--grid-width`) {more}the differences of rows and columns"
    return said + ("; for models without absolute positions" if encoding.without_absolute else "")


# --- the contact sheet ----------------------------------------------------------------------------


def contact_sheet(path: Path) -> None:
    """Draw the weights of every method's causal softmax attention before training, as a PNG."""
    shown = [name for name in ENCODINGS if frame.public_name(name) == name]
    columns = 8
    rows = math.ceil(len(shown) / columns)
    figure = plots.blank(1.25 * columns, 1.42 * rows)
    every = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in every:
        axes.set_axis_off()
    for axes, name in zip(every, shown, strict=False):
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
    x = torch.randn(CONTENTS, 1, heads * width).expand(-1, TOKENS, -1)
    q = k = 1.5 * x.unflatten(-1, (heads, width)).transpose(1, 2)
    tokens, gates = tokens_of(x), encoding.log_gates(x)
    if gates is not None:
        tokens = tokens._replace(sums=gates.double().cumsum(-1))
    if encoding.decomposable:
        q, k = encoding(q, k, tokens.positions, tokens.positions)
    return encoded_weights(encoding, q, k, tokens, tokens, causal=True)[:, 1].mean(0)
