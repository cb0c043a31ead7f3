"""Mathematics as MathML, which browsers draw by themselves, without a script or a font to load."""

from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the renderer ``mathml``."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _inline(translator: Any, node: nodes.math) -> None:
    translator.body.append(convert(node.astext()))
    raise nodes.SkipNode


def _block(translator: Any, node: nodes.math_block) -> None:
    # a wide equation scrolls by itself, not the page
    mathematics = convert(node.astext(), display="block")
    translator.body.append(f'<div class="equation">{mathematics}</div>\n')
    raise nodes.SkipNode
