"""Products of bfloat16 in float32 on a CPU: exact to float32, for every number of blocks and threads."""

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

from nemo_rl.distributed import float32 as module
from nemo_rl.distributed.float32 import float32_product

UNITS = cast(Any, torch.backends.mkldnn).matmul


@pytest.fixture
def exact_units() -> Iterator[None]:
    """Float32 products of this process are computed in float32, as where another user of torch asks for it."""
    usual = UNITS.fp32_precision
    UNITS.fp32_precision = "ieee"
    yield
    UNITS.fp32_precision = usual


def tensors(*shape: int, num_rows: int = 1000, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden states, a weight whose blocks do not divide it, and their exact product."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(*sizes, 64, generator=generator).bfloat16() for sizes in (shape, (num_rows,)))
    return hidden, weight, hidden.double() @ weight.double().T


@pytest.mark.parametrize("are_allowed", [False, True])
@pytest.mark.parametrize("shape", [(0,), (1,), (5,), (64,), (2, 3)])
def test_product_is_that_of_float32(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], are_allowed: bool) -> None:
    monkeypatch.setattr(module, "CPU_BLOCK", 1)
    monkeypatch.setattr(module._Units, "are_allowed", are_allowed)
    hidden, weight, exact = tensors(*shape)
    product = float32_product(hidden, weight)
    assert product.dtype == torch.float32
    assert product.shape == (*shape, 1000)
    torch.testing.assert_close(product.double(), exact, atol=1e-4, rtol=0)


def test_rounding_is_less_than_a_hundredth_of_that_of_a_bfloat16_product() -> None:
    hidden, weight, exact = tensors(64)
    rounded = (hidden @ weight.T).double() - exact
    assert float32_product(hidden, weight).double().sub(exact).abs().mean() < 0.01 * rounded.abs().mean()


@pytest.mark.usefixtures("exact_units")
def test_other_products_of_the_process_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module._Units, "are_allowed", True)
    hidden, weight, _ = tensors(3)
    float32_product(hidden, weight)
    assert UNITS.fp32_precision == "ieee"
    with pytest.raises(RuntimeError):
        float32_product(hidden, weight[:, :5])
    assert UNITS.fp32_precision == "ieee"


@pytest.mark.usefixtures("exact_units")
def test_units_are_used_only_where_one_thread_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere they would round what other threads multiply meanwhile."""
    hidden, weight, exact = tensors(3)
    monkeypatch.setattr(module._Units, "are_allowed", False)
    settings: list[str] = []
    matmul = torch.Tensor.__matmul__

    def record(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        settings.append(UNITS.fp32_precision)
        return matmul(left, right)

    monkeypatch.setattr(torch.Tensor, "__matmul__", record)
    for is_allowed in (False, True):
        if is_allowed:
            module.allow_bfloat16_units()
        torch.testing.assert_close(float32_product(hidden, weight).double(), exact, atol=1e-4, rtol=0)
    assert settings == ["ieee"] * (len(settings) // 2) + ["bf16"] * (len(settings) // 2)
    assert settings
