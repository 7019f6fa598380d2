"""Spans as an OpenTelemetry collector receives them, over HTTP."""

import asyncio
from pathlib import Path

import pytest

from nemo_rl.config.shared_sections import TraceConfig
from nemo_rl.errors import ConfigError
from nemo_rl.generation.requests import answer_by_deadline
from nemo_rl.observability.lost_records import LostRecords
from nemo_rl.observability.open_trace import open_trace
from nemo_rl.tracing import GENERATION, now_ns, record_part, span
from nemo_rl.types import Completion, GenerationRequest, SamplingParams
from tests.fakes.generation import FakeGeneration
from tests.support.otlp_collector import attributes_of, collector, services_and_spans

MODEL = "org/model"


def section(endpoint: str) -> TraceConfig:
    return TraceConfig(enabled=True, otlp_endpoint=endpoint)


def test_a_collector_receives_the_spans_with_their_family(tmp_path: Path) -> None:
    with collector() as (address, received):
        traced = open_trace(section(address), tmp_path, LostRecords(), model_name=MODEL)
        with traced, span("step", step=3), span("rollout", "rollouts"):
            record_part("decode", 0, now_ns())
    resource = received[0].resource_spans[0]
    attributes = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert (attributes["service.name"], attributes["rl.run"]) == ("nemo-rl", tmp_path.name)
    spans = {each.name: each for request in received for each in request.resource_spans[0].scope_spans[0].spans}
    assert spans["rollout"].parent_span_id == spans["step"].span_id
    assert spans["rollout"].trace_id == spans["step"].trace_id
    assert spans["decode"].parent_span_id == spans["rollout"].span_id
    assert any(spans["decode"].span_id)
    assert len(spans["step"].trace_id) == 16
    assert {each.key: each.value.int_value for each in spans["step"].attributes}["step"] == 3
    assert spans["step"].end_time_unix_nano > spans["step"].start_time_unix_nano > 1.7e18  # after 2023


@pytest.mark.parametrize(("track", "operation"), [("rollouts", "text_completion"), ("gateway", "chat")])
def test_a_call_of_the_model_has_the_attributes_of_the_conventions(track: str, operation: str, tmp_path: Path) -> None:
    request = GenerationRequest("a", (1, 2, 3), SamplingParams(max_new_tokens=4), 7, "session", timeout_s=60.0)

    async def call() -> Completion:
        with span(GENERATION, track):
            answer = await answer_by_deadline(FakeGeneration(), request)
        assert isinstance(answer, Completion)
        return answer

    with collector() as (address, received):
        traced = open_trace(section(address), tmp_path, LostRecords(), model_name=MODEL)
        with traced, span("step"):
            answer = asyncio.run(call())
    found = {each.name: attributes_of(each) for _, each in services_and_spans(received)}
    assert {name: value for name, value in found[GENERATION].items() if name.startswith("gen_ai.")} == {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "nemo-rl",
        "gen_ai.request.model": MODEL,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": len(answer.token_ids),
        "gen_ai.response.finish_reasons": [answer.finish_reason],
    }
    assert not any(name.startswith("gen_ai.") for name in found["step"])


def test_a_collector_that_refuses_costs_its_spans_and_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lost = LostRecords()
    with (
        collector(status=400) as (address, _),
        open_trace(section(address), tmp_path, lost, model_name=MODEL),
        span("step"),
    ):
        pass
    assert "did not take the spans" in caplog.text
    lost.check()  # the file is whole
    assert (tmp_path / "trace.json.gz").stat().st_size > 0


@pytest.mark.parametrize(
    "endpoint", ["collector:4318", "http://collector:4318", "ftp://collector/v1/traces", "/v1/traces"]
)
def test_an_endpoint_without_scheme_and_path_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match="such as http://collector:4318/v1/traces"):
        section(endpoint)


def test_a_missing_exporter_is_named_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "nemo_rl.observability.otlp", None)
    with (
        pytest.raises(ConfigError, match="opentelemetry-exporter-otlp-proto-http"),
        open_trace(section("http://collector/v1/traces"), tmp_path, LostRecords(), model_name=MODEL),
    ):
        pass
