"""An agent with its own loop and OpenAI's client, trained through the gateway; what it said is in the store."""

import json

from journey import SHORT, Journey, main

AGENT = """
from openai import AsyncOpenAI

CLIENT = AsyncOpenAI(base_url="http://unused", api_key="unused")


async def ask_twice(prompt, base_url, api_key):
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    messages = [{"role": message.role, "content": message.content} for message in prompt.messages]
    for _ in range(2):
        reply = await client.chat.completions.create(model="policy", messages=messages)
        answer = (reply.choices[0].message.content or "").strip()
        if answer == prompt.env_state["answer"]:
            return 1.0
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Try again."}]
    return 0.0
"""


def travel(journey: Journey) -> None:
    """Start from a project, add the agent, train two steps."""
    journey.nemo_rl("init", ".")
    journey.write("agents.py", AGENT)
    agent = '++env.tutor={type: agent, function: "agents:ask_twice"}'
    chosen = (agent, "data.default.env_name=tutor", "policy.max_total_sequence_length=120")
    journey.says(journey.nemo_rl("grpo", *chosen, "--dry-run"), "agents: tutor; gateway on 127.0.0.1")
    journey.nemo_rl("grpo", *chosen, *SHORT, "grpo.max_num_steps=2")
    steps = journey.metrics()
    journey.claim("two steps, none failed", [row["train/failures/agent"] for row in steps] == [0, 0])
    stored = [json.loads(line) for line in (journey.directory / "runs/exp_001/rollouts/train.jsonl").open()]
    texts = [message["content"] for row in stored for message in row["messages"]]
    journey.claim("32 rollouts are stored", len(stored) == 32, str(len(stored)))
    journey.claim("second tries are part of them", "Try again." in texts)


if __name__ == "__main__":
    main(travel)
