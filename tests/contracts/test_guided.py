"""What log-probs a guided response of vLLM has: those of the masked distribution, not of the policy's own."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from nemo_rl.data.chat import ChatEncoder
from nemo_rl.gateway.codec import Codec, ReadingRules
from nemo_rl.generation.engines import EngineModel
from nemo_rl.generation.vllm.engine import VllmGeneration
from nemo_rl.types import Completion, FailedRequest, Guide
from tests.contracts.engines import MAX_MODEL_LEN, answers, exact_logprobs, request, section
from tests.support.quick import quick
from tests.templates import byte_tokenizer

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer("chatml")


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=MAX_MODEL_LEN,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.1,
    )
    return Qwen2ForCausalLM(config).float().eval()


@pytest.fixture(scope="module", params=quick(["own process", "in process"], ["in process"]))
def engine_and_loop(
    request: pytest.FixtureRequest, model: Qwen2ForCausalLM, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[VllmGeneration, asyncio.Runner]]:
    directory: Path = tmp_path_factory.mktemp("guided")
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    with asyncio.Runner() as loop:
        made = EngineModel(str(directory), "float32", MAX_MODEL_LEN, "cpu")
        engine = loop.run(VllmGeneration.create(section(in_process=request.param == "in process"), made))
        yield engine, loop
        loop.run(engine.close())


def test_guided_logprobs_are_those_of_the_masked_distribution(engine_and_loop: Any, model: Any, tokenizer: Any) -> None:
    engine, loop = engine_and_loop
    prompt = tokenizer.encode("How many?", add_special_tokens=False)
    stops = (tokenizer.eos_token_id,)
    guide = Guide("regex", "[0-9]{4}")
    for temperature in (1.0, 0.7):
        asked = request("a", tokens=prompt, temperature=temperature, stop_token_ids=stops, guide=guide)
        done = loop.run(answers(engine, [asked]))["a"]
        assert isinstance(done, Completion), done
        assert re.fullmatch("[0-9]{4}", tokenizer.decode(done.token_ids[:4]))
        sampled = done.token_ids[:4]
        raw = exact_logprobs(model, prompt, sampled, temperature)
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *sampled]])).logits[0, len(prompt) - 1 : -1] / temperature
        digits = tokenizer.convert_tokens_to_ids(list("0123456789"))
        masked = raw - logits.log_softmax(-1)[:, digits].logsumexp(-1)  # renormalised over what the regex allows
        torch.testing.assert_close(torch.tensor(done.logprobs[:4]), masked, atol=1e-4, rtol=0)
        assert (raw - masked).abs().min() > 0.5  # so a trainer that took them for the policy's would be wrong


@pytest.mark.parametrize(
    "guide",
    [
        Guide("json_schema", json.dumps({"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]})),
        Guide("grammar", 'root ::= "{\\"a\\": " ("1" | "2") "}"'),
    ],
    ids=lambda guide: guide.kind,
)
def test_a_response_matches_its_schema_or_grammar(engine_and_loop: Any, tokenizer: Any, guide: Guide) -> None:
    engine, loop = engine_and_loop
    stops = (tokenizer.eos_token_id,)
    asked = request("a", stop_token_ids=stops, max_new_tokens=200, guide=guide)
    done = loop.run(answers(engine, [asked]))["a"]
    assert isinstance(done, Completion), done
    assert done.finish_reason == "stop"
    assert json.loads(tokenizer.decode(done.token_ids, skip_special_tokens=True))["a"] in (1, 2)


def test_a_forced_call_is_of_the_chosen_tool_and_ends_the_response(engine_and_loop: Any, tokenizer: Any) -> None:
    engine, loop = engine_and_loop
    codec = Codec(ChatEncoder(tokenizer), tool_parser_name="hermes")
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("f", "g")]
    for names in (["f"], ["g"], ["f", "g"]):
        guide = codec.call_guide(tools, names, is_required=True)
        asked = request("a", stop_token_ids=codec.encoder.stop_token_ids, max_new_tokens=300, guide=guide)
        done = loop.run(answers(engine, [asked]))["a"]
        assert isinstance(done, Completion), done
        assert done.finish_reason == "stop"
        message = codec.read(done.token_ids, ReadingRules("1", tools=tools)).message
        (call,) = message.tool_calls
        assert call.name in names
        assert json.loads(call.arguments)["a"] in (1, 2)
        assert not message.content


def test_a_constraint_that_cannot_be_compiled_fails_its_request_alone(engine_and_loop: Any) -> None:
    engine, loop = engine_and_loop
    results = loop.run(answers(engine, [request("bad", guide=Guide("json_schema", "{")), request("good")]))
    assert isinstance(results["bad"], FailedRequest)
    assert isinstance(results["good"], Completion)
