"""In place of `gym env start`: a head server that is its only agent too, and a process in a session of its own.

`mode` of the configuration: "serves", "dies" at once, or is "late" for ever; its Ray is late `late_rays` times. Writes
the ids of its processes down.
"""

import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

config: Any = OmegaConf.load("env.yaml")
sys.stderr.write("this is the stand-in of NeMo Gym\n")
if config.mode == "dies":
    sys.exit("no such key: policy_modle_name")
Path("limit").write_text(os.environ["RAY_raylet_start_wait_time_s"])  # noqa: SIM112
starts = Path("starts")
starts.write_text(starts.read_text() + "." if starts.exists() else ".")
if len(starts.read_text()) <= config.get("late_rays", 0):
    sys.exit(
        "Exception: The current node timed out during startup. This could happen because some of the raylet failed"
    )
helper = subprocess.Popen(["sleep", "600"], start_new_session=True)
Path("pids.part").write_text(f"{os.getpid()} {helper.pid}")
Path("pids.part").rename("pids")
if config.mode == "late":
    time.sleep(600)
agent = {"responses_api_agents": {"simple_agent": dict(config.head_server)}}
yaml = OmegaConf.to_yaml(OmegaConf.merge(config, {"agent": agent}))


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(yaml).encode() if "config" in self.path else b"{}")


HTTPServer(("127.0.0.1", config.head_server.port), Handler).serve_forever()
