"""An unmodified agent of the pydantic-ai framework, which only gets the address of the gateway.

uv run examples/run_grpo.py ++env.asker.type=agent ++env.asker.function=examples.agents.with_pydantic_ai:ask \
    ++env.asker.scored_by=reasoning_gym data.default.env_name=asker
"""

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from nemo_rl.types import Prompt


async def ask(prompt: Prompt, base_url: str, api_key: str) -> None:
    """Let the framework ask the question; the environment rewards the answer."""
    model = OpenAIChatModel("policy", provider=OpenAIProvider(base_url=base_url, api_key=api_key))
    await Agent(model).run(prompt.messages[-1].content)
