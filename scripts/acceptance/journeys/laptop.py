"""A laptop with nothing but a wheel file: no clone, no vLLM, no GPU, no network.

uv run scripts/acceptance/journeys/laptop.py

Builds the wheel and installs it alone beside the libraries of this environment, without vLLM; wheel.py of the directory
above installs everything from an index.
"""

import resource
import subprocess
import sys
import sysconfig
from pathlib import Path

from journey import ROOT, SHORT, Journey, main

HIDE_VLLM = """
from importlib.machinery import PathFinder

find_spec = PathFinder.find_spec

def hide(name, *rest):
    return None if name.partition(".")[0] == "vllm" else find_spec(name, *rest)


PathFinder.find_spec = staticmethod(hide)
"""


def travel(journey: Journey) -> None:
    """Install, look around, train without vLLM, change the reward, resume."""
    programs = install(journey)
    journey.program = (str(programs / "python"), "-m", "nemo_rl")
    journey.variables = {"NEMO_RL_CACHE": str(journey.directory / "cache"), "PYTHONPATH": ""}
    where = journey.run(str(programs / "python"), "-c", "import nemo_rl; print(nemo_rl.__file__)")
    journey.claim("the repository is not in use", str(ROOT) not in where, where)
    journey.says(journey.nemo_rl("--version"), "nemo-rl 0.")
    journey.nemo_rl("init", "words")
    journey.directory /= "words"
    plan = journey.nemo_rl("grpo", "--dry-run")
    journey.claim("the plan does not speak of 80 GB", "80 GB" not in plan, plan)
    before = processor_seconds()
    refused = journey.nemo_rl("grpo", code=2)
    taken = processor_seconds() - before
    journey.says(refused, "vLLM is not installed", "policy.generation.backend=hf")
    journey.claim("that took less than two seconds of a processor", taken < 2, f"{taken:.1f} s")
    journey.says(journey.nemo_rl("grpo", *SHORT, "grpo.max_num_steps=3"), "step 3/3", "Continue    nemo-rl grpo")
    journey.says(journey.nemo_rl("env", "test", "spelling", "--rows", "3"), "right ones earn 1, wrong ones 0")
    journey.says(journey.run(str(programs / "python"), "test_project.py"), "passed: test_the_recipe_is_valid")
    lines = journey.nemo_rl(
        "grpo", *SHORT, "grpo.max_num_steps=4", "checkpointing.checkpoint_dir=runs/exp_001/checkpoints"
    )
    journey.claim("log lines have fewer than 120 characters", max(map(len, lines.splitlines()[:8])) < 120, lines)
    journey.claim("the run goes on in its directory", [row["step"] for row in journey.metrics()] == [1, 2, 3, 4])


def processor_seconds() -> float:
    """Return what the commands that have ended took of processors; other work on the machine does not lengthen it."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def install(journey: Journey) -> Path:
    """Install the wheel in an environment that sees the libraries of this one; return its programs' directory."""
    built = journey.directory / "dist"
    subprocess.run(["uv", "build", "--wheel", "-q", "-o", built], cwd=ROOT, check=True)
    environment = journey.directory / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (site,) = environment.glob("lib/python*/site-packages")
    wheel = next(built.glob("*.whl"))
    python = environment / "bin" / "python"
    subprocess.run(["uv", "pip", "install", "-q", "--no-deps", "--offline", "--python", python, wheel], check=True)
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (site / "zz_hide_vllm.pth").write_text("import hide_vllm\n")
    (site / "hide_vllm.py").write_text(HIDE_VLLM)
    return environment / "bin"


if __name__ == "__main__":
    main(travel)
