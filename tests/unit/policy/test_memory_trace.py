from typing import Any

import pytest
from transformers import Qwen2Config

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.policy.memory_trace import TraceCase, TracedPeaks, extrapolate, trace_peaks
from nemo_rl.policy.ranks import RankLayout
from tests.fakes.model_configs import MODEL_CONFIGS


def case(name: str, *, ranks: int, tokens: int, **options: Any) -> TraceCase:
    policy = PolicyConfig(model_name=name, dtensor_cfg={"keep_unsharded": False, **options})  # type: ignore[arg-type]
    layout = RankLayout(data_parallel_size=ranks, init_method="tcp://unused:1" if ranks > 1 else None)
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


def test_each_phase_is_extrapolated_by_itself() -> None:
    few, more = TracedPeaks(1, 10, 10, 5, 30, 2), TracedPeaks(2, 14, 20, 15, 32, 4)
    assert extrapolate(few, more, layers=(2, 4), to=28) == TracedPeaks(14, 62, 140, 135, 56, 28)
    assert few.training == 30
    assert more.training == 32
