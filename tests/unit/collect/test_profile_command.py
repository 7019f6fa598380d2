"""nemo-rl profile."""

import json

import pytest

from nemo_rl import cli
from tests.unit.collect.collections import IDENTITY, collect_worked

PNG = b"\x89PNG\r\n\x1a\n"


def test_a_profile_is_a_table_json_and_a_picture(tmp_path, capsys):
    collect_worked(tmp_path / "c")
    assert cli.run(["profile", str(tmp_path / "c"), "--output", str(tmp_path / "out"), "--thresholds", "0.1,0.9"]) == 0
    text = capsys.readouterr().out
    assert "0.4583 ± 0.2917" in text
    assert "tasks at reward 0.1 or above" in text
    values = json.loads((tmp_path / "out" / "profile.json").read_text())
    assert values["datasets"][0]["thresholds"] == {"0.1": 1.0, "0.9": 0.0}
    assert values["datasets"][0]["scores"]["pass@2"]["mean"] == pytest.approx(4 / 9)
    assert len((tmp_path / "out" / "profile_tasks.jsonl").read_text().splitlines()) == 3
    assert (tmp_path / "out" / "profile.png").read_bytes().startswith(PNG)


def test_a_curriculum_is_cut(tmp_path, capsys):
    collect_worked(tmp_path)
    chosen = tmp_path / "middle.jsonl"
    assert cli.run(["profile", str(tmp_path), "--curriculum", str(chosen), "--max-reward", "0.5", "--k", "1,2"]) == 0
    assert f"{chosen}: 1 of 3 tasks\n" in capsys.readouterr().out
    assert chosen.read_text() == '{"question": "q1"}\n'


def test_two_collections_are_compared(tmp_path, capsys):
    collect_worked(tmp_path / "a")
    collect_worked(tmp_path / "b", change=0.25, identity={**IDENTITY, "model": "trained"})
    assert cli.run(["profile", str(tmp_path / "b"), "--compare", str(tmp_path / "a")]) == 0
    assert "+0.2500 ± 0.0000" in capsys.readouterr().out
    comparison = json.loads((tmp_path / "b" / "comparison.json").read_text())
    assert comparison["differences"][0]["difference"] == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--min-reward", "0.5"], "needs --curriculum"),
        (["--k", "9"], "must be from 1 to 4"),
        (["--compare", "/nowhere"], "holds no rollouts"),
    ],
)
def test_a_mistake_is_one_message(tmp_path, capsys, arguments, message):
    collect_worked(tmp_path)
    assert cli.run(["profile", str(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().err
