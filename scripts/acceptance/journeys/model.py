"""From a run to its model: evaluated, exported, loaded by transformers, served by vLLM with the same answers.

PYTHONPATH is not needed; vLLM's server takes a minute to start on two cores.
"""

import json
import os
import signal
import subprocess
import time
import urllib.request

from journey import SHORT, Journey, main

QUESTION = "Spell the word cat backward."
ANSWER = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = (kind.from_pretrained(sys.argv[1]) for kind in (AutoModelForCausalLM, AutoTokenizer))
text = tokenizer.apply_chat_template(
    [{"role": "user", "content": sys.argv[2]}], tokenize=False, add_generation_prompt=True
)
ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
out = model.generate(ids, do_sample=False, max_new_tokens=8)
print("ANSWER", tokenizer.decode(out[0, ids.shape[1]:], skip_special_tokens=True))
"""


def travel(journey: Journey) -> None:
    """Train three steps; evaluate, export, load and serve what was learnt."""
    journey.nemo_rl("grpo", *SHORT, "grpo.max_num_steps=3")
    output = journey.nemo_rl("eval", "runs/exp_001", "server.backend=hf", "eval.limit=20")
    journey.says(output, "pass@1", "over 20 tasks")
    output = journey.nemo_rl("export", "runs/exp_001", "--to", "speller")
    card = (journey.directory / "speller/README.md").read_text()
    journey.says(card, "after 3 steps of grpo", "(training_recipe.yaml)", "| step | reward |", "| 3 | ")
    recipe = (journey.directory / "speller/training_recipe.yaml").read_text()
    journey.says(recipe, "num_prompts_per_step: 4", "num_generations_per_prompt: 4")
    program = (journey.program[0], "-c", ANSWER)
    exported = answer_of(journey.run(*program, "speller", QUESTION))
    linked = answer_of(journey.run(*program, "runs/exp_001/model", QUESTION))
    journey.claim("the export answers as RUN/model", exported == linked, f"{exported!r} and {linked!r}")
    for options in ((), ("--", "--model", "speller")):  # words after -- are vLLM's, and win
        served = ask_served(journey, *options)
        what = "the export" if options else "the run"
        journey.claim(
            f"vLLM answers with {what} as both", served.strip() == exported.strip(), f"{served!r} and {exported!r}"
        )


def answer_of(output: str) -> str:
    """Return the answer in what the program printed."""
    return next((line.removeprefix("ANSWER ") for line in output.splitlines() if line.startswith("ANSWER")), output)


def ask_served(journey: Journey, *options: str) -> str:
    """Serve the run's model, ask one question greedily, stop the server; return the answer."""
    words = (*journey.program, "serve", "runs/exp_001", "--port", "8765", *options)
    log = (journey.directory / "server.log").open("w")
    server = subprocess.Popen(
        words, cwd=journey.directory, env=journey.environment(), stdout=log, stderr=log, start_new_session=True
    )
    try:
        wait(server)
        with urllib.request.urlopen("http://127.0.0.1:8765/v1/models", timeout=60) as reply:
            model = json.load(reply)["data"][0]["id"]
        messages = [{"role": "user", "content": QUESTION}]
        body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 8}
        request = urllib.request.Request(
            "http://127.0.0.1:8765/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            return json.load(reply)["choices"][0]["message"]["content"]
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


def wait(server: "subprocess.Popen[bytes]") -> None:
    """Return once the server answers; raises RuntimeError if it ends or takes too long."""
    deadline = time.monotonic() + 600
    while server.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen("http://127.0.0.1:8765/health", timeout=5).close()
            return
        except OSError:
            time.sleep(1)
    raise RuntimeError("the server did not start")


if __name__ == "__main__":
    main(travel)
