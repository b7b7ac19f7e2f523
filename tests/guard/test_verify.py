"""The count of values that are not finite, beside a mask over all of them."""

from math import inf, nan

import pytest
import torch

from rmetric.guard.dcp_load import num_non_finite

DTYPES = [
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def wide(values):
    return values if values.is_complex() else values.double()


@pytest.mark.parametrize("value", [nan, inf, -inf, 1.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_the_number_in_a_mask_wherever_the_values_are(dtype, value):
    for size in (1, 7, 300_001):
        generator = torch.Generator().manual_seed(size)
        for places in ([0], [size // 2], [size - 1], [0, size - 1]):
            values = torch.randn(size, generator=generator)
            values[places] = value
            struck = values.to(dtype)  # float8_e4m3fn has no infinity: it becomes nan
            infinite_too = num_non_finite(struck, infinite_too=True)
            assert infinite_too == int((~wide(struck).isfinite()).sum())
            nan_alone = num_non_finite(struck, infinite_too=False)
            assert nan_alone == int(wide(struck).isnan().sum())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_without_values_has_none(dtype):
    assert num_non_finite(torch.empty(0, dtype=dtype), infinite_too=True) == 0


def test_an_imaginary_part_counts():
    values = torch.tensor([1 + 1j, complex(1.0, inf), complex(nan, 0.0)])
    assert num_non_finite(values, infinite_too=True) == 2
    assert num_non_finite(values, infinite_too=False) == 1
