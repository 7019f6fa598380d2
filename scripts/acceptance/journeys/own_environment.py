"""An environment of two turns that asks an HTTP service, which answers 503 to 3% of the prompts for ever.

97% of the rollouts are trained on, 3% are counted as failures with the service's status; the run ends well.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

from journey import SHORT, Journey, main

NUM_PROMPTS, EVERY = 100, 33  # prompts, and the distance of those that fail: 3, 36 and 69
QUESTION = "Spell this word backward (example: sun -> nus): {}"
ENVIRONMENT = """
import asyncio
import urllib.request
from urllib.parse import quote

from nemo_rl.types import EnvStep, Message


class Judge:
    def __init__(self, address):
        self._address = address

    async def step(self, conversation, state):
        spelled = next(message.content for message in conversation if message.role == "assistant")
        url = f"{self._address}/{state['answer']}/{quote(spelled.strip())}"
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=10).read().decode())
        if "asked" not in state:
            return EnvStep(observation=(Message("user", "Sure?"),), done=False, state={**state, "asked": True})
        return EnvStep(rewards={"judge": float(text)}, state=state)
"""
RECIPE = """
defaults: quickstart
grpo: {{max_rollout_turns: 2}}
policy: {{max_total_sequence_length: 120}}
data:
  _override_: true
  train: {{data_path: rows.jsonl, env_name: judge}}
env:
  _override_: true
  judge: {{type: "environments:Judge", kwargs: {{address: "{address}"}}, retries: {{backoff_s: 0.05}}}}
"""


def word_of(number: int) -> str:
    """Return a word of three letters for each number below 1,000."""
    return "".join("abcdefghij"[int(digit)] for digit in f"{number:03d}")


class Service(BaseHTTPRequestHandler):
    """A service that cannot score some answers."""

    def do_GET(self) -> None:
        """Answer with 1 for the right spelling and 0 for others, or with 503."""
        number, _, spelled = self.path.strip("/").partition("/")
        fails, is_right = int(number) % EVERY == 3, unquote(spelled) == word_of(int(number))[::-1]
        self.send_response(503 if fails else 200)
        self.end_headers()
        self.wfile.write(b"" if fails else str(int(is_right)).encode())

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


def travel(journey: Journey) -> None:
    """Play the environment, then train on all prompts once."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    rows = [{"input": QUESTION.format(word_of(n)), "output": str(n)} for n in range(NUM_PROMPTS)]
    journey.write("rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    journey.write("environments.py", ENVIRONMENT)
    journey.write("grpo.yaml", RECIPE.format(address=f"http://127.0.0.1:{server.server_port}"))

    output = journey.nemo_rl("env", "test", "judge", "--rows", "5", code=1)
    journey.says(output, "row 0, answer 1: reward 0 (judge 0), 2 turns", "HTTPError: HTTP Error 503", "3 failed")
    journey.nemo_rl("doctor", "--config", "grpo.yaml", "--json", code=0)

    overrides = ("grpo.num_prompts_per_step=20", "grpo.max_num_epochs=1", "logger.run_name=flaky")
    journey.nemo_rl("grpo", *SHORT, *overrides)
    steps = journey.metrics()
    total = sum(row["train/num_rollouts"] for row in steps)
    failed = sum(row["train/failures/environment"] for row in steps)
    trained = sum(row["train/num_valid_samples"] for row in steps)
    journey.claim("every prompt is drawn once", total == 4 * NUM_PROMPTS, f"{total} rollouts")
    journey.claim("3% of the rollouts are counted as failed", failed == 0.03 * total, f"{failed} of {total}")
    journey.claim("97% of the rollouts are trained on", trained == 0.97 * total, f"{trained} of {total}")
    stored = [json.loads(line) for line in (journey.directory / "runs/exp_001/rollouts/train.jsonl").open()]
    causes = {row["failure"]["cause"] for row in stored if row.get("failure")}
    journey.claim("their cause is stored", causes == {"HTTPError: HTTP Error 503: Service Unavailable"}, str(causes))
    checked = journey.nemo_rl("check", "runs/exp_001", "--json", code=0)
    journey.says(checked, '"failures_environment"', '"warning"')


if __name__ == "__main__":
    main(travel)
