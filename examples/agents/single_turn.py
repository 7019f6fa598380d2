"""The smallest agent: one question, one answer, scored by the environment that `scored_by` names.

uv run examples/run_grpo.py ++env.asker.type=agent ++env.asker.function=examples.agents.single_turn:ask \
    ++env.asker.scored_by=reasoning_gym data.default.env_name=asker
"""

from openai import AsyncOpenAI

from nemo_rl.types import Prompt

# One client for all runs: its connections are reused, and creating one takes longer than the question.
CLIENT = AsyncOpenAI(base_url="http://unused", api_key="unused")


async def ask(prompt: Prompt, base_url: str, api_key: str) -> None:
    """Ask the question; return nothing, since the environment rewards the answer."""
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    messages = [{"role": message.role, "content": message.content} for message in prompt.messages]
    await client.chat.completions.create(model="policy", messages=messages)  # type: ignore[arg-type]
