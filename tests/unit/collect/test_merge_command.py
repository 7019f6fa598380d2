"""nemo-rl merge."""

import pytest

from nemo_rl import cli
from nemo_rl.collect.shards import RolloutKey
from tests.unit.collect.collections import collect


def test_a_whole_collection_is_merged(tmp_path, capsys):
    collect(tmp_path)
    assert cli.run(["merge", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/rollouts.jsonl: 30 rollouts, 9 failed attempts\n"


def test_missing_rollouts_are_listed_on_stderr(tmp_path, capsys):
    collect(tmp_path, left_out=frozenset({RolloutKey(1, 2)}))
    assert cli.run(["merge", str(tmp_path)]) == 1
    assert "rollouts-rs0: 1 of 30 rollouts are missing; task/rollout 1/2\n" in capsys.readouterr().err
    assert cli.run(["merge", str(tmp_path), "--allow-partial"]) == 0
    captured = capsys.readouterr()
    assert "1 of 30 rollouts are missing" in captured.err
    assert "29 rollouts" in captured.out


def test_seeds_are_asked_for_by_range(tmp_path, capsys):
    collect(tmp_path, seed=2)
    assert cli.run(["merge", str(tmp_path), "--seeds", "0,2..3"]) == 1
    captured = capsys.readouterr()
    assert "rollouts-rs0: was not begun" in captured.err
    assert "rollouts-rs3: was not begun" in captured.err


@pytest.mark.parametrize("seeds", ["x", "3..1", "1,,2", "-1"])
def test_invalid_seeds_are_refused(tmp_path, capsys, seeds):
    with pytest.raises(SystemExit, match="2"):
        cli.run(["merge", str(tmp_path), f"--seeds={seeds}"])
    assert "--seeds" in capsys.readouterr().err


def test_a_directory_without_a_collection_is_one_message(tmp_path, capsys):
    assert cli.run(["merge", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"ConfigError: directory = {str(tmp_path)!r}: holds no rollouts\n"
