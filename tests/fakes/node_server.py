"""A server of OpenAI's API that answers with the name of its node: `node_server.py HOST:PORT DIRECTORY`.

It is well from the second time that it is asked on, and dies when `die-NODE` appears in the directory.
"""

import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

NODE = os.environ.get("SLURMD_NODENAME", "none")


class Handler(BaseHTTPRequestHandler):
    times_asked = 0

    def do_GET(self) -> None:
        Handler.times_asked += 1
        self._answer(200 if Handler.times_asked > 1 else 503, b"")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer(200, NODE.encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def die_when_told(path: Path) -> None:
    while not path.exists():
        time.sleep(0.05)
    sys.stderr.write(f"no memory left on {NODE}\n")
    sys.stderr.flush()
    os._exit(9)


if __name__ == "__main__":
    host, _, port = sys.argv[1].rpartition(":")
    threading.Thread(target=die_when_told, args=[Path(sys.argv[2]) / f"die-{NODE}"], daemon=True).start()
    ThreadingHTTPServer((host, int(port)), Handler).serve_forever()
