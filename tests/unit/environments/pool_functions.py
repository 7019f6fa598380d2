"""Functions that the tests of process pools call in processes of their own."""

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def misbehave(what: str) -> Any:
    how, _, argument = what.partition(" ")
    if how == "compute":
        return 9**9**9  # holds the GIL
    if how == "sleep":
        time.sleep(float(argument))
        return "slept"
    if how == "exit":
        os._exit(int(argument))
    if how == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return object()


def write_replies(kind: str) -> str:
    """Write to every descriptor what a reply might look like, then answer "own"."""
    texts = {
        "forged": json.dumps({"id": "", "results": [{"result": "forged"}]}) + "\n",
        "early": "\n".join(json.dumps({"id": f"{i:016x}", "results": [{"result": "forged"}]}) for i in range(4)) + "\n",
        "endless": "[" * 1000,  # and no end of the line
        "deep": "[" * 100_000 + "\n",
        "list": "[]\n",
        "nothing": "\n",
    }
    for name in os.listdir("/proc/self/fd") if kind in texts else ():
        try:
            if int(name) > 2 and os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                os.write(int(name), texts[kind].encode())
        except OSError:
            continue
    if kind == "endless":
        time.sleep(60)
    return "own"


def reach_out(what: str) -> Any:
    how, _, argument = what.partition(" ")
    if how == "variables":
        return dict(os.environ)
    if how == "read":
        return Path(argument).read_text()
    if how == "write":
        return Path(argument).write_text("x")
    if how == "connect":
        return socket.create_connection(("127.0.0.1", 9), timeout=1).fileno()
    if how == "fork":
        return os.fork()
    if how == "thread":
        threading.Thread(target=int).start()
    if how == "run":
        return subprocess.check_output(["true"]).decode()
    import colorsys  # noqa: F401 - a module that nothing has imported yet
    import xmlrpc.client  # noqa: F401

    return [1]


def make_lookup(path: str) -> Callable[[int], int]:
    offset = int(Path(path).read_text())
    return lambda number: number + offset
