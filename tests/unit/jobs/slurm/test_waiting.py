"""Waiting for servers, against real ones: each wait ends, and says why."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.unit.jobs.slurm.shell import DEADLINE_S, bash, run_bash

LIVING = "sleep 600 & pid=$!; trap 'kill $pid' EXIT\n"
DEAD = "(exit 3) & pid=$!; wait $pid || true\n"


def waiting(directory: Path, timeout_s: float = DEADLINE_S) -> str:
    """Waits for a server whose process is `pid`, and tells what it found."""
    return (
        f"wait_for_server 'the server' $pid '{directory}/log' '{directory}/address' /health {timeout_s:g}\n"
        'echo "$server_host:$server_port"'
    )


@contextmanager
def http_server(status: Callable[[int], int]) -> Iterator[ThreadingHTTPServer]:
    """Answers the n-th request, from 0 on, with `status(n)`; its `paths` are those that were asked for."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(status(len(paths) - 1))
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.paths = paths  # pyright: ignore[reportAttributeAccessIssue]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "log").write_text("".join(f"line {i}\n" for i in range(100)) + "out of memory\n")
    return tmp_path


def publish(directory: Path, port: int) -> None:
    (directory / "partial").write_text(f"127.0.0.1 {port} more words\n")
    (directory / "partial").rename(directory / "address")


def test_a_server_that_comes_up_late_is_found(directory: Path) -> None:
    process = bash(LIVING + waiting(directory), "waiting")
    with http_server(lambda n: 200) as server:
        publish(directory, server.server_port)
        stdout, stderr = process.communicate(timeout=DEADLINE_S)
    assert stdout == f"127.0.0.1:{server.server_port}\n"
    assert "the server is up at" in stderr
    assert process.returncode == 0


def test_a_server_that_loads_is_asked_again_until_it_answers_200(directory: Path) -> None:
    with http_server(lambda n: 503 if n < 3 else 200) as server:
        publish(directory, server.server_port)
        done = run_bash(LIVING + waiting(directory), "waiting")
        assert server.paths == ["/health"] * 4  # pyright: ignore[reportAttributeAccessIssue]
    assert done.returncode == 0, done.stderr


def test_a_server_that_never_gets_ready_ends_the_wait_with_its_last_answer(directory: Path) -> None:
    with http_server(lambda n: 503) as server:
        publish(directory, server.server_port)
        done = run_bash(LIVING + waiting(directory, timeout_s=0), "waiting")
    assert done.returncode == 1
    assert done.stdout == ""
    assert f"not up after 0 s: the last answer of 127.0.0.1:{server.server_port}/health was 503" in done.stderr
    assert "    out of memory" in done.stderr


def test_nobody_at_the_address_ends_the_wait(directory: Path) -> None:
    with http_server(lambda n: 200) as server:
        publish(directory, server.server_port)
    done = run_bash(LIVING + waiting(directory, timeout_s=0), "waiting")
    assert done.returncode == 1
    assert "was none" in done.stderr


def test_a_server_that_finds_no_port_ends_the_wait(directory: Path) -> None:
    done = run_bash(LIVING + waiting(directory, timeout_s=0), "waiting")
    assert done.returncode == 1
    assert "not up after 0 s: it has not found a port yet" in done.stderr
    tail = [line.strip() for line in done.stderr.splitlines() if line.startswith("    ")]
    assert tail == [*(f"line {i}" for i in range(51, 100)), "out of memory"]


def test_one_that_takes_connections_and_says_nothing_ends_the_wait(directory: Path) -> None:
    released = threading.Event()

    def hang(n: int) -> int:
        released.wait(DEADLINE_S)
        return 200

    with http_server(hang) as server:
        publish(directory, server.server_port)
        done = run_bash("request_timeout_s=0.2\n" + LIVING + waiting(directory, timeout_s=0), "waiting")
        released.set()
    assert done.returncode == 1
    assert "was none" in done.stderr


def test_a_dead_process_ends_the_wait_at_once_with_its_log(directory: Path) -> None:
    done = run_bash(DEAD + waiting(directory), "waiting")
    assert done.returncode == 1
    assert "the server ended before it was up" in done.stderr
    assert "    out of memory" in done.stderr


def test_a_process_without_a_log_is_no_error_of_its_own(tmp_path: Path) -> None:
    done = run_bash(DEAD + waiting(tmp_path), "waiting")
    assert done.returncode == 1
    assert "the server ended before it was up" in done.stderr


@pytest.mark.parametrize("status", [0, 7])
def test_the_collections_end_is_the_jobs(status: int, directory: Path) -> None:
    done = run_bash(
        LIVING + f"(exit {status}) & main=$!\nwait_beside $main 'the server' $pid '{directory}/log'", "waiting"
    )
    assert done.returncode == status
    assert "ended while" not in done.stderr


def test_a_server_that_dies_beside_the_collection_ends_the_job_with_its_log(directory: Path) -> None:
    text = DEAD.replace("pid", "server") + "sleep 600 & main=$!; sleep 600 & router=$!\n"
    text += "trap 'kill $main $router' EXIT\n"
    text += f"wait_beside $main router $router none server $server '{directory}/log'"
    done = run_bash(text, "waiting")
    assert done.returncode == 1
    assert "server ended while it was needed" in done.stderr
    assert "    out of memory" in done.stderr
