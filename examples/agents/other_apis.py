"""The question of single_turn.py in two further APIs of the gateway: OpenAI's Responses, Anthropic's Messages.

uv run examples/run_grpo.py ++env.asker.type=agent ++env.asker.function=examples.agents.other_apis:ask_with_messages \
    ++env.asker.scored_by=reasoning_gym data.default.env_name=asker
"""

from typing import Any

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from nemo_rl.types import Prompt

# One client per API for all runs: its connections are reused.
OPENAI = AsyncOpenAI(base_url="http://unused", api_key="unused")
ANTHROPIC = AsyncAnthropic(base_url="http://unused", api_key="unused")
MAX_TOKENS = 4096  # Messages insist on a limit; the run's `max_new_tokens` is the shorter one


def _conversation(prompt: Prompt) -> list[Any]:
    return [{"role": message.role, "content": message.content} for message in prompt.messages]


async def ask_with_responses(prompt: Prompt, base_url: str, api_key: str) -> None:
    """Ask the question through `/v1/responses`; the environment rewards the answer."""
    client = OPENAI.with_options(base_url=base_url, api_key=api_key)
    await client.responses.create(model="policy", input=_conversation(prompt))


async def ask_with_messages(prompt: Prompt, base_url: str, api_key: str) -> None:
    """Ask the question through `/v1/messages`; the environment rewards the answer."""
    client = ANTHROPIC.with_options(base_url=base_url, api_key=api_key)
    await client.messages.create(model="policy", messages=_conversation(prompt), max_tokens=MAX_TOKENS)
