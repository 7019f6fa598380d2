import asyncio

from nemo_rl.types import Completion, FailedRequest, GenerationRequest, SamplingParams, WeightSpan
from tests.fakes.generation import FakeGeneration, with_versions


def request(name: str, *, tokens=(1, 2, 3), seed=0, **sampling) -> GenerationRequest:
    return GenerationRequest(name, tokens, SamplingParams(**{"max_new_tokens": 20, **sampling}), seed, name)


def answers(engine: FakeGeneration, *requests: GenerationRequest) -> dict[str, Completion | FailedRequest]:
    async def main():
        return {answer.request_id: answer async for answer in engine.generate(requests)}

    return asyncio.run(main())


def test_fake_engine_depends_on_prompt_seed_and_sampling_alone():
    alone = answers(FakeGeneration(), request("a"))["a"]
    among = answers(FakeGeneration(), request("b", seed=1), request("a"), request("c", tokens=(4,)))
    assert among["a"] == alone
    assert len({answer.token_ids for answer in among.values() if isinstance(answer, Completion)}) == 3


def test_fake_engine_ends_at_a_stop_token_or_at_the_limit():
    free = answers(FakeGeneration(), request("a"))["a"]
    assert isinstance(free, Completion)
    assert len(free.token_ids) == len(free.logprobs) == 20
    assert free.finish_reason == "length"
    stopped = answers(FakeGeneration(), request("a", stop_token_ids=tuple(range(64))))["a"]
    assert isinstance(stopped, Completion)
    assert len(stopped.token_ids) == 1
    assert stopped.finish_reason == "stop"


def test_fake_engine_fails_as_often_as_told():
    engine = FakeGeneration(fails_first=1)
    assert isinstance(answers(engine, request("a"))["a"], FailedRequest)
    assert isinstance(answers(engine, request("a"))["a"], Completion)
    some = answers(FakeGeneration(failing_share=0.5), *(request(str(i), seed=i) for i in range(40)))
    assert 5 < sum(isinstance(answer, FailedRequest) for answer in some.values()) < 35


def test_fake_engine_cuts_a_completion_that_weights_change_under():
    completion = answers(FakeGeneration(), request("a"))["a"]
    assert isinstance(completion, Completion)
    cut = with_versions(completion, 3, 4)
    assert (cut.weight_versions, cut.weight_spans) == ((3, 4), (WeightSpan(3, 0, 10), WeightSpan(4, 10, 20)))
    assert with_versions(completion, 3, 3).weight_spans == ()
