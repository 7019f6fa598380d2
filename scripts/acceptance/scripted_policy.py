"""A gateway over an engine whose answers are written here, for clients that are run beside it as they are.

frameworks.py and harnesses.py import it. Tokens are bytes, the chat template is that of Qwen 3. `serve_model` has
SmolLM2-135M-Instruct in place of the script, with the same template, since its own renders no tools.
"""

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_rl.config.policy import TokenizerConfig
from nemo_rl.data.chat import ChatEncoder
from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.gateway.codec import Codec
from nemo_rl.gateway.completions import CompletionRules
from nemo_rl.gateway.server import GatewayServer
from nemo_rl.gateway.sessions import Chain
from nemo_rl.interfaces import Generation
from nemo_rl.types import Completion, FailedRequest, GenerationRequest, SamplingParams
from tests.templates import template_text
from tests.unit.gateway.engines import SpeakingGeneration, started

logger = logging.getLogger(__name__)

TEMPLATE = "qwen3"
MODEL_LEN, MODEL_TOKENS = 4096, 512  # of the model: context and longest response
MAX_MODEL_LEN = 1_000_000  # bytes; a harness's first prompt has some hundred thousand


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a tool call as Qwen 3 writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Recorded:
    """An engine, and each completion that it gave, with the request."""

    def __init__(self, engine: Generation) -> None:
        self.engine = engine
        self.sampled: list[tuple[GenerationRequest, Completion]] = []

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion | FailedRequest]:
        by_id = {request.request_id: request for request in requests}
        started = time.monotonic()
        async for result in self.engine.generate(requests):
            if isinstance(result, Completion):
                self.sampled.append((by_id[result.request_id], result))
                counts = f"{len(by_id[result.request_id].token_ids)} + {len(result.token_ids)} tokens"
                logger.info("%s in %.1f s, %s", counts, time.monotonic() - started, result.finish_reason)
            else:
                logger.warning("the engine failed: %s", result.cause)
            yield result


@dataclass(frozen=True)
class Session:
    """What the gateway recorded of one client's run."""

    num_calls: int
    num_histories: int
    num_tool_results: int
    sampled: int  # tokens
    untrained: tuple[str, ...] = ()  # requests whose tokens are on no history
    rewritten: tuple[str, ...] = field(default=())  # histories that are not the prompt and response of their last call

    @property
    def is_exact(self) -> bool:
        return self.num_calls > 0 and not self.untrained and not self.rewritten


def judge(chains: Sequence[Chain], sampled: Sequence[tuple[GenerationRequest, Completion]]) -> Session:
    """Compare what would be trained with what the engine was asked and answered, token by token."""
    generated = {tuple(m.token_ids) for chain in chains for m in chain.message_log if m.is_generated}
    whole = {(*request.token_ids, *completion.token_ids) for request, completion in sampled}
    histories = [tuple(i for m in chain.message_log for i in m.token_ids) for chain in chains]
    return Session(
        len(sampled),
        len(chains),
        sum(m.message.role == "tool" for chain in chains for m in chain.message_log),
        sum(len(completion.token_ids) for _, completion in sampled),
        tuple(request.request_id for request, completion in sampled if completion.token_ids not in generated),
        tuple(str(i) for i, ids in enumerate(histories) if ids not in whole),
    )


def scripted(say: Callable[[str], str]) -> Recorded:
    """Return an engine that answers each prompt's text with `say(text)`."""
    return Recorded(SpeakingGeneration(TEMPLATE, lambda request, prompt: say(prompt)))


@asynccontextmanager
async def serve(engine: Recorded) -> AsyncIterator[GatewayServer]:
    """Run a gateway over an engine of `scripted` while the block runs; demands for a call are left to the policy."""
    rules: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "forced_tool_choice": "auto"}
    server = await started(engine, TEMPLATE, **rules)  # type: ignore[arg-type]
    try:
        yield server
    finally:
        await server.close()


@asynccontextmanager
async def serve_model(directory: Path) -> AsyncIterator[tuple[GatewayServer, Recorded]]:
    """Run a gateway over SmolLM2-135M-Instruct on vLLM, greedy, while the block runs; its files go to `directory`."""
    from nemo_rl.generation.engines import EngineModel
    from nemo_rl.generation.vllm.engine import VllmGeneration
    from nemo_rl.generation.vllm.entry import VllmConfig, VllmGenerationConfig
    from tests.contracts.smollm2 import save_smollm2

    path = str(save_smollm2(directory))
    tokenizer = load_tokenizer(TokenizerConfig(), path)
    tokenizer.chat_template = template_text(TEMPLATE)
    codec = Codec(ChatEncoder(tokenizer), tool_parser_name="hermes")
    section = VllmGenerationConfig(vllm_cfg=VllmConfig(max_num_seqs=4))
    engine = await VllmGeneration.create(section, EngineModel(path, "float32", MODEL_LEN, "cpu"))
    sampling = SamplingParams(MODEL_TOKENS, temperature=0.0, stop_token_ids=codec.encoder.stop_token_ids)
    settings: Any = {"can_guide": True, "forced_tool_choice": "guided"}
    rules = CompletionRules("policy", MODEL_LEN, sampling, seed=1, max_concurrent_calls=4, timeout_s=300, **settings)
    recorded = Recorded(engine)
    try:
        server = await GatewayServer.start(recorded, codec, rules)  # type: ignore[arg-type]
        try:
            yield server, recorded
        finally:
            await server.close()
    finally:
        await engine.close()


async def run_client(
    command: Sequence[str], environment: Mapping[str, str], *, timeout_s: float, cwd: str | None = None
) -> tuple[int, str, str]:
    """Run a client and return its exit status and what it wrote; raises TimeoutError after its deadline."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, env=dict(environment), stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe, cwd=cwd
    )
    try:
        async with asyncio.timeout(timeout_s):
            output, errors = await process.communicate()
    except BaseException:
        process.kill()
        await process.wait()
        raise
    return process.returncode or 0, output.decode(errors="replace"), errors.decode(errors="replace")


def calculate(prompt: str) -> str:
    """Answer the two questions of framework_clients.py: calls one after another, then two at once."""
    conversation = prompt.split("<|im_start|>user", 1)[1]
    blocks = re.findall(r"(?:<tool_response>|Observation:)((?:\s*\d+)+)\s*<", conversation)
    results = [number for block in blocks for number in block.split()]
    if not results:
        return "<think>\nThe sum first.\n</think>\n\n" + call_text("add", {"a": 3, "b": 4})
    if len(results) == 1:
        return "Now the product.\n" + call_text("multiply", {"a": int(results[0]), "b": 5})
    if "Double it" not in conversation:
        return _say("It is 35.", prompt)
    if len(results) == 2:
        return call_text("multiply", {"a": int(results[1]), "b": 2}) + "\n" + call_text("add", {"a": 1, "b": 2})
    return _say("It is 70, and 3.", prompt)


def _say(text: str, prompt: str) -> str:
    """Return a last answer: by the tool for it where the client has one."""
    return call_text("final_answer", {"answer": text}) if '"name": "final_answer"' in prompt else text
