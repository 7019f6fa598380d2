"""Environments of the ecosystem: 20 training steps each, every rollout accounted for; figures for docs/benchmarks.md.

uv run scripts/acceptance/ecosystem.py                     all four, one after another
uv run scripts/acceptance/ecosystem.py openenv --steps 5   one of mcp, verifiers, openenv, harbor

The quickstart's model spells words backward. Packages that do not fit beside the development group are installed into
an environment of their own, which finds the rest in this one.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import socket
import string
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "ecosystem"
QUESTION = "Spell this word backward (example: sun -> nus): {}"
NUM_WORDS = 200
MAX_LOGPROB_ERROR = 1e-4
START_S, RUN_S = 300.0, 3600.0
PACKAGES = {
    "openenv": ("openenv-core>=0.3,<0.4",),
    "verifiers": ("verifiers>=0.4,<0.5", "antlr4-python3-runtime==4.9.3"),  # Hydra reads its grammar with 4.9 alone
}


@dataclass(frozen=True)
class Scenario:
    """What a run needs beside the quickstart's recipe."""

    overrides: tuple[str, ...]
    server: str | None = None  # a script of examples/ecosystem that serves at a port


def words() -> list[str]:
    letters = random.Random(0)
    return ["".join(letters.choices(string.ascii_lowercase, k=letters.randint(3, 5))) for _ in range(NUM_WORDS)]


def write_rows(path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": QUESTION.format(word)}], "word": word, "reset": {"word": word}}
        for word in words()
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_tasks(directory: Path) -> None:
    """Write a Harbor task for each word, after the example's."""
    for word in words():
        task = shutil.copytree(EXAMPLES / "harbor" / "spell-moon", directory / word, dirs_exist_ok=True)
        (task / "instruction.md").write_text(QUESTION.format(word))
        (task / "environment" / "word.txt").write_text(f"{word}\n")


def scenario(name: str, directory: Path, port: int) -> Scenario:
    rows = f"~data.train&&++data.train={{dataset_name: jsonl, data_path: {directory / 'rows.jsonl'}, env_name: {name}}}"
    jsonl = tuple(rows.split("&&"))
    if name == "mcp":
        keys = f"++env.mcp={{type: mcp, url: 'http://127.0.0.1:{port}/mcp', reward_tool: spelling}}"
        return Scenario((*jsonl, keys), "mcp_server.py")
    if name == "openenv":
        keys = f"++env.openenv={{type: openenv, url: 'http://127.0.0.1:{port}', observation_field: text}}"
        return Scenario((*jsonl, keys), "openenv_server.py")
    if name == "verifiers":
        agent = "agent: {harness: {id: 'null'}, runtime: {type: subprocess}}"
        keys = f"++env.verifiers={{type: verifiers, environment: {{taskset: {{id: speller-v1}}, {agent}}}}}"
        data = "{dataset_name: verifiers, task: speller-v1, env_name: verifiers}"
        return Scenario(("~data.train", f"++data.train={data}", keys))
    write_tasks(directory / "tasks")
    data = f"{{dataset_name: harbor, data_path: {directory / 'tasks'}, env_name: harbor}}"
    return Scenario(("~data.train", f"++data.train={data}", "++env.harbor={type: harbor, answer_file: answer.txt}"))


def python_for(name: str, directory: Path) -> str:
    """Return an interpreter that has the scenario's package, and all of this environment's."""
    if name not in PACKAGES:
        return sys.executable
    environment = directory / "environment"
    subprocess.run(["uv", "venv", "-q", "--python", sys.executable, str(environment)], check=True, timeout=START_S)
    python = str(environment / "bin" / "python")
    subprocess.run(["uv", "pip", "install", "-q", "--python", python, *PACKAGES[name]], check=True, timeout=RUN_S)
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "zz_project.pth").write_text(sysconfig.get_path("purelib") + "\n")  # after its own packages
    return python


@contextlib.contextmanager
def served(python: str, script: str | None, port: int) -> Iterator[None]:
    """Run a server while the block runs."""
    if script is None:
        yield
        return
    process = subprocess.Popen([python, str(EXAMPLES / script), "--port", str(port)], cwd=ROOT)
    try:
        deadline = time.monotonic() + START_S
        while not answers(port):
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{script} does not serve")
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait(START_S)


def answers(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(name: str, steps: int, prompts: int, generations: int, python: str | None, overrides: Sequence[str]) -> bool:
    """Train, print a row of figures, and return whether all rollouts are accounted for and none failed."""
    with tempfile.TemporaryDirectory() as made:
        directory, port = Path(made), free_port()
        write_rows(directory / "rows.jsonl")
        python = python or python_for(name, directory)
        chosen = scenario(name, directory, port)
        sizes = (f"grpo.num_prompts_per_step={prompts}", f"grpo.num_generations_per_prompt={generations}")
        limits = (
            f"grpo.max_num_steps={steps}",
            "grpo.val_period=0",
            "grpo.val_at_start=false",
            "grpo.val_at_end=false",
        )
        paths = [str(EXAMPLES), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        command = [python, "-m", "nemo_rl", "grpo", f"logger.log_dir={directory / 'runs'}", *sizes, *limits]
        command += [
            "checkpointing.enabled=false",
            "~data.validation",
            "~env.reasoning_gym",
            *chosen.overrides,
            *overrides,
        ]
        started = time.monotonic()
        with served(python, chosen.server, port), (directory / "output.txt").open("w") as output:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=RUN_S, check=False
            )
        seconds = time.monotonic() - started
        if done.returncode:
            print((directory / "output.txt").read_text()[-4000:], file=sys.stderr)
            return False
        (exp,) = (directory / "runs").glob("exp_*")
        return report(name, exp, seconds, expected=steps * prompts * generations)


def report(name: str, directory: Path, seconds: float, *, expected: int) -> bool:
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "train/loss" in row]
    rollouts = [json.loads(line) for line in (directory / "rollouts" / "train.jsonl").read_text().splitlines()]
    failed = sum(value for row in trained for key, value in row.items() if key.startswith("train/failures/"))
    rewards = [sum(row["rewards"].values()) for row in rollouts if not row.get("failure")]
    worst = max(row["train/max_logprob_error"] for row in trained)
    counted = sum(row["train/num_rollouts"] for row in trained)
    passed = len(rollouts) == counted == expected and failed == 0 and worst <= MAX_LOGPROB_ERROR
    mean = sum(rewards) / len(rewards) if rewards else float("nan")
    print(
        f"| {name} | {len(trained)} | {len(rollouts)} of {expected} | {failed:.0f} | {mean:.3f} | {worst:.1e} "
        f"| {seconds:.0f} | {passed} |",
        flush=True,
    )
    return passed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = ["mcp", "openenv", "harbor", "verifiers"]
    parser.add_argument("what", nargs="*", choices=every, default=[])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--generations", type=int, default=4)
    parser.add_argument("--python", help="an interpreter that has the package already")
    parser.add_argument("--set", nargs="*", default=(), help="further overrides of the quickstart's recipe")
    arguments = parser.parse_args()
    print("| environment | steps | rollouts | failed | mean reward | max_logprob_error | s | as it should |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    sizes = (arguments.steps, arguments.prompts, arguments.generations)
    results = [run(name, *sizes, arguments.python, arguments.set) for name in arguments.what or every]
    sys.exit(0 if all(results) else 1)
