import asyncio
import html
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
from aiohttp import ClientResponse, ClientSession, ClientTimeout
from aiohttp.test_utils import TestServer

from nemo_rl.errors import ConfigError
from nemo_rl.viewer import web_app
from nemo_rl.viewer.viewer_sources import ViewerSources
from nemo_rl.viewer.web_app import Viewer
from tests.unit.viewer import hostile
from tests.unit.viewer.rundirs import failed, rollout, write_lines, write_run

TOKEN = "the-token"
ResultT = TypeVar("ResultT")
Get = Callable[..., Awaitable[ClientResponse]]


def visit(directory: Path, tour: Callable[[Get], Awaitable[ResultT]]) -> ResultT:
    """Serve a directory and return what the tour returns; `get` sends the token."""

    async def run() -> ResultT:
        sources = ViewerSources.open([directory], cache=directory.parent / "cache")
        for source in sources.by_id.values():
            source.complete()
        async with (
            TestServer(Viewer(sources, TOKEN).app) as test_server,
            ClientSession(timeout=ClientTimeout(total=60)) as session,
        ):

            async def get(path: str, *, token: bool = True, method: str = "GET", **headers: str) -> ClientResponse:
                given = {"Authorization": f"Bearer {TOKEN}"} if token else {}
                named = {name.replace("_", "-"): value for name, value in headers.items()}
                url = test_server.make_url("/").with_path("/") if path == "/" else f"{test_server.make_url('')}{path}"
                return await session.request(method, url, headers=given | named, allow_redirects=False)

            return await tour(get)

    return asyncio.run(run())


def statuses(directory: Path, *paths: str, **options: object) -> list[int]:
    async def tour(get: Get) -> list[int]:
        return [(await get(path, **options)).status for path in paths]

    return visit(directory, tour)


def text_of(directory: Path, path: str) -> str:
    async def tour(get: Get) -> str:
        answer = await get(path)
        assert answer.status == 200, await answer.text()
        return await answer.text()

    return visit(directory, tour)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    runs = tmp_path / "runs"
    metrics = [{"step": s, "train/reward": s / 10, "timing/train/total_step_time": 1.0} for s in range(1, 4)]
    train = [rollout(s, group=g, index=i, reward=float(i)) for s in (1, 2, 3) for g in "ab" for i in (0, 1)]
    train += [failed(3, group="c"), rollout(3, group="d", stop_reason="truncated", num_generated_tokens=900)]
    validation = [
        rollout(s, group=g, reward=r) for s, g, r in ((0, "v", 0.0), (0, "w", 1.0), (3, "v", 1.0), (3, "w", 1.0))
    ]
    write_run(runs / "exp_001", metrics=metrics, train=train, validation=validation)
    rows = [rollout(task_index=t, rollout_index=i, seed=0, reward=float(i == t)) for t in (0, 1) for i in (0, 1)]
    write_lines(runs / "words" / "rollouts-rs0.jsonl", rows)
    return runs


PAGES = (
    "/",
    "/s/exp_001",
    "/s/exp_001/step/3",
    "/s/exp_001/rollouts/train",
    "/s/exp_001/rollouts/train?text=answer&failure=none&sort=-reward",
    "/s/exp_001/rollout/train/0.2",
    "/s/exp_001/group/train?group=1:a&step=1",
    "/s/exp_001/validation",
    "/s/exp_001/validation?prompt=v&first=0&second=3",
    "/s/exp_001/text/train/0.2?chain=0&message=1",
    "/s/words",
    "/s/words?sort=reward",
    "/s/words/group/rollouts?task_index=1",
    "/s/words/rollouts/rollouts",
)


def test_every_page_answers_with_a_strict_policy(runs: Path) -> None:
    async def tour(get: Get) -> None:
        for path in PAGES:
            answer = await get(path)
            body = await answer.text()
            assert answer.status == 200, (path, body)
            policy = answer.headers["Content-Security-Policy"]
            assert "unsafe" not in policy
            assert "default-src 'none'" in policy
            assert not re.search(r"<script(?! src=\"/static/app\.js\" defer>)|\son\w+=|\sstyle=|javascript:", body), (
                path
            )

    visit(runs, tour)


def test_request_without_the_token_gets_401(runs: Path) -> None:
    assert statuses(runs, *PAGES, "/static/app.css", "/events?source=exp_001", "/no", token=False) == [401] * (
        len(PAGES) + 3
    )


@pytest.mark.parametrize("header", [{"Host": "evil.example"}, {"Host": "127.0.0.1.evil.example"}, {"Host": ""},
                                    {"Origin": "https://evil.example"}, {"Origin": "null"}])  # fmt: skip
def test_foreign_host_or_origin_gets_403_even_with_the_token(runs: Path, header: dict[str, str]) -> None:
    assert statuses(runs, "/", "/s/exp_001", f"/?token={TOKEN}", **header) == [403] * 3


def test_forwarded_port_is_not_foreign(runs: Path) -> None:
    assert statuses(runs, "/s/exp_001", Host="localhost:9999") == [200]


def test_token_in_the_address_becomes_a_cookie(runs: Path) -> None:
    async def tour(get: Get) -> None:
        answer = await get(f"/s/exp_001?token={TOKEN}&sort=reward", token=False)
        assert (answer.status, answer.headers["Location"]) == (303, "/s/exp_001?sort=reward")
        cookie = answer.headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        again = await get("/s/exp_001", token=False, Cookie=cookie.split(";")[0])
        assert again.status == 200
        assert (await get("/s/exp_001?token=wrong", token=False)).status == 401

    visit(runs, tour)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_only_reading_is_allowed(runs: Path, method: str) -> None:
    assert statuses(runs, "/", "/s/exp_001", method=method) == [405, 405]


@pytest.mark.parametrize(
    "path",
    [
        "/s/..%2f..%2fetc", "/s/exp_001/rollout/train/..%2f..%2fconfig.yaml", "/static/..%2fserver.py",
        "/static/../server.py", "/static/%2e%2e/server.py", "/s/exp_001/rollouts/..%2f..", "/s/exp_001/rollout/train/0",
        "/s/exp_001/rollout/train/0.99", "/s/exp_001/rollout/train/9.0", "/s/exp_001/rollout/train/-1.0", "/s/nothing",
        "/s/exp_001/step/99", "/s/exp_001/group/train?group=none", "/s/exp_001/rollout/details/0.0", "/etc/passwd",
    ],
)  # fmt: skip
def test_what_is_not_there_is_a_page_and_no_file(runs: Path, path: str) -> None:
    async def tour(get: Get) -> tuple[int, str]:
        answer = await get(path)
        return answer.status, await answer.text()

    status, body = visit(runs, tour)
    assert status == 404
    assert "Traceback" not in body
    assert "max_num_steps" not in body
    assert "import asyncio" not in body


def test_link_out_of_the_directory_is_not_followed(runs: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "secret", metrics=[{"step": 1, "train/reward": 1.0}])
    (runs / "linked").symlink_to(tmp_path / "secret", target_is_directory=True)
    assert "linked" not in text_of(runs, "/")


def test_filters_are_part_of_the_address(runs: Path) -> None:
    body = text_of(runs, "/s/exp_001/rollouts/train?failure=any")
    assert "1 rollouts" in body
    assert "ValueError: bad move" in body
    assert '<option value="any" selected>any</option>' in body
    body = text_of(runs, "/s/exp_001/rollouts/train?stop=truncated&sort=-tokens&min_tokens=500")
    assert "1 rollouts" in body
    assert "900" in body


def test_unreadable_filter_is_named(runs: Path) -> None:
    assert "min_reward = &#39;high&#39; is not a number" in text_of(runs, "/s/exp_001/rollouts/train?min_reward=high")


def test_rollout_shows_failure_with_its_traceback(runs: Path) -> None:
    body = text_of(runs, "/s/exp_001/rollout/train/0.12")
    assert "Failure: environment" in body
    assert "Traceback (most recent call last)" in body


def test_validation_page_puts_the_prompt_that_got_better_last(runs: Path) -> None:
    worse = re.findall(r"question ([vw])", text_of(runs, "/s/exp_001/validation?first=0&second=3"))
    better = re.findall(r"question ([vw])", text_of(runs, "/s/exp_001/validation?first=0&second=3&order=better"))
    assert (worse, better) == (["w", "v"], ["v", "w"])


def test_collection_page_has_pass_at_k(runs: Path) -> None:
    body = re.sub(r"<[^>]+>", " ", text_of(runs, "/s/words"))
    assert re.search(r"mean reward\s+0\.5\s+0\s+2", body)
    assert re.search(r"pass@1\s+0\.5\s+0\s+2", body)
    assert re.search(r"pass@2\s+1\s+0\s+2", body)
    assert "failed each time" not in body


def test_collection_page_counts_failed_rollouts_as_wrong_beside_their_number(runs: Path) -> None:
    """Task 0: right, wrong. 1: wrong, right. 2: failed, failed. 3: right, failed. 4: right after a failed attempt."""
    rewards = [(3, 0, 1.0), (4, 0, 1.0), (4, 1, 1.0)]
    failures = [(2, 0), (2, 0), (2, 1), (3, 1), (4, 1)]
    write_lines(
        runs / "words" / "rollouts-rs0.jsonl",
        [rollout(task_index=t, rollout_index=i, seed=0, reward=r) for t, i, r in rewards],
    )
    write_lines(
        runs / "words" / "rollouts-rs0_failures.jsonl",
        [{"task_index": t, "rollout_index": i, "seed": 0, "class": "generation", "cause": "died"} for t, i in failures],
    )
    body = re.sub(r"<[^>]+>", " ", text_of(runs, "/s/words?sort=reward"))
    assert re.search(r"mean reward\s+0\.75\s+0\.144\d*\s+4", body)  # of 0.5, 0.5, 1 and 1
    assert re.search(r"pass@1\s+0\.5\s+0\.158\d*\s+5", body)  # of 0.5, 0.5, 0, 0.5 and 1
    assert re.search(r"pass@2\s+0\.8\s+0\.2\s+5", body)  # of 1, 1, 0, 1 and 1
    assert "3 rollouts failed each time" in body
    assert re.findall(r"task (\d)\s", body) == ["2", "0", "1", "3", "4"]
    assert re.search(r"task 2\s+0\s+0\s+failed\s+failed", body)


def test_hostile_texts_are_text_everywhere(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    tricky = [t for t in hostile.TEXTS if len(t) < 10_000]
    call = [{"id": t, "name": t, "arguments": {"x": t}} for t in tricky]
    rows = [
        rollout(1, group=t, text=t, task_name=t, stop_reason=t, answer=t, rewards={t: 1.0}, dataset=t)
        for t in hostile.TEXTS
    ]
    rows += [rollout(1, group="calls", messages=[{"role": "assistant", "content": "", "tool_calls": call}])]
    rows += [failed(1, kind=t, cause=t) for t in tricky]
    write_run(
        runs / "exp_001", metrics=[{"step": 1, "train/reward": 1.0, tricky[0]: 1.0}], train=rows, config=tricky[0]
    )
    paths = ["/s/exp_001", "/s/exp_001/step/1", "/s/exp_001/rollouts/train", "/s/exp_001/rollouts/train?failure=any"]
    paths += [f"/s/exp_001/rollout/train/0.{row}" for row in range(len(rows))]

    async def tour(get: Get) -> None:
        for path in paths:
            answer = await get(path)
            body = await answer.text()
            assert answer.status == 200, path
            assert len(body) < 2_000_000, path
            assert not re.search(
                r"<(?:script(?! src=)|img|iframe|object|embed|base|style|svg onload|video|math|marquee)", body
            )
            assert not re.search(r"[\x00-\x08\x0b-\x1f\u202a-\u202e\u2066-\u2069\ufeff]", body), path
        assert (await get("/s/exp_001/rollouts/train?text=" + "%3Cscript%3E")).status == 200

    visit(runs, tour)


def test_long_text_is_a_page_away_and_whole(tmp_path: Path) -> None:
    text = "".join(f"{number:07d} " for number in range(20_000))
    write_run(tmp_path / "runs" / "exp_001", train=[rollout(1, text=text)])
    body = text_of(tmp_path / "runs", "/s/exp_001/rollout/train/0.0")
    assert "all 160,000 characters" in body
    pages = [text_of(tmp_path / "runs", f"/s/exp_001/text/train/0.0?message=1&start={s}") for s in (0, 100_000)]
    shown = "".join(html.unescape(re.findall(r"<pre[^>]*>(.*?)</pre>", page, re.DOTALL)[0]) for page in pages)
    assert shown == text


def test_page_of_a_running_step_follows_within_a_second(runs: Path) -> None:
    async def tour(get: Get) -> None:
        stream = await get("/events?source=exp_001")
        await stream.content.readuntil(b"\n\n")
        write_lines(runs / "exp_001" / "metrics.jsonl", [{"step": 4, "train/reward": 0.9}])
        message = await asyncio.wait_for(stream.content.readuntil(b"\n\n"), 30)
        assert message.startswith(b"id: ")
        stream.close()
        assert (await get("/s/exp_001/step/4")).status == 200

    visit(runs, tour)


def test_run_that_disappears_is_a_clear_message(runs: Path) -> None:
    async def tour(get: Get) -> tuple[int, str, int]:
        for path in sorted((runs / "exp_001").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        (runs / "exp_001").rmdir()
        page, row = await get("/s/exp_001"), await get("/s/exp_001/rollout/train/0.0")
        return page.status, await page.text() + await row.text(), row.status

    status, body, row_status = visit(runs, tour)
    assert (status, row_status) == (200, 404)
    assert "has disappeared" in body
    assert "cannot be read any more" in body
    assert "Traceback" not in body


def test_torn_line_and_damaged_metrics_do_not_break_a_page(runs: Path) -> None:
    with (runs / "exp_001" / "rollouts" / "train.jsonl").open("a") as file:
        file.write("{damaged\n" + json.dumps(rollout(4))[:50])
    with (runs / "exp_001" / "metrics.jsonl").open("a") as file:
        file.write('[1]\n{"step": Infinity}\n{torn')
    body = text_of(runs, "/s/exp_001")
    assert "damaged rows: 1, train.jsonl:" in body
    assert "2 damaged lines of metrics.jsonl are skipped" in body


def test_address_that_is_not_loopback_is_refused(runs: Path) -> None:
    sources = ViewerSources.open([runs], cache=runs.parent / "cache")
    with pytest.raises(ConfigError, match="must be a loopback address"):
        asyncio.run(web_app.serve(Viewer(sources), host="0.0.0.0", port=0, announce=lambda url: None))


def test_directory_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        ViewerSources.open([tmp_path])
