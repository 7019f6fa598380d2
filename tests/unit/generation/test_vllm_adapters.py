"""The bookkeeping of an engine's adapters, without vLLM."""

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.generation.engines import AdapterSlots, EngineModel
from nemo_rl.generation.vllm.adapters import AdapterVersions
from nemo_rl.generation.vllm.arguments import engine_arguments
from nemo_rl.generation.vllm.entry import VllmGenerationConfig


def load(versions: AdapterVersions, weight_version: int) -> list[int]:
    return versions.add(weight_version, versions.next_number())


def chosen(versions: AdapterVersions, wanted: int | None) -> int | None:
    with versions.running(wanted) as version:
        return None if version is None else version.weight_version


def test_a_request_gets_the_version_that_it_names_or_else_the_newest():
    versions = AdapterVersions(2)
    assert chosen(versions, None) is None
    for weight_version in (10, 11, 12):
        load(versions, weight_version)
    assert versions.held == (11, 12)
    assert [chosen(versions, wanted) for wanted in (None, 12, 11, 10)] == [12, 12, 11, 12]


def test_a_version_stays_while_a_request_runs_under_it():
    versions = AdapterVersions(1)
    load(versions, 0)
    with versions.running(None), versions.running(0):
        assert load(versions, 1) == []
        assert versions.held == (0, 1)
    assert load(versions, 2) == [1, 2]
    assert versions.held == (2,)


def test_policies_have_an_adapter_each_in_every_version():
    versions = AdapterVersions(1, ("first", "second"))
    assert load(versions, 0) == []
    with versions.running(None) as version:
        assert version is not None
        assert (version.number_of("first"), version.number_of("second")) == (1, 2)
        with pytest.raises(ValueError, match="no policy named 'third'; known: 'first', 'second'"):
            version.number_of("third")
    assert load(versions, 1) == [1, 2]
    with versions.running(None) as version:
        assert version is not None
        assert (version.number_of("first"), version.number_of("second")) == (3, 4)


@given(num_versions=st.integers(1, 4), events=st.lists(st.sampled_from(["load", "start", "end"]), max_size=60))
def test_no_version_is_dropped_under_a_request_nor_a_number_used_twice(num_versions: int, events: list[str]):
    versions = AdapterVersions(num_versions)
    running: list[tuple[ExitStack, int]] = []
    numbers: list[int] = []
    dropped: set[int] = set()
    for step, event in enumerate(events):
        if event == "load":
            numbers.append(versions.next_number())
            unused = versions.add(step, numbers[-1])
            assert not dropped & set(unused)
            dropped |= set(unused)
            assert len(versions.held) <= num_versions + len(running)  # one whose last request ends stays until then
        elif event == "start":
            stack = ExitStack()
            version = stack.enter_context(versions.running(None))
            if version is not None:
                running.append((stack, version.number_of("")))
        elif running:
            running.pop(0)[0].close()
        assert not dropped & {number for _, number in running}
    assert len(set(numbers)) == len(numbers)
    assert versions.held[-num_versions:] == tuple(i for i, e in enumerate(events) if e == "load")[-num_versions:]


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (2, 8), (8, 8), (16, 16), (100, 128), (300, 320), (512, 512)])
def test_vllm_has_room_for_the_adapters_rank(rank: int, room: int):
    model = EngineModel("model", "float32", 64, "cpu", adapters=AdapterSlots(rank, 3))
    arguments = engine_arguments(VllmGenerationConfig(), model)
    assert arguments["enable_lora"] is True
    assert (arguments["max_lora_rank"], arguments["max_loras"]) == (room, 3)
    several = EngineModel("model", "float32", 64, "cpu", adapters=AdapterSlots(rank, 3, ("first", "second")))
    arguments = engine_arguments(VllmGenerationConfig(), several)
    assert (arguments["max_loras"], arguments["max_cpu_loras"]) == (6, 8)
    assert "enable_lora" not in engine_arguments(VllmGenerationConfig(), EngineModel("model", "float32", 64, "cpu"))
