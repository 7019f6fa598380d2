"""Agents by dotted path, for processes of their own: little to import."""

import os

from openai import OpenAI

from nemo_rl.types import Prompt


def where_it_runs(prompt: Prompt, base_url: str, api_key: str) -> dict[str, float]:
    """The id of its process; prompt p1 crashes it."""
    with OpenAI(base_url=base_url, api_key=api_key, timeout=120.0) as client:
        client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])
    if prompt.prompt_id == "p1":
        os._exit(1)
    return {"pid": float(os.getpid())}
