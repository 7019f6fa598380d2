"""`nemo-rl env test` plays environments and reward functions, and shows what each call gave."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from nemo_rl.cli import run
from nemo_rl.quickstart.models import make_model, make_tokenizer, student
from tests.unit.doctor.planted import make_project, write_recipe

MODULE = """
from nemo_rl.types import EnvStep, Message


def length(messages, metadata):
    return 0.1 * len(messages[-1]["content"])


def exact(messages, metadata):
    if metadata["answer"] == "drow":
        raise ValueError("no score for drow")
    return float(messages[-1]["content"] == metadata["answer"])


class SecondTry:
    async def step(self, conversation, state):
        right = conversation[-1].content == state["answer"]
        if right or "tried" in state:
            return EnvStep(rewards={"spelling": float(right)}, state=state)
        return EnvStep(observation=(Message("user", "Try again."),), done=False, state={**state, "tried": True})
"""


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "tried_rewards.py").write_text(MODULE)
    lines = [json.dumps({"input": f"Spell {word} backward.", "output": word[::-1]}) for word in ("abc", "word")]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    return "rows.jsonl"


def play(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = run(["env", "test", *words])
    return code, capsys.readouterr().out


def test_environment_of_several_turns_is_played_to_its_end(rows: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = play(capsys, "tried_rewards:SecondTry", "--data", rows)
    assert code == 0
    assert "--- row 0, answer 1: reward 1 (spelling 1), 1 turns" in out
    assert "--- row 0, answer 2: reward 0 (spelling 0), 2 turns" in out
    assert "    user: Try again." in out
    assert "Rollouts  6, of which 0 failed" in out
    assert "Answers   right ones earn 1, wrong ones 0" in out


def test_failed_call_is_shown_with_its_cause_and_is_the_exit_code(
    rows: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = play(capsys, "tried_rewards:exact", "--data", rows, "--quiet", "++env.tested.retries.max_retries=0")
    assert code == 1
    assert out.count("FAILED: ValueError: no score for drow") == 3
    assert "tried_rewards.py:" in out
    assert "Rollouts  6, of which 3 failed" in out
    assert "row 0" not in out  # --quiet


def test_reward_that_prefers_wrong_answers_is_warned_of(rows: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = play(capsys, "tried_rewards:length", "--data", rows, "--rows", "1")
    assert code == 0
    assert "warning: the reference answers earn no more than wrong ones" in out


def test_entry_of_a_recipe_is_played_on_the_rows_of_the_recipe(
    tmp_path: Path, rows: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path, make_project(tmp_path))
    code, out = play(capsys, "own", "--config", recipe, "--rows", "2")
    assert code == 0
    assert "Rollouts  6, of which 0 failed" in out
    code, out = play(capsys, "tried_rewards:SecondTry", "--config", recipe, "--rows", "1", "--turns", "2")
    assert "spelling 1" in out
    assert code == 0


def test_tiny_model_is_sampled(
    tmp_path: Path, rows: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def prepare(directory: Path, *rest: object) -> Path:
        tokenizer = make_tokenizer()
        make_model(tokenizer, student(0)).save_pretrained(tmp_path / "tiny")
        tokenizer.save_pretrained(tmp_path / "tiny")
        return tmp_path / "tiny"

    monkeypatch.setattr("nemo_rl.launch.models.prepare_model", prepare)
    code, out = play(capsys, "tried_rewards:SecondTry", "--data", rows, "--model", "tiny", "--turns", "2")
    assert code == 0
    assert "Rollouts  4, of which 0 failed" in out
    assert out.count("    user: Try again.") == 4  # the model is untrained, and no answer is right
    answers = [line for line in out.splitlines() if line.startswith("    assistant: ")]
    assert len(set(answers)) == len(answers) >= 4  # two generations of a prompt differ
    assert "right ones earn" not in out


class Speller(BaseHTTPRequestHandler):
    """An OpenAI-compatible server whose model spells the quoted word backward, but never "word"."""

    def do_GET(self) -> None:
        self._reply({"object": "list", "data": [{"id": "speller", "object": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        words = body["messages"][0]["content"].split()
        text = words[1][::-1] if len(words) > 1 and words[1] != "word" else "no"
        message = {"role": "assistant", "content": text}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        self._reply({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage})

    def _reply(self, body: object) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *arguments: object) -> None: ...


@pytest.fixture
def server() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Speller)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_served_model_is_asked(server: str, rows: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = play(capsys, "tried_rewards:SecondTry", "--data", rows, "--model", server)
    assert code == 0
    assert "--- row 0, answer 2: reward 1 (spelling 1), 1 turns" in out
    assert "--- row 1, answer 2: reward 0 (spelling 0), 2 turns" in out
    assert "Reward    0.5 on average, from 0 to 1" in out


def test_unknown_model_is_refused(rows: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["env", "test", "tried_rewards:SecondTry", "--data", rows, "--model", "gpt-9"]) == 2
    assert "--model = 'gpt-9': allowed: scripted, tiny, or the address of a server" in capsys.readouterr().err
