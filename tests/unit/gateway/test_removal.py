"""Deleting the file of a dialect removes its API and nothing else."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
ASK = """
import asyncio
from aiohttp import ClientSession
import nemo_rl
from tests.unit.gateway.engines import SpeakingGeneration, started

async def main():
    server = await started(SpeakingGeneration("chatml", lambda request, prompt: "ok"))
    user = {"role": "user", "content": "hi"}
    gemini = "/v1beta/models/policy:generateContent"
    async with ClientSession(server.base_url, headers={"Authorization": f"Bearer {server.token}"}) as client:
        async with client.post("/v1/chat/completions", json={"messages": [user]}) as response:
            print(response.status, (await response.json())["choices"][0]["message"]["content"])
        async with client.post(gemini, json={"contents": [{"parts": [{"text": "hi"}]}]}) as response:
            print(response.status, (await response.json())["error"]["type"])
    await server.close()
    print(nemo_rl.__file__)

asyncio.run(main())
"""


def test_without_the_file_of_gemini_the_server_answers_all_other_apis(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "nemo_rl", tmp_path / "nemo_rl", ignore=shutil.ignore_patterns("__pycache__", "static"))
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    (tmp_path / "nemo_rl/gateway/dialects/gemini.py").unlink()
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    answered, missing, path = done.stdout.splitlines()
    assert (answered, missing) == ("200 ok", "404 invalid_request_error")
    assert Path(path).is_relative_to(tmp_path)
