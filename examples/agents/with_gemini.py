"""The question of single_turn.py through Gemini's API, by its official client: `uv pip install google-genai`.

uv run examples/run_grpo.py ++env.asker.type=agent ++env.asker.function=examples.agents.with_gemini:ask \
    ++env.asker.scored_by=reasoning_gym data.default.env_name=asker
"""

# pyright: reportMissingImports=false

from typing import Any

import google.genai as genai

from nemo_rl.types import Prompt

ROLES = {"assistant": "model"}


async def ask(prompt: Prompt, base_url: str, api_key: str) -> None:
    """Ask the question through `generateContent`; the environment rewards the answer."""
    contents: list[Any] = [
        {"role": ROLES.get(message.role, "user"), "parts": [{"text": message.content}]}
        for message in prompt.messages
        if message.role != "system"
    ]
    system = "\n".join(message.content for message in prompt.messages if message.role == "system")
    config = genai.types.GenerateContentConfig(system_instruction=system or None)
    client = genai.Client(api_key=api_key, http_options=genai.types.HttpOptions(base_url=base_url)).aio
    try:
        await client.models.generate_content(model="policy", contents=contents, config=config)
    finally:
        await client.aclose()
