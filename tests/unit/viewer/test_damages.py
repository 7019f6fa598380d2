"""Damaged rows and damaged indexes: named by file:line, and never in the way of the others."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_rl.command_line import ExitCode, run_command
from nemo_rl.errors import DataError
from nemo_rl.viewer.export import export_site
from nemo_rl.viewer.index import Query, RolloutIndex
from nemo_rl.viewer.site import Renderer, find_page
from nemo_rl.viewer.view_command import VIEW
from nemo_rl.viewer.viewer_sources import ViewerSources
from tests.unit.viewer.rundirs import rollout, write_lines, write_run


def line(**values: Any) -> bytes:
    return json.dumps(rollout(1, group="g", index=1) | values).encode()


DEEP: Any = "x"
for _ in range(900):
    DEEP = [DEEP]
ASKED = {"role": "user", "content": "hi"}
DAMAGES: dict[str, bytes] = {
    "a torn line": line()[:100],
    "no JSON": b"oops",
    "a list": b"[1]",
    "a text": b'"a"',
    "null": b"null",
    "a number": b"7",
    "invalid UTF-8": line(text="@").replace(b"question", b"\xff\xfe"),
    "zeros": bytes(64),
    "deep": b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep content": line(messages=[{"role": "user", "content": DEEP}]),
    "a number of 5,000 digits": line().replace(b'"num_tokens": 16', b'"num_tokens": ' + b"9" * 5000),
    "a huge reward": line(reward=10**400),
    "a huge step": line(step=10**30),
    "a negative huge step": line(step=-(10**30)),
    "a huge index": line(generation_index=10**30),
    "a negative index": line(generation_index=-1),
    "a reward of text": line(reward="high"),
    "a reward of true": line(reward=True),
    "a reward of a list": line(reward=[1]),
    "rewards of text": line(rewards="a"),
    "rewards of texts": line(rewards={"a": "b"}),
    "a step of text": line(step="x"),
    "a step of a list": line(step=[1]),
    "a group of a number": line(group_id=7),
    "a group of a list": line(group_id=["a"]),
    "a prompt of a list": line(prompt_id=[1]),
    "a task of a list": line(task_name=[1]),
    "an environment of a number": line(env=7),
    "a stop of a mapping": line(stop_reason={"a": 1}),
    "a failure of text": line(failure="broken"),
    "a failure of a class of a number": line(failure={"class": 7}),
    "a failure of a list": line(failure=[1]),
    "turns of text": line(num_turns="many"),
    "tokens of a fraction": line(num_generated_tokens=1.5),
    "tokens of text": line(num_tokens="x"),
    "versions of a number": line(weight_versions=7),
    "versions of null": line(weight_versions=None),
    "timings of texts": line(timings={"total_s": "long"}),
    "messages of text": line(messages="hi"),
    "messages of numbers": line(messages=[1]),
    "messages of nulls": line(messages=[None]),
    "a role of a number": line(messages=[{"role": 7, "content": "hi"}]),
    "spans of a number": line(messages=[{**ASKED, "weight_spans": 7}]),
    "calls of text": line(messages=[{**ASKED, "tool_calls": "call"}]),
    "parts of a number": line(messages=[{**ASKED, "parts": 7}]),
    "histories of a number": line(other_chains=7),
    "histories of texts": line(other_chains=["a"]),
    "a half line of two": line()[:50] + line(),
}
ODD: dict[str, bytes] = {  # shown as they are
    "a reward of NaN": line(reward=float("nan")),
    "an infinite reward": line(reward=float("inf")),
    "an answer of a huge number": line(answer=10**400),
    "lone surrogates": line(group_id="\ud83d", messages=[{"role": "user", "content": "\udc00"}]),
    "lone surrogate bytes": line().replace(b"question", b"\xed\xa0\xbd"),
    "contents of other types": line(messages=[{"role": "user", "content": [1, {"a": None}, [2]]}]),
    "calls of other types": line(messages=[{**ASKED, "tool_calls": [1, {"function": 7}]}]),
    "no messages": line(messages=None),
    "unknown fields": line(unknown=[1, {"a": "b"}]),
    "a failure of other types": line(failure={"class": "x", "cause": [1], "traceback": None}),
}


def write_damaged(directory: Path) -> ViewerSources:
    """Write a run with two good rollouts per step around the damaged and the odd ones, and open it."""
    metrics = [{"step": step, "train/reward": 0.5} for step in (1, 2)]
    run = write_run(directory / "runs" / "exp_001", metrics=metrics, train=[rollout(1, index=i) for i in (7, 8)])
    with (run / "rollouts" / "train.jsonl").open("ab") as file:
        file.writelines(each + b"\n" for each in (*DAMAGES.values(), *ODD.values()))
    write_lines(run / "rollouts" / "train.jsonl", [rollout(2, index=i) for i in (7, 8)])
    validation = run / "rollouts" / "validation.jsonl"
    write_lines(validation, [rollout(1)])
    with validation.open("ab") as file:
        file.writelines(each + b"\n" for each in (*DAMAGES.values(), *ODD.values()))
    details = {"text": ["a", "b"], "mask": "01", "policy_logprobs": [float("nan")], "engine_logprobs": [None]}
    rows = [rollout(1, index=i) | details | {"advantages": value} for i, value in ((7, [None]), (8, ["x"]), (9, 7))]
    write_lines(run / "rollouts" / "details.jsonl", rows)
    sources = ViewerSources.open([directory / "runs"], cache=directory / "cache")
    sources.get("exp_001").complete()
    return sources


def test_damaged_rows_are_named_and_the_pages_go_on(tmp_path: Path) -> None:
    source = write_damaged(tmp_path).get("exp_001")
    sources, renderer = ViewerSources((tmp_path,), None, {"exp_001": source}), Renderer()
    train = source.split("train")
    shown = ""
    for start in range(0, len(train), 50):
        shown += renderer.page(find_page(sources, f"/s/exp_001/rollouts/train?start={start}"))
    expected = {f"train.jsonl:{number}" for number in range(3, 3 + len(DAMAGES))}
    assert {where for where, _ in train.damages} == expected, train.damages
    assert train.num_damaged == len(DAMAGES)
    assert f"damaged rows: {len(DAMAGES)}, train.jsonl:3 (no valid JSON" in renderer.page(
        find_page(sources, "/s/exp_001/step/1")
    )
    assert all(f"answer {step}.{index}" in shown for step in (1, 2) for index in (7, 8))
    addresses = ["/", "/s/exp_001", "/s/exp_001/step/1", "/s/exp_001/validation", "/s/exp_001/check"]
    addresses += ["/s/exp_001/validation?prompt=g", "/s/exp_001/group/train?group=1%3Ag&step=1"]
    addresses += [f"/s/exp_001/rollout/train/{key}?color={colour}" for key in ("0.0", "0.1") for colour in "ped"]
    for address in addresses:
        assert renderer.page(find_page(sources, address)), address
    for row, number in enumerate(train.column("line").tolist()):
        address = f"/s/exp_001/rollout/train/0.{row}"
        if f"train.jsonl:{number}" in expected:
            with pytest.raises(DataError, match=rf"train\.jsonl:{number}: damaged row: "):
                find_page(sources, address)
        else:
            assert renderer.page(find_page(sources, address))


def test_an_export_goes_on_and_says_how_many_rows_are_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = write_damaged(tmp_path)
    assert export_site(sources, tmp_path / "out", max_pages=300) > 20
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    arguments = [str(tmp_path / "runs"), "--export", str(tmp_path / "again")]
    assert run_command(VIEW, arguments) == ExitCode.DONE
    out, err = capsys.readouterr()
    assert f"train: damaged rows: {len(DAMAGES)}, train.jsonl:3" in out
    assert "cannot be shown" not in err
    texts = [path.read_text() for path in (tmp_path / "again").glob("*.html")]
    assert all(any(f"answer {step}.7" in text for text in texts) for step in (1, 2))


@pytest.mark.parametrize("suffix", [".records", ".json"])
def test_a_flipped_byte_of_a_stored_index_never_gives_a_wrong_row(tmp_path: Path, suffix: str) -> None:
    rows = [rollout(step, group="ab"[step % 2], index=step, reward=step / 8) for step in range(6)]
    path = write_lines(tmp_path / "train.jsonl", rows)
    with path.open("ab") as file:
        file.write(b"oops\n")
    good = RolloutIndex(path, cache=tmp_path / "cache").complete()
    columns, damages = np.array(good.columns), good.damages
    good.close()
    (stored,) = (tmp_path / "cache").glob(f"*{suffix}")
    content = stored.read_bytes()
    for position in np.linspace(0, len(content) - 1, 60, dtype=int).tolist():
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        stored.write_bytes(damaged)
        index = RolloutIndex(path, cache=tmp_path / "cache").complete()
        assert (np.array(index.columns) == columns).all(), position
        assert index.damages == damages
        assert [index.read(row)["step"] for row in index.select(Query()).tolist()] == list(range(6)), position
        index.close()
    for cut in (0, 1, len(content) // 2):
        stored.write_bytes(content[:cut])
        index = RolloutIndex(path, cache=tmp_path / "cache").complete()
        assert (np.array(index.columns) == columns).all(), cut
        index.close()
