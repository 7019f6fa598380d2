"""Fused layers of Megatron train as unfused ones do; their functions run uncompiled, for compiling is torch's part."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from nemo_rl.policy.megatron.start import import_megatron
from nemo_rl.policy.ranks import RankLayout
from tests.contracts.layouts import MULTIPLE
from tests.contracts.policies import SGD, make_policy
from tests.contracts.rank_pool import RankPool
from tests.unit.policy.tiny import WeightedNLL, make_batch

LENGTHS = [9, 5, 12, 3, 7, 12, 2, 6]
MESH = "megatron tp 2"


def train(layout: RankLayout, path: Path, config: dict[str, Any], *, compiled: bool) -> tuple[Any, Any, int]:
    """Return the metrics and weights of two steps, and how often the fused SwiGLU was called."""
    worker = import_megatron()
    from megatron.core.transformer import mlp

    from nemo_rl.policy.megatron.kernels import Kernels

    kernels = Kernels(compiled=compiled)
    with (
        torch.compiler.set_stance("force_eager"),
        mock.patch.object(worker, "choose_kernels", return_value=kernels),
        mock.patch.object(mlp, "bias_swiglu_impl", wraps=mlp.bias_swiglu_impl) as fused,
    ):
        policy = make_policy(layout, path, optimizer=SGD, **config)
        metrics = [policy.train_step(make_batch(LENGTHS, seed=seed), WeightedNLL()) for seed in range(2)]
        weights = policy.run_with_weights(lambda pairs: {name: tensor.clone() for name, tensor in pairs})
        policy.close()
    return metrics, weights, fused.call_count


@pytest.mark.parametrize("model", ["qwen2", "llama"])  # llama: a bias at the output of attention
def test_fused_layers_train_as_unfused_ones(pool: RankPool, models: dict[str, Path], model: str) -> None:
    mesh = MULTIPLE[MESH]
    arguments = {"path": models[model], "config": mesh.config}
    plain, weights, calls = pool.run(mesh, train, **arguments, compiled=False)[0]
    fused, fused_weights, fused_calls = pool.run(mesh, train, **arguments, compiled=True)[0]
    assert calls == 0
    assert fused_calls > 0
    for found, expected in zip(fused, plain, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    for name, expected in weights.items():
        torch.testing.assert_close(fused_weights[name], expected, rtol=0, atol=1e-5)
