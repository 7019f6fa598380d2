"""What the journeys share: a directory, commands as a user types them, and claims about what they printed and wrote.

uv run scripts/acceptance/journeys/own_data.py        each is a script; 0 if all of its claims hold
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[3]
DEADLINE_S = 900.0
# Steps of the quickstart that are short and need no start of vLLM; the model answers in eight tokens.
SMALL = (
    "policy.generation.backend=hf",
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=4",
    "logger.progress=false",
)
SHORT = (  # and no validations
    *SMALL,
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
    "grpo.val_period=0",
    "checkpointing.metric_name=null",
)


@dataclass
class Journey:
    """One journey in a directory of its own."""

    directory: Path
    program: tuple[str, ...] = (sys.executable, "-m", "nemo_rl")
    variables: dict[str, str] = field(default_factory=dict)
    num_claims: int = 0
    num_broken: int = 0

    def write(self, file: str, text: str) -> Path:
        """Write a file of the user's."""
        path = self.directory / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def nemo_rl(self, *words: str, code: int = 0, stdin: str = "") -> str:
        """Run `nemo-rl WORDS`; claim its exit code, and return what it printed on both streams."""
        return self.run(*self.program, *words, code=code, stdin=stdin)

    def run(self, *words: str, code: int = 0, stdin: str = "") -> str:
        """Run a command; claim its exit code, and return what it printed on both streams."""
        started = time.monotonic()
        done = subprocess.run(
            words, cwd=self.directory, env=self.environment(), input=stdin, text=True, timeout=DEADLINE_S,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        shown = " ".join(words[len(self.program) :] if words[: len(self.program)] == self.program else words)
        self.claim(
            f"{shown[:90]}: exit code {code}", done.returncode == code, f"it is {done.returncode}\n{done.stdout}"
        )
        print(f"        {time.monotonic() - started:.1f} s", flush=True)
        return done.stdout

    def environment(self) -> dict[str, str]:
        """Return the variables of the journey's commands."""
        kept = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
        return {**kept, "WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1", **self.variables}

    def claim(self, text: str, holds: bool, otherwise: str = "") -> None:
        """Print a claim, and what is seen if it does not hold."""
        self.num_claims += 1
        self.num_broken += not holds
        print(
            f"{'ok     ' if holds else 'BROKEN '} {text}" + (f"\n{otherwise[-3000:]}" if not holds else ""), flush=True
        )

    def says(self, output: str, *parts: str) -> None:
        """Claim that each part is in an output."""
        for part in parts:
            self.claim(f"says {part!r}", part in output, output)

    def metrics(self, run: str = "runs/exp_001") -> list[dict[str, float]]:
        """Return the lines of a run's metrics.jsonl that are of training steps."""
        lines = (self.directory / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [row for row in map(json.loads, lines) if "train/reward" in row or "train/loss" in row]


def main(travel: Callable[[Journey], None]) -> None:
    """Make the journey in a new directory; exit with 1 if a claim is broken, and if there was none."""
    with tempfile.TemporaryDirectory() as name:
        journey = Journey(Path(name))
        travel(journey)
    print(f"{journey.num_claims - journey.num_broken} of {journey.num_claims} claims hold")
    sys.exit(int(journey.num_broken > 0 or journey.num_claims == 0))
