"""Other tiles of the kernels compute the same."""

import pytest
import torch

from benchmarks import tiles
from tests import triton_probe

pytest.importorskip("triton", reason="the kernels need triton, which is a test dependency")

from tests.kernels import flash_cases, test_flash_triton, test_sweep_triton

pytestmark = pytest.mark.skipif(bool(triton_probe.why_not()), reason=triton_probe.why_not())

LARGEST = [
    next(x for x in tiles.candidates() if (x.form, x.kernel) == (form, kernel))
    for form, _, kernels in tiles.FORMS[1:3]
    for kernel in kernels
]


@pytest.mark.parametrize("candidate", LARGEST, ids=lambda x: x.kernel)
def test_the_largest_tile_of_every_kernel_equals_the_definition(candidate):
    module = tiles.import_module(candidate.module)
    with tiles.chosen(candidate):
        if candidate.module == tiles.SWEEP:
            leaves, _ = test_sweep_triton.example(130, 16, 16, torch.float16, "token")
            found = test_sweep_triton.errors(leaves, "normalized", None)
            assert max(found) <= test_sweep_triton.BOUND[torch.float16]
        else:
            tensors, options = flash_cases.inputs(T=130, B=1, H=1)
            found = flash_cases.results(module.flash_attention, tensors, options)
            flash_cases.assert_near(
                found, flash_cases.exact(tensors, options), test_flash_triton.BOUNDS[torch.float32]
            )


def test_a_row_is_timed_in_turn_with_the_chosen_tile():
    found = tiles.timed(LARGEST[0], 64, 128, "cpu", torch.float32, 1)
    assert found["relative_speed"] > 0
