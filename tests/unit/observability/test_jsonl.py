import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_rl.observability.loggers import JsonlLogger


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def scalar(value: float) -> Any:
    """A number as numpy's reductions give it."""
    return np.float32(value)


def test_each_call_is_a_line_that_is_readable_at_once(tmp_path: Path) -> None:
    logger = JsonlLogger(tmp_path)
    logger.log_metrics({"train/loss": 0.5, "train/total_num_tokens": 3}, 1)
    logger.log_metrics({"validation/accuracy": scalar(0.25)}, 1)
    assert lines(tmp_path / "metrics.jsonl") == [
        {"step": 1, "train/loss": 0.5, "train/total_num_tokens": 3},
        {"step": 1, "validation/accuracy": 0.25},
    ]
    logger.close()


def test_a_run_that_goes_on_appends(tmp_path: Path) -> None:
    for step in (1, 2):
        logger = JsonlLogger(tmp_path)
        logger.log_metrics({}, step)
        logger.close()
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 2}]


def test_numbers_that_json_lacks_are_strings_that_float_reads(tmp_path: Path) -> None:
    logger = JsonlLogger(tmp_path)
    logger.log_metrics({"nan": math.nan, "up": math.inf, "down": scalar(-math.inf)}, 1)
    logger.close()
    [line] = lines(tmp_path / "metrics.jsonl")
    assert line == {"step": 1, "nan": "NaN", "up": "Infinity", "down": "-Infinity"}
    assert [float(str(line[name])) for name in ("up", "down")] == [math.inf, -math.inf]
    assert math.isnan(float(str(line["nan"])))


def test_tables_are_files_with_one_object_a_row(tmp_path: Path) -> None:
    logger = JsonlLogger(tmp_path)
    logger.log_table(
        "validation/samples", ("prompt", "reward", "note"), [("Grüße\n", 1.0, None), ("\ud800", 0, Path("x"))], 7
    )
    logger.close()
    [first, second] = lines(tmp_path / "tables" / "validation_samples_step7.jsonl")
    assert first == {"prompt": "Grüße\n", "reward": 1.0, "note": None}
    assert (second["reward"], second["note"]) == (0, "x")


def test_a_row_of_another_length_is_refused(tmp_path: Path) -> None:
    logger = JsonlLogger(tmp_path)
    with pytest.raises(ValueError, match="shorter"):
        logger.log_table("samples", ("prompt", "reward"), [("x",)], 1)
    logger.close()
