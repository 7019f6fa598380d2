"""A teacher behind a server: what is asked, how answers become tensors, and what wrong answers come to."""

import asyncio
from typing import Any

import pytest
import torch
from aiohttp import web
from tensordict import TensorDict

from nemo_rl.config.policy import EndpointLimitsConfig, ServedModelConfig
from nemo_rl.errors import ConfigError, PolicyError
from nemo_rl.policy.served_teacher import ServedTeacher
from tests.fakes.scoring_server import scoring_server

BATCH = TensorDict(
    {
        "token_ids": torch.tensor([[4, 1, 2, 3], [5, 6, 0, 0], [7, 7, 7, 0]]),
        "token_mask": torch.tensor([[1.0, 0.0, 1.0, 1.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]),
        "lengths": torch.tensor([4, 2, 3]),
    },
    batch_size=[3],
)


def entry(*tokens: tuple[int, float]) -> dict[str, Any]:
    return {str(token_id): {"logprob": logprob, "rank": 1, "decoded_token": ""} for token_id, logprob in tokens}


def of_prompt(prompt: list[int]) -> list[Any]:
    """The log-prob of token i is -i, the likeliest are 20 and 21, and the prompt's own token comes first."""
    return [None, *(entry((token, -float(token)), (20, -0.1), (21, -0.2)) for token in prompt[1:])]


def served(prompt_logprobs: Any) -> web.Response:
    return web.json_response({"choices": [{"prompt_logprobs": prompt_logprobs}]})


def ask(answer: Any, call: Any, **limits: Any) -> Any:
    async def main() -> Any:
        async with scoring_server(answer) as url:
            section = ServedModelConfig(
                base_urls=[f"{url}/v1"], model="t", limits=EndpointLimitsConfig(retry_backoff_s=0.0, **limits)
            )
            teacher = ServedTeacher("teacher", section)
            try:
                return await call(teacher)
            finally:
                await teacher.close()

    return asyncio.run(main())


def test_prompts_go_as_token_ids_and_rows_without_a_masked_token_not_at_all():
    bodies: list[dict[str, Any]] = []

    async def answer(path: str, body: dict[str, Any]) -> web.Response:
        assert path == "/v1/completions"
        bodies.append(body)
        return served(of_prompt(body["prompt"]))

    logprobs = ask(answer, lambda teacher: teacher.logprobs(BATCH))
    assert sorted(body["prompt"] for body in bodies) == [[4, 1, 2, 3], [5, 6]]
    assert {(body["prompt_logprobs"], body["max_tokens"], body["model"]) for body in bodies} == {(0, 1, "t")}
    assert logprobs.tolist() == [[0, 0, -2, -3], [0, -6, 0, 0], [0, 0, 0, 0]]


def test_top_k_is_sorted_and_without_a_prompt_token_that_is_not_among_them():
    async def answer(path: str, body: dict[str, Any]) -> web.Response:
        return served(of_prompt(body["prompt"]))

    ids, logprobs = ask(answer, lambda teacher: teacher.topk_logprobs(BATCH, 2))
    assert ids[0].tolist() == [[0, 0], [0, 0], [20, 21], [20, 21]]
    torch.testing.assert_close(logprobs[1], torch.tensor([[0, 0], [-0.1, -0.2], [0, 0], [0, 0]]))


def test_a_k_above_the_servers_limit_is_a_configuration_error():
    async def answer(path: str, body: dict[str, Any]) -> web.Response:
        text = "Requested prompt logprobs of 64, which is greater than max allowed: 20"
        return web.json_response({"error": {"message": text}}, status=400)

    with pytest.raises(ConfigError, match=r"topk_logits_k = 64.*--max-logprobs.*max allowed: 20"):
        ask(answer, lambda teacher: teacher.check(64))


def test_failed_tries_are_made_again_and_a_dead_server_is_an_error_that_names_it():
    tries = 0

    async def answer(path: str, body: dict[str, Any]) -> web.Response:
        nonlocal tries
        tries += 1
        return web.Response(status=503) if tries == 1 else served(of_prompt(body["prompt"]))

    assert ask(answer, lambda teacher: teacher.logprobs(BATCH))[1, 1] == -6

    async def dead(path: str, body: dict[str, Any]) -> web.Response:
        return web.Response(status=500, text="out of memory")

    with pytest.raises(PolicyError, match=r"teacher of teacher: http.*out of memory.*2 attempts"):
        ask(dead, lambda teacher: teacher.logprobs(BATCH), max_retries=1)


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (None, "is it a vLLM server"),
        ([None], "no log-probs of the"),
        ([None, *[entry((0, -1.0))] * 3], "returned no log-prob of token"),
        ([None, *[{str(i): {"logprob": float("nan")} for i in range(8)}] * 3], "NaN"),
    ],
    ids=["none", "too few", "another token", "nan"],
)
def test_answers_that_are_none_are_errors(found: Any, problem: str):
    async def answer(path: str, body: dict[str, Any]) -> web.Response:
        return served(found)

    with pytest.raises(PolicyError, match=problem):
        ask(answer, lambda teacher: teacher.logprobs(BATCH[:1]))


def test_fewer_tokens_than_k_are_an_error():
    async def answer(path: str, body: dict[str, Any]) -> web.Response:
        return served(of_prompt(body["prompt"]))

    with pytest.raises(PolicyError, match="returned 3 of the 5"):
        ask(answer, lambda teacher: teacher.topk_logprobs(BATCH, 5))
