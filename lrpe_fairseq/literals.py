"""The value of the text of an option: literals and arithmetic, of bounded size.

fairseq evaluates such texts as code, and a checkpoint contains them. This module needs neither
torch nor fairseq.
"""

import ast
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from lrpe_fairseq.errors import ChoiceError

LONGEST_TEXT = 10_000
"""Characters of a text that is evaluated. The digits of a product are at most as many."""
MOST_ITEMS = 100_000
"""Items and characters of a value, those of nested containers and repeated ones included."""

_ARITHMETIC: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


class _Sized(NamedTuple):
    """A value, and the number of its items and characters."""

    value: Any
    size: int


def evaluate_literal(text: str) -> Any:
    """Return the value of ``text``: literals, containers of literals, and + - * / between them.

    Names, calls, attributes and subscripts are refused, so that no function is reachable, and so
    are powers. The size of every intermediate value is known before it is computed.

    >>> evaluate_literal("[(512, 3)] * 2 + [(1024, 5)]")
    [(512, 3), (512, 3), (1024, 5)]

    Raises: ChoiceError, a ValueError, for any other text, such as one with a name or a call, and
        for a value of more than MOST_ITEMS. TypeError if it is not a string (``utils.eval_bool``
        relies on that).
    """
    if not isinstance(text, str):
        raise TypeError(f"expected text, got {type(text).__name__}")
    if len(text) > LONGEST_TEXT:
        raise ChoiceError(_refused(text, f"it is longer than {LONGEST_TEXT:,} characters"))
    try:
        return _evaluated(ast.parse(text.strip(), mode="eval").body).value
    except _TooLarge:
        reason = f"its value has more than {MOST_ITEMS:,} items"
    except _NotALiteral:
        reason = "it is not a literal"
    except (ArithmeticError, TypeError):
        reason = "its arithmetic has no result"
    except (MemoryError, RecursionError):  # of Python's own parser, too
        reason = "it is nested too deeply"
    except (SyntaxError, ValueError):  # the latter for a null byte
        reason = "it is not an expression"
    raise ChoiceError(_refused(text, reason))


class _NotALiteral(Exception):
    """An expression with a name, a call, a power or the like."""


class _TooLarge(Exception):
    """An expression whose value has too many items."""


def _refused(text: str, reason: str) -> str:
    shown = text if len(text) <= 80 else f"{text[:80]}…"
    return f"the text {shown!r} of an option is not evaluated: {reason}"


def _evaluated(node: ast.expr) -> _Sized:
    if isinstance(node, ast.Constant):
        has_length = isinstance(node.value, (str, bytes))
        return _checked(node.value, len(node.value) if has_length else 1)
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        kind = {ast.List: list, ast.Tuple: tuple, ast.Set: set}[type(node)]
        return _container(kind, [_evaluated(item) for item in node.elts])
    if isinstance(node, ast.Dict) and None not in node.keys:  # no unpacking
        items = [
            _evaluated(item) for pair in zip(node.keys, node.values, strict=True) for item in pair
        ]
        values = [item.value for item in items]  # key, value, key, value, ...
        pairs = dict(zip(values[::2], values[1::2], strict=True))
        return _checked(pairs, 1 + sum(item.size for item in items))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _ARITHMETIC:
        operand = _evaluated(node.operand)
        return _Sized(_ARITHMETIC[type(node.op)](operand.value), operand.size)
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _combined(node.op, _evaluated(node.left), _evaluated(node.right))
    raise _NotALiteral


def _container(kind: type, items: list[_Sized]) -> _Sized:
    return _checked(kind(item.value for item in items), 1 + sum(item.size for item in items))


def _combined(op: ast.operator, left: _Sized, right: _Sized) -> _Sized:
    """Return the result of + - * or /, whose size is checked first."""
    size = left.size + right.size
    if isinstance(op, ast.Mult):
        # a repeated container or text; the number may stand on either side
        for times, repeated in ((left, right), (right, left)):
            if isinstance(times.value, int) and isinstance(
                repeated.value, (list, tuple, str, bytes)
            ):
                size = max(times.value, 1) * repeated.size
    _check_size(size)
    return _Sized(_ARITHMETIC[type(op)](left.value, right.value), size)


def _checked(value: Any, size: int) -> _Sized:
    _check_size(size)
    return _Sized(value, size)


def _check_size(size: int) -> None:
    if size > MOST_ITEMS:
        raise _TooLarge
