from dataclasses import replace

import pytest

from nemo_rl.launch.memory_plan import GB, EngineModel, RankModel, RunMemory, find_cure
from nemo_rl.launch.model_files import ModelShape
from tests.fakes.model_configs import MODEL_CONFIGS

SMALL, MEDIUM, LARGE = (
    ModelShape.from_config(name, MODEL_CONFIGS[name])
    for name in ("Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-32B")
)


def test_a_rank_keeps_sixteen_bytes_a_parameter_and_two_of_the_reference() -> None:
    model = RankModel(shape=SMALL, has_reference=True)
    assert model.weights == model.gradients == 4 * 1_543_714_304
    assert model.optimizer == 8 * 1_543_714_304
    assert model.reference == 2 * 1_543_714_304


def test_data_parallel_ranks_divide_what_stays() -> None:
    model = RankModel(shape=LARGE, data=8)
    assert model.weights + model.gradients + model.optimizer == 16 * 32_763_876_352 // 8


def test_megatron_divides_the_optimizer_alone() -> None:
    model = RankModel(shape=MEDIUM, data=4, tensor=2, is_replicated=True)
    own = 7_615_616_512 // 2
    assert (model.weights, model.gradients, model.optimizer) == (2 * own + own, 4 * own, 2 * own)


def test_adapters_alone_have_gradients_and_optimizer_state() -> None:
    model = RankModel(shape=SMALL, adapter_dim=8, has_reference=True)
    trained = SMALL.adapter_parameters(8)
    assert (model.gradients, model.optimizer, model.reference) == (4 * trained, 8 * trained, 0)
    assert model.weights == 2 * 1_543_714_304 + 4 * trained


def test_activations_of_a_token() -> None:
    model = RankModel(shape=SMALL, train_tokens=2048)
    assert model.layer_activations == 103_472  # 24,576 norms, 7,168 + 48 attention, 71,680 MLP
    assert model.activations == 28 * 2048 * 103_472
    assert replace(model, recomputes=True).activations == 2048 * (28 * 2 * 1536 + 103_472)


# Peaks in MB that the real modules reach on fake tensors, 2,048 tokens (tests/unit/policy/test_memory_trace.py traces
# some of them anew): (ranks, shape, recomputed) -> weights, scoring, training.
TRACED = {
    (1, SMALL, False): (6175, 7581, 32530),
    (1, SMALL, True): (6175, 7581, 26772),
    (8, SMALL, False): (772, 2272, 11011),
    (8, SMALL, True): (772, 2272, 5254),
    (8, MEDIUM, False): (3808, 9116, 34132),
    (8, MEDIUM, True): (3808, 9116, 21771),
    (8, LARGE, False): (16382, 24583, 117345),
    (8, LARGE, True): (16382, 24583, 76668),
}


@pytest.mark.parametrize(("ranks", "shape", "recomputes"), TRACED)
def test_the_formulas_bound_traced_peaks_closely(ranks: int, shape: ModelShape, recomputes: bool) -> None:
    weights, scoring, training = (1e6 * megabytes for megabytes in TRACED[ranks, shape, recomputes])
    model = RankModel(shape=shape, data=ranks, train_tokens=2048, score_tokens=2048, recomputes=recomputes)
    working = model.activations + model.training_gathered
    assert model.weights == pytest.approx(weights, rel=1e-3)
    assert 1 <= (model.weights + model.scoring_temporary) / scoring < 1.35
    assert 1 <= (model.weights + model.gradients + model.optimizer + working) / training < 1.2


def colocated(shape: ModelShape, *, ranks: int = 1, tokens: int = 8192, utilization: float = 0.6) -> RunMemory:
    return RunMemory(
        capacity=80 * GB,
        policy=RankModel(shape=shape, data=ranks, train_tokens=tokens, score_tokens=2 * tokens, longest=512),
        engine=EngineModel(shape=shape, utilization=utilization),
        shares_device=True,
    )


def test_a_shared_device_never_holds_the_awake_engine_and_the_optimizer() -> None:
    for moment in colocated(SMALL).devices()["policy and engine"]:
        assert not {"KV cache and engine activations", "optimizer"} <= moment.parts.keys(), moment


def test_an_engine_that_does_not_sleep_is_always_there() -> None:
    memory = colocated(SMALL)
    assert memory.engine is not None
    awake = replace(memory, engine=replace(memory.engine, sleeps=False))
    assert all(moment.parts["engine weights"] > 0 for moment in awake.devices()["policy and engine"])
    assert awake.problems()


def test_the_engine_takes_its_share_of_the_device() -> None:
    (generation,) = [m for m in colocated(SMALL).devices()["policy and engine"] if m.name == "generation"]
    assert generation.parts["engine weights"] == 2 * 1_543_714_304
    assert generation.total == 48 * GB + GB  # 0.6 of 80, and a context


@pytest.mark.parametrize(
    ("memory", "cure"),
    [
        (colocated(SMALL, tokens=32768), "micro-batches of 8192 tokens"),
        (colocated(SMALL, utilization=0.95), "policy.generation.vllm_cfg.gpu_memory_utilization: 0.85"),
        (colocated(MEDIUM, tokens=512), "policy.dtensor_cfg.cpu_offload: true"),
    ],
    ids=["micro-batch", "engine's share", "offload"],
)
def test_the_nearest_cure_makes_everything_fit(memory: RunMemory, cure: str) -> None:
    assert memory.problems()
    assert find_cure(memory) == cure


def test_several_changes_together_where_none_is_enough_alone() -> None:
    memory = colocated(LARGE, ranks=8)
    assert any("the engine needs" in problem for problem in memory.problems())
    assert "GPUs for an engine" in find_cure(memory)
    assert " and " in find_cure(memory)


def test_a_shared_device_keeps_the_policy_on_the_host_while_the_engine_samples() -> None:
    memory = colocated(SMALL)
    assert memory.host().parts["offloaded policy"] == 12 * 1_543_714_304
    assert replace(memory, shares_device=False).host().parts["offloaded policy"] == 0
