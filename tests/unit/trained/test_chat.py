"""A chat's turns against a server that streams as OpenAI's API does; what goes wrong is told, and takes a turn back."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.cli import run as run_cli
from nemo_rl.errors import GenerationError
from nemo_rl.launch.trained_model import find_trained_model
from nemo_rl.trained.chat_command import Chat, converse
from nemo_rl.trained.serve_command import server_command


class Server(ThreadingHTTPServer):
    """Answers with the last question backward, a character a piece; refuses "long"."""

    daemon_threads = True

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        question = body["messages"][-1]["content"]
        self.send_response(400 if question == "long" else 200)
        self.end_headers()
        if question == "long":
            self.wfile.write(json.dumps({"error": {"message": "the prompt is too long"}}).encode())
            return
        for piece in reversed(question):
            self.wfile.write(b"data: " + json.dumps({"choices": [{"delta": {"content": piece}}]}).encode() + b"\n\n")
        self.wfile.write(b'data: {"choices": []}\n\ndata: [DONE]\n\n')

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield serving
        serving.shutdown()
        thread.join()


def chat_with(server: Server) -> Chat:
    return Chat(f"http://127.0.0.1:{server.server_address[1]}/v1", "m", {"temperature": 0.5})


def test_turns_are_sent_with_all_before_them(server: Server) -> None:
    chat = chat_with(server)
    assert ["".join(chat.ask(question)) for question in ("abc", "de")] == ["cba", "ed"]
    sent = server.bodies[1]
    assert (sent["model"], sent["temperature"], sent["stream"]) == ("m", 0.5, True)
    assert [(m["role"], m["content"]) for m in sent["messages"]] == [
        ("user", "abc"),
        ("assistant", "cba"),
        ("user", "de"),
    ]


def test_a_stopped_answer_counts_as_far_as_it_came(server: Server) -> None:
    chat = chat_with(server)
    pieces = chat.ask("abc")
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert chat.messages[-1] == {"role": "assistant", "content": "c"}


def test_a_refused_question_is_taken_back(server: Server) -> None:
    chat = chat_with(server)
    with pytest.raises(GenerationError, match=r"refused the question \(400\): the prompt is too long"):
        list(chat.ask("long"))
    server.shutdown()
    server.server_close()
    with pytest.raises(GenerationError, match="does not answer"):
        list(chat.ask("abc"))
    assert chat.messages == []


def test_lines_of_standard_input(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", StringIO("abc\n\n/system be brief\nde\n/reset\nlong\n/what\n/quit\nnever\n"))
    converse(chat_with(server), is_terminal=False)
    shown = capsys.readouterr().out
    assert shown.startswith("cba\ned\nthe server refused the question (400): the prompt is too long\n/reset begins")
    assert [len(body["messages"]) for body in server.bodies] == [1, 2, 2]  # the system message stays


@pytest.mark.parametrize("words", [["--temperature", "-1"], ["--max-tokens", "0"], ["--step", "7"]])
def test_wrong_options_are_bad_input_before_a_server_starts(run: Path, words: list[str]) -> None:
    assert run_cli(["chat", str(run), *words]) == 2


def test_options_of_vllm_come_last_and_so_win(run: Path) -> None:
    command = server_command(find_trained_model(run), host="h", port=1, options=["--max-model-len", "32"])
    assert command[command.index("--model") + 1].endswith("step_6/policy/weights")
    assert command[command.index("--max-model-len") + 1] == "64"
    assert command[-2:] == ["--max-model-len", "32"]


@pytest.mark.parametrize("port", ["0", "65536", "-1"])
def test_a_port_that_does_not_exist_is_bad_input(run: Path, port: str) -> None:
    assert run_cli(["serve", str(run), "--port", port]) == 2


# Serves /health on the port that it is given, as vLLM does, and starts a process that would outlive it.
SERVER = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open(sys.argv[2], "a").write(f"{child.pid}\\n")

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
# Opens a chat's server, tells so, and waits.
CHAT = """
import os, sys, time
from nemo_rl.trained import chat_command

program, pids = sys.argv[1:]
chat_command.server_command = lambda trained, host, port: [sys.executable, "-c", program, str(port), pids]
chat_command.server_environment = lambda trained: dict(os.environ)
with chat_command.serving(None):
    print("up", flush=True)
    sys.stdin.readline()
"""


def test_the_server_and_its_processes_end_with_a_chat_that_is_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    words = [sys.executable, "-c", CHAT, SERVER, str(pids)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as chat:
        assert chat.stdout is not None
        assert chat.stdout.readline() == b"up\n"
        (child,) = map(int, pids.read_text().split())
        assert Path(f"/proc/{child}").exists()
        chat.kill()
    deadline = time.monotonic() + 60
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(child)


def is_running(pid: int) -> bool:
    """Return whether the process exists and is not waiting to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
