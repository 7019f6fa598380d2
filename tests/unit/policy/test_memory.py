"""The formulas of a rank's memory, compared with what the real modules allocate on fake tensors."""

from dataclasses import replace
from typing import Any

import pytest
from transformers import Qwen2Config

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.policy.memory import ModelShape, RankMemory, UnknownShapeError
from nemo_rl.policy.ranks import RankLayout
from tests.fakes.model_configs import MODEL_CONFIGS
from tests.support.memory_trace import TraceCase, TracedPeaks, extrapolate, trace_peaks

SMALL, MEDIUM, LARGE = (
    ModelShape.from_config(name, MODEL_CONFIGS[name])
    for name in ("Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-32B")
)


def shape_of(name: str) -> ModelShape:
    return ModelShape.from_config(name, MODEL_CONFIGS[name])


@pytest.mark.parametrize(
    ("name", "parameters"),
    [  # as the models' pages and their files count them
        ("Qwen/Qwen2.5-0.5B", 494_032_768),
        ("Qwen/Qwen2.5-1.5B", 1_543_714_304),
        ("Qwen/Qwen2.5-7B", 7_615_616_512),
        ("Qwen/Qwen2.5-32B", 32_763_876_352),
        ("Qwen/Qwen3-30B-A3B", 30_532_122_624),
    ],
)
def test_parameters_are_those_of_the_real_models(name: str, parameters: int) -> None:
    assert shape_of(name).parameters == parameters


def test_keys_and_values_of_a_token() -> None:
    assert shape_of("Qwen/Qwen2.5-1.5B").cache_bytes(1) == 2 * 28 * 2 * 128 * 2


def test_adapters_have_dim_times_both_widths_of_each_layer() -> None:
    in_and_out = 2 * (1536 + 1536) + 2 * (1536 + 256) + 3 * (1536 + 8960)
    assert shape_of("Qwen/Qwen2.5-1.5B").adapter_parameters(8) == 28 * 8 * in_and_out


def test_another_kind_of_model_is_named() -> None:
    with pytest.raises(UnknownShapeError, match=r"mamba.*llama, mistral, qwen2, qwen3, qwen3_moe, mixtral"):
        ModelShape.from_config("m", {"model_type": "mamba"})


def test_a_rank_keeps_sixteen_bytes_a_parameter_and_two_of_the_reference() -> None:
    model = RankMemory(shape=SMALL, has_reference=True)
    assert model.weights == model.gradients == 4 * 1_543_714_304
    assert model.optimizer == 8 * 1_543_714_304
    assert model.reference == 2 * 1_543_714_304


def test_data_parallel_ranks_divide_what_stays() -> None:
    model = RankMemory(shape=LARGE, data=8)
    assert model.weights + model.gradients + model.optimizer == 16 * 32_763_876_352 // 8


def test_megatron_divides_the_optimizer_alone() -> None:
    model = RankMemory(shape=MEDIUM, data=4, tensor=2, is_replicated=True)
    own = 7_615_616_512 // 2
    assert (model.weights, model.gradients, model.optimizer) == (2 * own + own, 4 * own, 2 * own)


def test_without_a_distributed_optimizer_megatron_divides_nothing() -> None:
    model = RankMemory(shape=MEDIUM, data=4, is_replicated=True, is_optimizer_whole=True)
    assert (model.weights, model.optimizer) == (6 * 7_615_616_512, 8 * 7_615_616_512)


def test_experts_over_ranks_are_divided_but_never_gathered() -> None:
    """A rank gathers its own experts of a layer, 1 / 8 of them; what stays on it is 1 / 8 of the model either way."""
    shape = shape_of("Qwen/Qwen3-30B-A3B")
    experts = 3 * 128 * 2048 * 768
    gathered, over_ranks = (RankMemory(shape=shape, data=8, experts=n, train_tokens=4096) for n in (1, 8))
    assert shape.expert_parameters == 48 * experts
    assert over_ranks.weights == gathered.weights == 4 * 30_532_122_624 // 8
    in_layers = [replace(model, shape=replace(shape, vocab_size=1000)).gathered for model in (gathered, over_ranks)]
    assert in_layers[0] - in_layers[1] == 10 * (experts - experts // 8)  # 3 times in bfloat16 and once in float32
    assert gathered.whole_bytes - over_ranks.whole_bytes == 6 * 48 * (experts - experts // 8)


def test_megatron_copies_experts_on_other_ranks_than_the_rest() -> None:
    """Of 8 data x 2 tensor-parallel ranks 8 hold the same part of attention, and 2 the same experts, of which 8 ranks
    (4 expert x 2 expert tensor) hold one copy. A token is sent by one of 2 tensor-parallel ranks to 2 halves of each of
    its experts."""
    shape = shape_of("Qwen/Qwen3-30B-A3B")
    experts = 48 * 3 * 128 * 2048 * 768
    dense = 30_532_122_624 - experts
    sizes: dict[str, Any] = {"data": 8, "tensor": 2, "experts": 4, "expert_tensor": 2, "is_replicated": True}
    model = RankMemory(shape=shape, **sizes, train_tokens=1)
    assert model.own_parameters == dense // 2 + experts // 8
    assert model.gradients == 4 * model.own_parameters
    assert model.optimizer == 8 * (dense // 2 // 8 + experts // 8 // 2)
    assert model.weights == 2 * model.own_parameters + 4 * (dense // 2 // 8 + experts // 8 // 2)
    assert replace(model, is_optimizer_whole=True).optimizer == 8 * model.own_parameters
    alone = replace(model, data=1, tensor=1, experts=1, expert_tensor=1)
    sent = 8 * 2 * (4 * 768 + 3 * 2048)
    assert (
        alone.layer_activations - model.layer_activations
        == (2 * (2 * 4096 + 2 * 512) + 4 * 32) // 2 + sent - 8 * 2 * (4 * 768 + 3 * 2 * 2048) // 2
    )


def test_a_tensor_parallel_rank_holds_whole_experts() -> None:
    shape = shape_of("Qwen/Qwen3-30B-A3B")
    half = RankMemory(shape=shape, data=4, tensor=2)
    assert half.own_parameters == shape.expert_parameters + (30_532_122_624 - shape.expert_parameters) // 2


def test_adapters_of_a_mixture_are_those_of_its_attention() -> None:
    assert shape_of("Qwen/Qwen3-30B-A3B").adapter_parameters(8) == 48 * 8 * (2 * (2048 + 4096) + 2 * (2048 + 512))


def test_layers_without_experts_are_named() -> None:
    with pytest.raises(UnknownShapeError, match="has layers without experts"):
        ModelShape.from_config("m", MODEL_CONFIGS["Qwen/Qwen3-30B-A3B"] | {"mlp_only_layers": [0]})


def test_adapters_of_several_policies_share_base_and_gradients() -> None:
    one, trained = RankMemory(shape=SMALL, adapter_dim=8), SMALL.adapter_parameters(8)
    three = replace(one, num_adapters=3, num_trained_adapters=2)
    assert three.weights - one.weights == 2 * 4 * trained
    assert (three.gradients, three.optimizer) == (one.gradients, 2 * one.optimizer)


def test_adapters_alone_have_gradients_and_optimizer_state() -> None:
    model = RankMemory(shape=SMALL, adapter_dim=8, has_reference=True)
    trained = SMALL.adapter_parameters(8)
    assert (model.gradients, model.optimizer, model.reference) == (4 * trained, 8 * trained, 0)
    assert model.weights == 2 * 1_543_714_304 + 4 * trained


def test_activations_of_a_token() -> None:
    model = RankMemory(shape=SMALL, train_tokens=2048)
    # norms 2 x 8 x 1536, attention 2 x (2 x 1536 + 2 x 256) + 4 x 12, MLP 8 x 8960
    assert model.layer_activations == 24_576 + 7_216 + 71_680 == 103_472
    assert model.activations == 28 * 2048 * 103_472
    assert replace(model, recomputes=True).activations == 2048 * (28 * 2 * 1536 + 103_472)


# Peaks in MB that the real modules reach on fake tensors, 2,048 tokens (`traced` below
# traces some of them anew): (ranks, shape, recomputed) -> weights, scoring, training.
TRACED = {
    (1, SMALL, False): (6175, 7284, 33000),
    (1, SMALL, True): (6175, 7284, 27242),
    (1, MEDIUM, False): (30462, 33732, 140285),
    (8, SMALL, False): (772, 1974, 11481),
    (8, SMALL, True): (772, 1974, 5723),
    (8, MEDIUM, False): (3808, 9116, 34132),
    (8, MEDIUM, True): (3808, 9116, 21771),
}
# The same with whole weights kept from micro-batch to micro-batch, and with adapters of rank 16 alone trained.
TRACED_KEPT = {
    (1, SMALL, False): (6175, 9904, 35620),
    (1, SMALL, True): (6175, 9904, 29863),
    (1, MEDIUM, False): (30462, 46351, 153336),
    (1, MEDIUM, True): (30462, 46351, 140822),
    (8, SMALL, False): (772, 4595, 19411),
    (8, SMALL, True): (772, 4595, 13654),
    (8, MEDIUM, False): (3808, 18625, 73372),
    (8, MEDIUM, True): (3808, 18625, 60858),
}
TRACED_ADAPTERS = {
    (1, SMALL, False): (3161, 4270, 10391),
    (1, MEDIUM, True): (15393, 18412, 19542),
    (8, SMALL, True): (395, 1599, 2120),
    (8, MEDIUM, False): (1924, 7238, 17714),
}
TRACED_KEPT_ADAPTERS = {
    (1, SMALL, False): (3161, 6928, 13049),
    (1, MEDIUM, True): (15393, 31362, 32594),
    (8, SMALL, True): (395, 4256, 4748),
    (8, MEDIUM, False): (1924, 16920, 30520),
    (8, MEDIUM, True): (1924, 16920, 18453),
}
TracedCase = tuple[tuple[int, ModelShape, bool], tuple[int, int, int]]


def ratios(case: TracedCase, *, megabyte: float = 1e6, **options: Any) -> tuple[float, float]:
    """Return the plan's share of the traced peaks of scoring and training; its weights are exact."""
    (ranks, shape, recomputes), peaks = case
    weights, scoring, training = (megabyte * peak for peak in peaks)
    model = RankMemory(shape=shape, data=ranks, train_tokens=2048, score_tokens=2048, recomputes=recomputes, **options)
    assert model.weights == pytest.approx(weights, rel=2e-3)
    working = model.activations + model.gathered
    state = model.weights + model.gradients + model.optimizer
    return (model.weights + model.scoring) / scoring, (state + working) / training


@pytest.mark.parametrize("case", TRACED.items())
def test_the_formulas_bound_traced_peaks_closely(case: TracedCase) -> None:
    scoring, training = ratios(case)
    assert 1 <= scoring < 1.55  # the largest for small models, whose log-probs take little
    assert 1 <= training < 1.2


@pytest.mark.parametrize("case", TRACED_KEPT.items())
def test_peaks_with_gathered_weights_are_within_a_tenth_of_the_formulas(case: TracedCase) -> None:
    scoring, training = ratios(case, is_kept_whole=True)
    assert 1 <= scoring < 1.25
    assert 1 <= training < 1.1


@pytest.mark.parametrize("case", TRACED_ADAPTERS.items())
def test_the_formulas_bound_the_peaks_of_adapters(case: TracedCase) -> None:
    scoring, training = ratios(case, adapter_dim=16)
    assert 1 <= scoring < 1.7
    assert 1 <= training < 1.2


@pytest.mark.parametrize("case", TRACED_KEPT_ADAPTERS.items())
def test_peaks_of_adapters_with_gathered_weights_are_within_a_tenth_of_the_formulas(case: TracedCase) -> None:
    scoring, training = ratios(case, is_kept_whole=True, adapter_dim=16)
    assert 1 <= scoring < 1.25
    assert 1 <= training < 1.1


def case(name: str, *, ranks: int, tokens: int, context: int = 1, **options: Any) -> TraceCase:
    policy = PolicyConfig(model_name=name, dtensor_cfg={"keep_unsharded": False} | options)  # type: ignore[arg-type]
    found = "tcp://unused:1" if ranks > 1 else None
    layout = RankLayout(data_parallel_size=ranks // context, context_parallel_size=context, init_method=found)
    return TraceCase(Qwen2Config(**MODEL_CONFIGS[name]), policy, layout, tokens)


@pytest.fixture(scope="module")
def traced() -> list[TracedPeaks]:
    """Peaks of a rank of eight: a small model with 4, 6 and 8 layers, a large recomputed one with 4 and 6."""
    small = case("Qwen/Qwen2.5-1.5B", ranks=8, tokens=512)
    large = case("Qwen/Qwen2.5-32B", ranks=8, tokens=512, activation_checkpointing=True)
    return trace_peaks([small.with_layers(n) for n in (4, 6, 8)] + [large.with_layers(n) for n in (4, 6)])


def test_peaks_are_linear_in_layers(traced: list[TracedPeaks]) -> None:
    four, six, eight = traced[:3]
    assert extrapolate(four, six, layers=(4, 6), to=8) == eight


def test_a_rank_of_eight_holds_two_bytes_a_parameter_after_its_step(traced: list[TracedPeaks]) -> None:
    parameters = 4 * 46_797_824 + 233_375_232
    assert traced[0].resident == pytest.approx(4 * parameters / 8, rel=1e-3)
    assert traced[0].optimizer_step == pytest.approx(16 * parameters / 8, rel=1e-3)


def test_a_recomputed_32b_model_trains_on_eight_devices_of_80_gb(traced: list[TracedPeaks]) -> None:
    whole = extrapolate(*traced[3:], layers=(4, 6), to=64)
    assert whole.resident == pytest.approx(4 * 32_763_876_352 / 8, rel=1e-3)
    assert whole.training < 80e9


@pytest.mark.slow  # half a minute each; the peaks above are in CI
@pytest.mark.parametrize("ranks", [1, 8])
def test_a_model_that_keeps_gathered_weights_reaches_the_peak_of_the_formulas(ranks: int) -> None:
    (peaks,) = trace_peaks([case("Qwen/Qwen2.5-1.5B", ranks=ranks, tokens=2048, keep_unsharded=True).with_layers(8)])
    found = (peaks.resident, peaks.scoring, peaks.training)
    shape = replace(SMALL, num_hidden_layers=8)
    scoring, training = ratios(((ranks, shape, False), found), megabyte=1, is_kept_whole=True)
    assert scoring >= 1
    assert 0.9 <= training < 1.1


@pytest.mark.slow  # contracts/test_context_parallel.py measures what ranks that share a row save
def test_the_plan_of_ranks_that_share_a_row_is_within_a_tenth() -> None:
    """What 32,768 tokens take of a rank of four that share them, beside the resident state."""
    (peaks,) = trace_peaks([case("Qwen/Qwen2.5-1.5B", ranks=8, context=4, tokens=32768).with_layers(4)])
    model = RankMemory(shape=replace(SMALL, num_hidden_layers=4), data=8, context=4, train_tokens=32768)
    state = model.weights + model.gradients + model.optimizer
    assert model.activations + model.gathered == pytest.approx(peaks.training - state, rel=0.1)


def test_tensor_parallel_ranks_divide_norms_and_kept_inputs_alone_with_sequence_parallelism() -> None:
    whole, split = (RankMemory(shape=SMALL, tensor=2, train_tokens=2048, splits_residual=s) for s in (False, True))
    inputs_and_normalized = 2 * (4 + 2) * 1536  # of two norms, whose outputs are gathered
    assert whole.layer_activations - split.layer_activations == inputs_and_normalized // 2
    kept = [replace(one, recomputes=True).activations - 2048 * one.layer_activations for one in (whole, split)]
    assert kept == [2048 * 28 * 2 * 1536, 2048 * 28 * 1536]


def test_each_phase_is_extrapolated_by_itself() -> None:
    few, more = TracedPeaks(1, 10, 10, 5, 30, 2), TracedPeaks(2, 14, 20, 15, 32, 4)
    assert extrapolate(few, more, layers=(2, 4), to=28) == TracedPeaks(14, 62, 140, 135, 56, 28)
    assert few.training == 30
    assert more.training == 32
