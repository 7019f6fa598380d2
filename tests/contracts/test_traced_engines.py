"""vLLM tells a traced run the phases of each request and its counters, wherever it runs."""

import asyncio
import gzip
import json
from pathlib import Path

import pytest

from nemo_rl.algorithms.step_profiler import make_profiler
from nemo_rl.config.shared_sections import ProfileConfig, TraceConfig
from nemo_rl.distributed.cluster import shutdown
from nemo_rl.generation.engines import EngineModel, make_generation
from nemo_rl.generation.requests import answer_by_deadline
from nemo_rl.generation.vllm.entry import VllmConfig, VllmGenerationConfig
from nemo_rl.observability.profiles import append_profile, find_profiles
from nemo_rl.observability.trace_file import PROFILE, TRACE_FILE, TraceFile, read_trace
from nemo_rl.tracing import GENERATION, SpanRecord, span
from nemo_rl.types import Completion
from tests.contracts.engines import MAX_MODEL_LEN, request
from tests.support.kept_spans import KeptSpans, kept_spans

pytestmark = pytest.mark.timeout(600)
PHASES = ("queue", "prefill", "decode")


def run_three_requests_in_turn(
    model_path: Path, *, in_process: bool, in_actor: bool, profile_dir: Path | None = None
) -> KeptSpans:
    """Return the trace of three requests to an engine that computes one at a time; in `profile_dir` their profile."""
    num_tokens = 30 if profile_dir else 300  # every operator of every token is written
    cfg = VllmConfig(kv_cache_memory_bytes=2**25, max_num_seqs=1, in_process=in_process)
    section = VllmGenerationConfig(in_actor=in_actor, vllm_cfg=cfg)
    traced = TraceConfig(enabled=True)
    model = EngineModel(str(model_path), "float32", MAX_MODEL_LEN, "cpu", trace=traced, profile_dir=profile_dir)

    async def main() -> KeptSpans:
        engine = await make_generation(section, model)

        async def generate(name: str) -> None:
            with span(GENERATION, f"rollout {name}"):
                answer = await answer_by_deadline(engine, request(name, max_new_tokens=num_tokens))
            assert isinstance(answer, Completion)

        try:
            profiler = make_profiler(ProfileConfig(steps=[3]), (profile_dir or Path()).parent, engine)
            with kept_spans() as kept:
                async with profiler.profiled(3 if profile_dir else 0):
                    await asyncio.gather(*map(generate, "abc"))
        finally:
            await engine.close()
        return kept

    return asyncio.run(main())


def check_phases(kept: KeptSpans) -> None:
    generation = sorted(kept.named(GENERATION), key=lambda each: each.end_ns)
    assert len(generation) == 3
    phases = [[phase_of(kept, each, name) for name in PHASES] for each in generation]
    for wait, parts in zip(generation, phases, strict=True):
        assert [part.track for part in parts] == [wait.track] * 3
        assert wait.start_ns <= parts[0].start_ns
        assert [part.end_ns for part in parts[:-1]] == [part.start_ns for part in parts[1:]]
        assert parts[-1].end_ns <= wait.end_ns
    queues = [seconds(parts[0]) for parts in phases]
    work = [seconds(parts[1]) + seconds(parts[2]) for parts in phases]
    assert queues[1] >= 0.5 * work[0] > 0  # the second waits for the first, the third for both: they came together
    assert queues[2] >= 0.5 * (work[0] + work[1])


def phase_of(kept: KeptSpans, wait: SpanRecord, name: str) -> SpanRecord:
    (phase,) = [each for each in kept.named(name) if each.parent_id == wait.span_id]
    assert phase.trace_id == wait.trace_id
    return phase


def seconds(span: SpanRecord) -> float:
    return (span.end_ns - span.start_ns) / 1e9


def values(kept: KeptSpans, name: str) -> list[float]:
    return [counter.value for counter in kept.counters if counter.name == name]


def test_phases_and_counters_of_an_engine_in_this_process(tiny_models: dict[str, Path]) -> None:
    kept = run_three_requests_in_turn(tiny_models["tied"], in_process=True, in_actor=False)
    check_phases(kept)
    assert max(values(kept, "engine/running_requests")) == 1
    assert max(values(kept, "engine/waiting_requests")) == 2
    assert max(values(kept, "engine/kv_cache_usage")) > 0


@pytest.mark.slow  # starts Ray and an engine in it
def test_an_engine_in_an_actor_has_a_track_of_its_own(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    """vLLM's core is then in a third process, and its front end in the actor's."""
    profiles = tmp_path / "profiles"
    try:
        kept = run_three_requests_in_turn(tiny_models["tied"], in_process=False, in_actor=True, profile_dir=profiles)
    finally:
        shutdown()
    check_phases(kept)
    answers = [each for each in kept.named("answer") if each.track == "engine 0"]
    assert {each.parent_id for each in answers} == {each.span_id for each in kept.named(GENERATION)}
    for answer in answers:
        (wait,) = [each for each in kept.named(GENERATION) if each.span_id == answer.parent_id]
        assert wait.start_ns <= answer.start_ns <= answer.end_ns <= wait.end_ns  # one clock
    assert max(values(kept, "engine 0/running_requests")) == 1
    assert max(values(kept, "engine 0/waiting_requests")) == 2
    check_profile(profiles, kept)


def check_profile(profiles: Path, kept: KeptSpans) -> None:
    """The operators of vLLM's worker lie within the requests, on the clock of the trace that they are appended to."""
    (profile,) = find_profiles(profiles)
    assert profile.name.startswith("step_3_engine_")
    trace = profiles.parent / TRACE_FILE
    file = TraceFile(trace)
    file.write(kept.spans)
    file.close()
    assert append_profile(trace, profile) > 100
    (records,) = read_trace(trace)  # its own reader leaves them out
    assert records == kept.spans
    events = json.loads(gzip.decompress(trace.read_bytes()).decode().rstrip().rstrip(",") + "]")
    operators = [each for each in events if each.get("cat") == f"{PROFILE},cpu_op"]
    assert len(operators) > 100
    answers = kept.named("answer")
    start_us, end_us = (min(a.start_ns for a in answers) / 1e3, max(a.end_ns for a in answers) / 1e3)
    assert all(start_us - 1e5 <= each["ts"] <= end_us + 1e5 for each in operators)  # wall and monotonic clock drift
