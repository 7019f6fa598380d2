import os
import socket
from pathlib import Path

import pytest

from nemo_rl.durable_files import hold_directory
from nemo_rl.viewer.run_summary import summarize
from nemo_rl.viewer.runs_page import runs_page
from nemo_rl.viewer.site import Renderer, find_page
from nemo_rl.viewer.viewer_sources import ViewerSource, ViewerSources
from tests.unit.viewer.rundirs import rollout, write_collection, write_record, write_run

CONFIG = """
policy: {model_name: Qwen/Qwen3-0.6B}
data: {train: [{dataset_name: gsm8k}, {data_path: own.jsonl}]}
grpo: {max_num_steps: 50}
"""


def steps(*rewards: float) -> list[dict[str, float]]:
    return [{"step": step, "train/reward": reward} for step, reward in enumerate(rewards, start=1)]


@pytest.fixture
def sources(tmp_path: Path) -> ViewerSources:
    runs = tmp_path / "runs"
    failing = write_run(runs / "exp_001", metrics=steps(0.1, 0.9), config=CONFIG)
    write_record(
        failing,
        {"started_at": 1000.0, "ended_at": 1060.0},
        {"started_at": 5000.0, "ended_at": 5030.0, "cause": "ValueError: bad"},
        name="long answers",
        tags=["ablation"],
        notes="with 4k tokens",
    )
    write_record(write_run(runs / "exp_002", metrics=steps(0.3, 0.2, 0.4)), {"state": "ended", "started_at": 3000.0})
    write_run(runs / "exp_003", train=[rollout(1, reward=0.7)])
    write_collection(runs / "words", [[1.0, 0.0]])
    opened = ViewerSources.open([runs], cache=tmp_path / "cache")
    for source in opened.by_id.values():
        source.complete()
    return opened


def ids(sources: ViewerSources, **values: str) -> list[str]:
    return [row.source.id for row in runs_page(sources, values).context["rows"]]


def test_summary_has_what_run_and_configuration_say(sources: ViewerSources) -> None:
    run = summarize(sources.get("exp_001"))
    assert (run.name, run.state, run.cause, run.tags) == ("long answers", "failed", "ValueError: bad", ("ablation",))
    assert (run.started_at, run.duration_s) == (1000.0, 90.0)
    assert (run.model, run.data, run.num_steps) == ("Qwen/Qwen3-0.6B", "gsm8k, own.jsonl", 50)


def test_run_without_a_record_runs_while_its_directory_is_held(sources: ViewerSources) -> None:
    source = sources.get("exp_003")
    assert summarize(source).state == "unknown"
    with hold_directory(source.path, key="run"):
        assert summarize(source).state == "running"


def test_start_that_nobody_ended_changes_the_version_when_its_process_dies(sources: ViewerSources) -> None:
    source = sources.get("exp_002")
    with hold_directory(source.path, key="run"):
        write_record(source.path, {"state": "running", "ended_at": None, "host": socket.gethostname()})
        source.advance()
        assert summarize(source).state == "running"
        version = source.version
    source.advance()
    assert summarize(source).state == "died"
    assert source.version == version + 1


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"text": "QWEN"}, {"exp_001"}),
        ({"text": "ablation"}, {"exp_001"}),
        ({"text": "4k tokens"}, {"exp_001"}),
        ({"state": "ended"}, {"exp_002"}),
        ({"state": "unknown", "text": "exp"}, {"exp_003"}),
        ({"text": "nowhere"}, set()),
        ({}, {"exp_001", "exp_002", "exp_003", "words"}),
    ],
)
def test_runs_are_filtered_by_text_and_state(
    sources: ViewerSources, values: dict[str, str], expected: set[str]
) -> None:
    assert set(ids(sources, **values)) == expected


@pytest.mark.parametrize(
    ("sort", "expected"),
    [
        ("reward", ["exp_002", "words", "exp_003", "exp_001"]),
        ("-step", ["exp_002", "exp_001"]),
        ("name", ["exp_002", "exp_003", "exp_001", "words"]),  # exp_001 is named "long answers"
        ("state", ["exp_002", "exp_001", "exp_003", "words"]),  # ended, failed, unknown, a collection
    ],
)
def test_runs_are_sorted(sources: ViewerSources, sort: str, expected: list[str]) -> None:
    assert ids(sources, sort=sort)[: len(expected)] == expected


def test_configuration_is_that_of_the_last_start(tmp_path: Path) -> None:
    run = write_run(tmp_path / "exp_001", metrics=steps(0.1), config=CONFIG)
    source = ViewerSource.open(run)
    assert summarize(source).num_steps == 50
    (run / "config.yaml").write_text(CONFIG.replace("50", "80"))
    os.utime(run / "config.yaml", ns=(0, 10**18))
    assert summarize(source).num_steps == 80
    (run / "config.yaml").unlink()
    assert summarize(source).num_steps == 80  # what was read before is shown


def test_start_that_died_lasted_until_the_next_one_at_most(tmp_path: Path) -> None:
    run = write_run(tmp_path / "exp_001", metrics=steps(0.1), config=CONFIG)
    write_record(
        run,
        {"state": "died", "started_at": 1000.0, "ended_at": None},
        {"state": "ended", "started_at": 5000.0, "ended_at": 5030.0},
    )
    assert summarize(ViewerSource.open(run)).duration_s == 4030.0


@pytest.mark.parametrize(
    "config",
    [
        "",
        "- a",
        "policy: 3",
        "a: [",
        "data: {train: {}}",
        "grpo: {max_num_steps: many}",
        "a: 2026-13-45",
        "a: !!bool perhaps",
        "a: 0001-01-01 00:00:00 +23:00",
        f"grpo: {{max_num_steps: 0x{'f' * 8000}}}",
        "a: &a [x, x]\nb: &b [*a, *a]\ndata: {train: {name: [*b, *b], dataset_name: {}}}",
    ],
)
def test_any_configuration_has_a_summary(tmp_path: Path, config: str) -> None:
    run = summarize(ViewerSource.open(write_run(tmp_path / "exp_001", config=config)))
    assert (run.model, run.data, run.num_steps) == ("", "", None)


def test_page_of_a_failed_run_begins_with_its_cause(sources: ViewerSources) -> None:
    page = Renderer().page(find_page(sources, "/s/exp_001"))
    assert "Failed after step 2." in page
    assert page.index("ValueError: bad") < page.index("<figure")
    assert "started 2 times" in page


@pytest.mark.parametrize(
    ("seconds", "text"), [(59.4, "59 s"), (61, "1 min 1 s"), (7980, "2 h 13 min"), (90_000, "1 d 1 h"), (None, "–")]
)
def test_durations_have_two_units(seconds: float | None, text: str) -> None:
    assert Renderer()._environment.filters["duration"](seconds) == text
