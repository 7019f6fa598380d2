"""What vLLM returns itself on CUDA becomes the same column as what a CPU engine records."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nemo_rl.errors import GenerationError
from nemo_rl.generation.vllm.routes import make_route_source
from nemo_rl.token_columns import ROUTED_EXPERTS
from tests.contracts.engines import request


class Engine:
    def __init__(self, layers: list[int], num_experts: int) -> None:
        self.described = layers, num_experts

    async def collective_rpc(self, method: str) -> list[Any]:
        assert method == "describe_experts"
        return [self.described]


def output(routes: np.ndarray | None) -> Any:
    return SimpleNamespace(outputs=[SimpleNamespace(token_ids=[4, 5], routed_experts=routes)])


async def taken(engine: Engine, routes: np.ndarray | None) -> Any:
    source = make_route_source(engine, on_cpu=False)
    await source.start()
    return await source.take(request("a", tokens=[1, 2, 3]), output(routes))


@pytest.mark.parametrize(("num_experts", "dtype", "missing"), [(128, np.uint8, 255), (256, np.uint16, 65535)])
def test_layers_without_experts_are_left_out_and_the_last_token_is_missing(
    num_experts: int, dtype: type, missing: int
) -> None:
    routes = np.arange(4 * 3 * 2).reshape(4, 3, 2).astype(np.uint8)  # of 3 prompt tokens and the first sampled one
    column = asyncio.run(taken(Engine([0, 2], num_experts), routes))[ROUTED_EXPERTS]
    assert column.dtype == dtype
    assert column.tolist() == [
        [[0, 1], [4, 5]],
        [[6, 7], [10, 11]],
        [[12, 13], [16, 17]],
        [[18, 19], [22, 23]],
        [[missing] * 2] * 2,
    ]


def test_an_answer_without_routes_has_no_column() -> None:
    assert not asyncio.run(taken(Engine([0], 8), None))


def test_a_model_without_experts_does_not_start() -> None:
    with pytest.raises(GenerationError, match="no experts"):
        asyncio.run(taken(Engine([], 0), None))
