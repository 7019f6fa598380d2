"""A real vLLM server at an address as the engine of a collection: exact tokens, repeatable by seed, messages too."""

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from nemo_rl.config.loading import load_collect_config
from nemo_rl.config.policy import EndpointLimitsConfig, ServedModelConfig
from nemo_rl.distributed.endpoint import Endpoint
from nemo_rl.errors import ConfigError
from nemo_rl.generation.served import ServedGeneration
from nemo_rl.launch.collection import CollectionResult, run_collection
from nemo_rl.launch.sampled import load_collection_inputs
from nemo_rl.types import Completion
from tests.contracts.engines import answers, exact_logprobs, request
from tests.contracts.openai_server import SERVED_NAME

RECIPE = """
collect: {{output_dir: {output}, num_repeats: 2, concurrency: 4}}
policy: {{model_name: {model}, max_total_sequence_length: 64, generation: {{max_new_tokens: 8}}}}
server: {{address: {url}}}
data: {{input: {{dataset_name: jsonl, data_path: {data}, env_name: letters}}}}
env: {{letters: {{type: "tests.unit.launch.scoring:length"}}}}
logger: {{progress: false}}
"""


def sampled(url: str, *requests: Any) -> dict[str, Any]:
    async def main() -> dict[str, Any]:
        limits = EndpointLimitsConfig(request_timeout_s=120.0)
        endpoint = Endpoint("server", ServedModelConfig(base_urls=[url], model=SERVED_NAME, limits=limits))
        generation = ServedGeneration(endpoint, model=SERVED_NAME, api="completions")
        try:
            return await answers(generation, requests)
        finally:
            await generation.close()

    return asyncio.run(main())


def collected(tmp_path: Path, url: str, model: Path, *overrides: str) -> tuple[CollectionResult, list[dict[str, Any]]]:
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"input": c, "output": c}) + "\n" for c in "abc"))
    output = tmp_path / "out"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(output=output, model=model, url=url, data=tmp_path / "data.jsonl"))
    config = load_collect_config(recipe, overrides)
    outcome = asyncio.run(run_collection(config, Console(file=io.StringIO())))
    rows = [json.loads(line) for line in (output / "rollouts-rs0.jsonl").read_text().splitlines()]
    return outcome, sorted(rows, key=lambda row: (row["task_index"], row["rollout_index"]))


def test_tokens_are_sampled_by_their_seeds_with_the_models_log_probs(served_model, served_url):
    found = sampled(
        served_url, request("a", seed=1), request("b", seed=1), request("c", seed=2), request("d", seed=2**63 + 1)
    )
    assert all(isinstance(completion, Completion) for completion in found.values()), found
    assert found["a"].token_ids == found["b"].token_ids == found["d"].token_ids != found["c"].token_ids
    for completion in found.values():
        assert len(completion.token_ids) == 12
        exact = exact_logprobs(served_model[0], (5, 6, 7), completion.token_ids, 1.0)
        torch.testing.assert_close(torch.tensor(completion.logprobs), exact, atol=1e-4, rtol=0)


def test_only_our_stop_tokens_end_a_response_and_they_belong_to_it(served_url):
    (whole,) = sampled(served_url, request("a", seed=5)).values()
    stop = whole.token_ids[4]
    (cut,) = sampled(served_url, request("a", seed=5, stop_token_ids=(stop,))).values()
    assert cut.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    assert (whole.finish_reason, cut.finish_reason) == ("length", "stop")


def test_a_collection_behind_the_server_has_its_tokens(tmp_path, served_model, served_url):
    outcome, rows = collected(tmp_path, served_url, served_model[1], "collect.write_token_ids=true")
    assert (outcome.num_finished, outcome.num_given_up) == (6, 0)
    for row in rows:
        ids = [token for message in row["messages"] for token in message["token_ids"]]
        response = row["messages"][-1]
        exact = exact_logprobs(
            served_model[0], ids[: len(ids) - len(response["token_ids"])], response["token_ids"], 1.0
        )
        torch.testing.assert_close(torch.tensor(response["generation_logprobs"]), exact, atol=1e-4, rtol=0)


def test_a_collection_over_chat_completions_has_text_and_counts(tmp_path, served_model, served_url):
    outcome, rows = collected(tmp_path, served_url, served_model[1], "server.api=chat")
    assert (outcome.num_finished, outcome.num_given_up) == (6, 0)
    assert all(1 <= row["num_generated_tokens"] <= 8 for row in rows)
    assert len({row["messages"][-1]["content"] for row in rows}) > 1


def test_a_model_that_the_server_does_not_have_is_refused(tmp_path, served_model, served_url):
    with pytest.raises(ConfigError, match=r"server\.model = 'other': the server does not have it; known: served"):
        collected(tmp_path, served_url, served_model[1], "server.model=other")


def test_a_server_is_sent_messages_where_no_tokenizer_is_there(tmp_path, served_model, served_url):
    (tmp_path / "data.jsonl").write_text(json.dumps({"input": "a", "output": "a"}) + "\n")
    recipe = tmp_path / "recipe.yaml"
    given = {"output": tmp_path / "out", "model": tmp_path / "nowhere", "url": served_url}
    recipe.write_text(RECIPE.format(**given, data=tmp_path / "data.jsonl"))

    async def api() -> str:
        from contextlib import AsyncExitStack

        async with AsyncExitStack() as stack:
            inputs = await load_collection_inputs(load_collect_config(recipe), stack)
            assert inputs.served is not None
            return inputs.served.api

    assert asyncio.run(api()) == "chat"
