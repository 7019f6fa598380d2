"""A real vLLM server of OpenAI's API, for the suites that talk to one."""

import contextlib
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

from nemo_rl.distributed.machine import unused_port
from nemo_rl.generation.vllm.process_environment import environment

START_S = 240.0
SERVED_NAME = "served"
MAX_LOGPROBS, MAX_MODEL_LEN = 8, 65


@contextlib.contextmanager
def openai_server(model: Path, log: Path, options: Mapping[str, object]) -> Iterator[str]:
    """Its root, once it answers; `log` is its output."""
    port = unused_port()
    options = {"--model": model, "--host": "127.0.0.1", "--port": port, "--kv-cache-memory-bytes": 2**25, **options}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    with log.open("w") as output:
        server = subprocess.Popen(
            [*command, *(str(word) for option in options.items() for word in option)],
            env={**os.environ, **environment("cpu")},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait_until_up(f"http://127.0.0.1:{port}/health", server, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _wait_until_up(url: str, server: "subprocess.Popen[bytes]", log: Path) -> None:
    ends_at = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < ends_at:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise AssertionError(f"the server is not up: {log.read_text()[-2000:]}")
