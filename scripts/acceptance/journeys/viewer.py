"""Two runs in the viewer: which one ended and why, their curves, a group, a rollout beside its target, an export."""

import http.cookiejar
import json
import re
import signal
import subprocess
import urllib.error
import urllib.request

from journey import SHORT, Journey, main

WORDS = ("able", "bird", "cold", "door", "east", "farm", "gold", "hill", "iron", "joke", "kite", "lamp")
REWARDS = """
calls = 0


def spelling(messages, metadata):
    return float(messages[-1]["content"].strip() == metadata["answer"])


def until_spent(messages, metadata):
    global calls
    calls += 1
    if calls > 35:
        raise RuntimeError("the quota is spent")
    return spelling(messages, metadata)
"""
RECIPE = """
defaults: quickstart
data:
  _override_: true
  train: {data_path: rows.jsonl, env_name: own}
env: {_override_: true, own: {type: "rewards:spelling", retries: {max_retries: 0}}}
"""
SPENT = ("env.own.type=rewards:until_spent", "logger.run_name=spent", "++logger.notes=Stops in its third step.")
PAGES = {  # of each page: what its reader is shown
    "/": ("sound", "spent", "the quota is spent", "Stops in its third step.", "<svg", "quickstart"),
    "/s/exp_002": ("RolloutError", "the quota is spent"),
    "/s/exp_001": ("Reward", "Gradient norm", "<svg"),
    "/charts?run=exp_001&run=exp_002&metric=train/reward": ("exp_001", "exp_002", "<svg"),
    "/s/exp_001/step/1": ("group",),
    "/s/exp_001/groups": ("all wrong", "mixed", "all right"),
    "/s/exp_001/rollouts/train": ("backward",),
    "/s/exp_001/rollout/train/0.0": ("backward", "expected"),
    "/s/exp_001/check": ("check",),
    "/compare?a=exp_001&b=exp_002": ("train/reward",),
}


def travel(journey: Journey) -> None:
    """Train the runs, read the pages of a server, then those on the disk."""
    rows = [{"input": f"Spell {word} backward.", "output": word[::-1]} for word in WORDS]
    journey.write("rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    journey.write("rewards.py", REWARDS)
    journey.write("grpo.yaml", RECIPE)
    journey.nemo_rl("grpo", *SHORT, "grpo.max_num_steps=3", "logger.run_name=sound")
    journey.nemo_rl("grpo", *SHORT, *SPENT, code=1)
    read_pages(journey)
    journey.nemo_rl("view", "runs", "--export", "report")
    pages = list((journey.directory / "report").rglob("*.html"))
    texts = {str(path.relative_to(journey.directory)): path.read_text() for path in pages}
    journey.claim(
        "the export has pages of both runs", {"exp_001", "exp_002"} <= set(re.findall(r"exp_\d+", str(texts)))
    )
    asking = [name for name, text in texts.items() if re.search(r"(?:src|href)=[\"']?https?:", text)]
    journey.claim("no exported page asks the network", not asking, str(asking))


def read_pages(journey: Journey) -> None:
    """Start the viewer, read PAGES with and without its token, stop it."""
    words = (*journey.program, "view", "runs")
    server = subprocess.Popen(
        words,
        cwd=journey.directory,
        env=journey.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    announced = server.stdout.readline()
    journey.claim("the viewer announces two runs", announced.startswith("2 runs and collections: "), announced)
    address, _, token = announced.split()[-1].partition("/?")
    reader = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar()))
    reader.open(f"{address}/?{token}", timeout=60).close()  # leaves the cookie
    for path, parts in PAGES.items():
        text = reader.open(f"{address}{path}", timeout=60).read().decode()
        for part in parts:
            journey.claim(f"{path} shows {part!r}", part in text, re.sub(r"<[^>]+>", " ", text))
    try:
        status = urllib.request.urlopen(address, timeout=60).status
    except urllib.error.HTTPError as error:
        status = error.code
    journey.claim("without the token nothing is shown", status == 401, str(status))
    server.send_signal(signal.SIGINT)
    _, errors = server.communicate(timeout=60)
    journey.claim("the viewer stops when asked", (server.returncode, errors.strip()[-7:]) == (0, "stopped"), errors)


if __name__ == "__main__":
    main(travel)
