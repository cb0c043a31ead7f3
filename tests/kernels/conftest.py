"""Products of bfloat16 in Triton's interpreter."""

import pytest


@pytest.fixture(autouse=True)
def products_of_halves(monkeypatch):
    """Compute tl.dot of half-precision numbers in float32, in which their products are exact.

    The interpreter multiplies the bits of bfloat16 as integers.
    """
    try:
        from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, tl
    except ImportError:  # without triton, or another release
        return
    given = InterpreterBuilder.create_dot

    def create_dot(builder, a, b, d, *rest):
        if a.dtype.primitive_bitwidth == 16:
            a, b = (TensorHandle(builder.cast_impl(x, tl.float32).data, tl.float32) for x in (a, b))
        return given(builder, a, b, d, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
