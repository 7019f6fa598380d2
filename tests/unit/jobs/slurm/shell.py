"""Runs the shell functions of the job in a bash of their own."""

import subprocess
from importlib.resources import files

DEADLINE_S = 120.0


def shell_text(*names: str) -> str:
    return "\n".join((files("nemo_rl.jobs") / "shell" / f"{name}.sh").read_text() for name in names)


def bash(text: str, *names: str, **variables: str) -> subprocess.Popen[str]:
    """`text` behind the functions of the files `names`, under the script's own settings."""
    script = f"set -euo pipefail\n{shell_text(*names)}\n{text}"
    return subprocess.Popen(
        ["bash", "-c", script],
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "NEMO_RL_POLL_S": "0.05", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_bash(text: str, *names: str, **variables: str) -> subprocess.CompletedProcess[str]:
    process = bash(text, *names, **variables)
    stdout, stderr = process.communicate(timeout=DEADLINE_S)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)
