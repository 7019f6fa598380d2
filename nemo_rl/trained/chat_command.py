"""`nemo-rl chat`: a conversation with the model of a run in the terminal."""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nemo_rl.command_line import Command, ExitCode
from nemo_rl.distributed.machine import unused_port
from nemo_rl.environments.nemo_gym import supervisor
from nemo_rl.errors import ConfigError, GenerationError
from nemo_rl.launch.trained_model import TrainedModel, add_model_arguments, add_policy_argument, chosen_policy
from nemo_rl.trained.serve_command import server_command, server_environment

END_S = supervisor.INTERRUPT_GRACE_S + supervisor.KILL_TIMEOUT_S + 10.0  # time for the supervisor to end
START_S = 900.0  # time for vLLM to load the model and to compile
ANSWER_S = 600.0  # longest time without a token
LOG_TAIL = 2000  # characters of the server's log in an error
COMMANDS = "/reset begins anew, /system TEXT sets the system message, /quit ends; Ctrl-C stops an answer"


@dataclass(slots=True)
class Chat:
    """The conversation so far, with the server that continues it."""

    base_url: str  # ends in /v1
    model: str
    sampling: dict[str, float]
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, question: str) -> Iterator[str]:
        """Yield the pieces of the answer as they arrive, and append both turns; a stopped answer counts so far.

        Raises GenerationError when the server refuses or is gone: the question is taken back.
        """
        self.messages.append({"role": "user", "content": question})
        pieces: list[str] = []
        try:
            for piece in self._stream():
                pieces.append(piece)
                yield piece
        except (OSError, ValueError) as error:
            self.messages.pop()
            raise GenerationError(_describe(error)) from error
        except BaseException:
            self.messages.append({"role": "assistant", "content": "".join(pieces)})
            raise
        self.messages.append({"role": "assistant", "content": "".join(pieces)})

    def reset(self, system: str | None = None) -> None:
        """Forget the conversation; None keeps the system message."""
        kept = [message for message in self.messages if message["role"] == "system"]
        self.messages = kept if system is None else [{"role": "system", "content": system}]

    def _stream(self) -> Iterator[str]:
        body = {"model": self.model, "messages": self.messages, "stream": True, **self.sampling}
        request = urllib.request.Request(
            f"{self.base_url}/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=ANSWER_S) as reply:
            for line in reply:
                data = line.decode("utf-8", "replace").strip().removeprefix("data:").strip()
                if data and data != "[DONE]":
                    choices = json.loads(data).get("choices") or [{}]
                    yield choices[0].get("delta", {}).get("content") or ""


def _describe(error: Exception) -> str:
    """Return the server's reason for refusing a request, or the error of the connection."""
    if not isinstance(error, urllib.error.HTTPError):
        return f"the server does not answer: {error}"
    text = error.read().decode("utf-8", "replace")
    with contextlib.suppress(ValueError, AttributeError, TypeError):
        text = json.loads(text)["error"]["message"]
    return f"the server refused the question ({error.code}): {text}"


@contextlib.contextmanager
def serving(trained: TrainedModel) -> Iterator[str]:
    """Run a server of the model on this machine for the time of the block; yield its address, which ends in /v1.

    The server also ends with this process, however that ends. Raises GenerationError if it does not come up.
    """
    port = unused_port()
    command = [sys.executable, supervisor.__file__, *server_command(trained, host="127.0.0.1", port=port)]
    with TemporaryDirectory() as directory:
        log = Path(directory) / "server.log"
        with log.open("wb") as output:
            server = subprocess.Popen(
                command,
                env=server_environment(trained),
                stdin=subprocess.PIPE,  # the supervisor ends the server when it is closed
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the chat alone
            )
        try:
            _wait_until_up(f"http://127.0.0.1:{port}/health", server, log)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            _end(server)


def _wait_until_up(url: str, server: "subprocess.Popen[bytes]", log: Path) -> None:
    ends_at = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < ends_at:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.2)
    raise GenerationError(f"vLLM's server did not start: {log.read_text(errors='replace')[-LOG_TAIL:]}")


def _end(server: "subprocess.Popen[bytes]") -> None:
    assert server.stdin is not None
    server.stdin.close()
    try:
        server.wait(END_S)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)  # its engine's processes too
        server.wait()


def converse(chat: Chat, *, is_terminal: bool) -> None:
    """Answer the lines of standard input until it ends or says /quit."""
    while (line := _read_line("> " if is_terminal else "")) is not None:
        word, _, rest = line.strip().partition(" ")
        if word == "/quit":
            return
        if word == "/reset":
            chat.reset()
        elif word == "/system":
            chat.reset(rest)
        elif word.startswith("/"):
            sys.stdout.write(f"{COMMANDS}\n")
        elif word:
            _answer(chat, line.strip())


def _answer(chat: Chat, question: str) -> None:
    try:
        for piece in chat.ask(question):
            sys.stdout.write(piece)
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stdout.write(" [stopped]")
    except GenerationError as error:
        sys.stdout.write(str(error))
    sys.stdout.write("\n")
    sys.stdout.flush()


def _read_line(prompt: str) -> str | None:
    try:
        return input(prompt)
    except EOFError:
        return None


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_policy_argument(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    parser.add_argument("--temperature", type=float, help="default: the run's; 0: the likeliest answer")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="of an answer; default: the run's max_new_tokens")


def _sampling(trained: TrainedModel, parsed: argparse.Namespace) -> dict[str, float]:
    generation: Any = trained.policy.get("generation") or {}
    chosen = {
        "temperature": generation.get("temperature", 1.0) if parsed.temperature is None else parsed.temperature,
        "top_p": generation.get("top_p", 1.0),
        "max_tokens": generation.get("max_new_tokens") if parsed.max_tokens is None else parsed.max_tokens,
    }
    for key, value, is_right in (
        ("--temperature", chosen["temperature"], chosen["temperature"] >= 0),
        ("--max-tokens", chosen["max_tokens"], chosen["max_tokens"] is None or chosen["max_tokens"] > 0),
    ):
        if not is_right:
            raise ConfigError(key, value, "allowed: at least 0" if key == "--temperature" else "allowed: at least 1")
    return {key: value for key, value in chosen.items() if value is not None}


def _chat(parsed: argparse.Namespace) -> ExitCode:
    trained = chosen_policy(parsed)
    sampling = _sampling(trained, parsed)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - lines can be edited and recalled
    for number in (signal.SIGTERM, signal.SIGHUP):  # a closed terminal: the server ends too
        signal.signal(number, signal.default_int_handler)
    sys.stderr.write(f"{trained.checkpoint.path}: starting vLLM's server ...\n")
    with serving(trained) as base_url:
        chat = Chat(base_url, trained.name, sampling)
        if parsed.system:
            chat.reset(parsed.system)
        sys.stderr.write(f"{COMMANDS}\n" if is_terminal else "")
        converse(chat, is_terminal=is_terminal)
    return ExitCode.DONE


CHAT = Command(
    "Talk to the model of a run in the terminal, or have it answer the lines of standard input.",
    _add_arguments,
    _chat,
    program="nemo-rl chat",
    reported_errors=(OSError,),
)
