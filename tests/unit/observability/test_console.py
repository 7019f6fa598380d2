"""Log records and the progress display of one console, and the run's directory."""

import io
import logging
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pydantic import ValidationError
from rich.console import Console

from nemo_rl.config.shared_sections import LoggerConfig
from nemo_rl.observability.console import (
    HANDLER_NAME,
    NOISY_LIBRARIES,
    CollectionProgress,
    LiveCollectionProgress,
    LiveProgress,
    Progress,
    configure_logging,
    escape_control_chars,
    format_duration,
    format_number,
    format_step_seconds,
    make_collection_progress,
    make_progress,
    make_run_directory,
    make_sample_table,
    render_table,
)
from nemo_rl.types import Failure, FailureClass, Prompt, StopReason, Trajectory


@pytest.fixture(autouse=True)
def restored_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    levels = {name: logging.getLogger(name).level for name in ("nemo_rl", *NOISY_LIBRARIES)}
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    yield
    logging.captureWarnings(False)
    root.setLevel(level)
    root.handlers[:] = handlers
    for name, library_level in levels.items():
        logging.getLogger(name).setLevel(library_level)


def test_records_outside_a_terminal_are_plain_lines() -> None:
    out = io.StringIO()
    configure_logging("INFO", Console(file=out))
    logging.getLogger("nemo_rl.test").info("step %d [bold]x[/bold] %s", 1, "long " * 60)
    logging.getLogger("nemo_rl.test").debug("hidden")
    [line] = out.getvalue().splitlines()
    assert "INFO test: step 1 [bold]x[/bold] long long" in line


@pytest.mark.parametrize("is_terminal", [True, False])
def test_text_of_a_model_or_a_client_moves_no_cursor(is_terminal: bool) -> None:
    out = io.StringIO()
    configure_logging("INFO", Console(file=out, force_terminal=is_terminal, color_system=None, width=200))
    logging.getLogger("nemo_rl.test").warning("it says %s", "\x1b[2J\x1b]0;owned\x07\r\x9b31m")
    assert "it says \\x1b[2J\\x1b]0;owned\\x07\\x0d\\x9b31m" in out.getvalue()
    assert not set("\x1b\x07\r\x9b") & set(out.getvalue())


def test_records_on_a_terminal_go_through_its_console() -> None:
    out = io.StringIO()
    configure_logging("INFO", Console(file=out, force_terminal=True, color_system=None, width=80))
    logging.getLogger("nemo_rl.test").warning("careful [red]x[/red]")
    assert "WARNING  careful [red]x[/red]" in out.getvalue()


def test_a_second_call_replaces_the_first() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure_logging("INFO", Console(file=first))
    configure_logging("INFO", Console(file=second))
    logging.getLogger("nemo_rl.test").info("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1
    assert [h.name for h in logging.getLogger().handlers].count(HANDLER_NAME) == 1


def test_libraries_are_quiet_below_warnings() -> None:
    out = io.StringIO()
    configure_logging("DEBUG", Console(file=out))
    logging.getLogger("httpx._client").info("request")
    logging.getLogger("httpx._client").warning("trouble")
    assert "request" not in out.getvalue()
    assert "trouble" in out.getvalue()


def test_python_warnings_are_log_records() -> None:
    out = io.StringIO()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        configure_logging("INFO", Console(file=out))
        warnings.warn("an old name", UserWarning, stacklevel=1)
        logging.captureWarnings(False)
    assert "an old name" in out.getvalue()


@pytest.mark.parametrize(("level", "shown"), [("DEBUG", True), ("INFO", True), ("WARNING", False)])
def test_logger_level_of_the_configuration_is_that_of_nemo_rls_records(level: str, shown: bool) -> None:
    out = io.StringIO()
    configure_logging(LoggerConfig.model_validate({"level": level}).level, Console(file=out))
    logging.getLogger("nemo_rl.test").info("a step")
    assert ("a step" in out.getvalue()) is shown


def test_unknown_logger_level_is_refused() -> None:
    with pytest.raises(ValidationError, match="level"):
        LoggerConfig.model_validate({"level": "LOUD"})


def test_runs_are_numbered_after_the_last(tmp_path: Path) -> None:
    log_dir = tmp_path / "runs"
    assert make_run_directory(log_dir) == log_dir / "exp_001"
    assert make_run_directory(str(log_dir)) == log_dir / "exp_002"
    (log_dir / "exp_041").mkdir()
    (log_dir / "exp_notes").mkdir()
    assert make_run_directory(log_dir).name == "exp_042"


def test_a_number_taken_by_a_file_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "exp_001").write_text("")
    assert make_run_directory(tmp_path).name == "exp_002"


def test_numbers_go_past_999(tmp_path: Path) -> None:
    (tmp_path / "exp_999").mkdir()
    assert make_run_directory(tmp_path).name == "exp_1000"
    assert make_run_directory(tmp_path).name == "exp_1001"


def test_runs_that_start_together_get_one_each(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: make_run_directory(tmp_path), range(32)))
    assert len(set(made)) == 32


METRICS = {"reward": 0.5, "loss": 0.125, "tokens_per_sec": 12345.0}
SECONDS = {"total_step_time": 2.0, "generation": 1.0, "policy_training": 0.5}
COLUMNS = ("prompt", "reward")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, color_system=None, width=100, height=30)


def output(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_step_is_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    progress = Progress(clock=clock)
    with caplog.at_level(logging.INFO):
        progress.start(step=0, total=40)
        for step in (1, 2):
            clock.now += 2.0
            progress.step(step, metrics=METRICS, seconds=SECONDS)
    assert caplog.messages[-1] == ("step 2/40 | reward 0.5  loss 0.125 | 2 s, 12,300 tok/s, ETA 1:16")


def test_log_line_of_a_long_run_has_less_than_120_characters() -> None:
    out = io.StringIO()
    configure_logging("INFO", Console(file=out))
    progress = Progress()
    progress.start(step=99_998, total=100_000)
    names = ("reward", "loss", "grad_norm", "mean_gen_tokens_per_sample", "truncation_rate")
    metrics = dict.fromkeys(names, -1.23456789e-15) | {"tokens_per_sec": 123_456_789.0}
    progress.step(99_999, metrics=metrics, seconds={"total_step_time": 12_345.678})
    measured = {f"set_{i}/accuracy": 1 / 3 for i in range(20)}
    progress.validation(99_999, metrics=measured, columns=(), rows=())
    lines = out.getvalue().splitlines()
    assert len(lines) == 3
    assert max(map(len, lines)) < 120
    assert "step 99999/100000 | reward -1.23e-15  tokens -1.23e-15" in lines[1]
    assert "| set_0/accuracy 0.333  set_1/accuracy 0.333" in lines[2]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.59341, "0.593"),
        (12_345.0, "12,300"),
        (999_950.0, "1,000,000"),
        (1.5e-7, "1.5e-07"),
        (12_345_678.0, "1.23e+07"),
        (-1234.5, "-1,230"),
        (0.0, "0"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
    ],
)
def test_numbers_have_three_significant_digits(value: float, text: str) -> None:
    assert format_number(value) == text


def test_logger_of_a_library_is_named_by_its_package() -> None:
    out = io.StringIO()
    configure_logging("INFO", Console(file=out))
    logging.getLogger("library.models.own").warning("old")
    assert " WARNING library: old" in out.getvalue()


def test_time_left_counts_from_where_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    clock.now = 1000.0
    progress = Progress(clock=clock)
    with caplog.at_level(logging.INFO):
        progress.start(step=30, total=40)
        clock.now += 10.0
        progress.step(31, metrics=METRICS, seconds=SECONDS)
    assert caplog.messages[0] == "resuming after step 30/40"
    assert caplog.messages[-1].endswith("ETA 1:30")


def test_long_steps_show_their_rollouts_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    progress = Progress(rollouts_per_step=64, clock=clock)
    progress.start(step=4, total=10)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        for _ in range(9):
            clock.now += 10.0
            progress.rollout(object())
        progress.step(5, metrics={}, seconds={})
        progress.rollout(object())
    assert caplog.messages[:3] == [f"step 5: {done} of 64 rollouts" for done in (3, 6, 9)]
    assert len(caplog.messages) == 4


def test_validation_shows_its_rollouts(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        Progress().validation(3, metrics={"accuracy": 0.25}, columns=COLUMNS, rows=[("[b]spell cat[/b]", "1.000")])
    assert caplog.messages[0] == "validation after step 3 | accuracy 0.25"
    assert "[b]spell cat[/b]" in caplog.messages[1]


def test_total_may_be_unknown(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        progress = Progress()
        progress.start(step=0, total=None)
        progress.step(1, metrics={}, seconds={"generation": 1.0})
    assert caplog.messages == ["step 1 | 1 s, ETA unknown"]


def test_panel_shows_the_step_and_stays_below_what_is_printed() -> None:
    console = terminal()
    progress = LiveProgress(console, rollouts_per_step=8)
    progress.start(step=0, total=4)
    progress.rollout(object())
    progress.step(1, metrics=METRICS, seconds=SECONDS)
    progress.validation(1, metrics={"accuracy": 0.25}, columns=COLUMNS, rows=[("[b]cat[/b]", "1.000")])
    progress.close()
    shown = output(console)
    for part in ("steps", "1/4", "0/8", "reward 0.5  loss 0.125", "accuracy 0.25 (after step 1)", "[b]cat[/b]"):
        assert part in shown
    assert shown.rstrip().endswith("\x1b[2K")  # the panel is wiped


def test_panel_is_for_terminals_and_may_be_switched_off() -> None:
    assert isinstance(make_progress(LoggerConfig(), terminal()), LiveProgress)
    assert type(make_progress(LoggerConfig(progress=False), terminal())) is Progress
    assert type(make_progress(LoggerConfig(), Console(file=io.StringIO()))) is Progress


def test_closing_without_a_start_is_harmless() -> None:
    LiveProgress(terminal()).close()


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (75, "1:15"), (3675, "1:01:15")])
def test_clock(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_seconds_without_phases() -> None:
    assert format_step_seconds({"total_step_time": 1.5}) == "1.5 s"


PROMPT = Prompt("p", "task", ())


def rollout(reward: float | None) -> Trajectory:
    if reward is None:
        return Trajectory(PROMPT, "g", 0, (), StopReason.FAILED, failure=Failure(FailureClass.INFRA, "made to fail"))
    return Trajectory(PROMPT, "g", 0, (), StopReason.DONE, rewards={"r": reward})


def rate(progress: CollectionProgress) -> float:
    return float(progress.line().split(" | ")[1].removesuffix("/s"))


def test_rate_time_left_mean_reward_and_failures_are_those_of_this_start() -> None:
    clock = Clock()
    progress = CollectionProgress(total=100, num_finished=40, clock=clock)
    clock.now = 50.0  # an engine has started
    progress.start()
    clock.now = 60.0
    for reward in (1.0, 0.0, None, 1.0, 1.0, 0.0):
        progress.rollout(rollout(reward))
    assert (progress.num_finished, progress.num_new, progress.num_failures) == (45, 5, 1)
    assert progress.line() == "45% | 0.5/s | ETA 1:50 | reward 0.600 | 1 failed attempts"
    assert progress.seconds == 10.0


def test_the_rate_forgets_what_lies_far_back() -> None:
    clock = Clock()
    progress = CollectionProgress(total=10_000, num_finished=0, clock=clock)
    for second in range(1, 31):  # 10 a second
        clock.now = float(second)
        for _ in range(10):
            progress.rollout(rollout(1.0))
    assert rate(progress) == pytest.approx(10, abs=0.5)
    for second in range(31, 92):  # 1 a second
        clock.now = float(second)
        progress.rollout(rollout(1.0))
        progress.line()
    assert rate(progress) == pytest.approx(1, abs=0.1)


def test_where_there_is_no_terminal_a_line_says_so_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    progress = CollectionProgress(total=4, num_finished=0, clock=clock)
    with caplog.at_level(logging.INFO):
        for now in (1.0, 9.0, 10.0, 11.0):
            clock.now = now
            progress.rollout(rollout(1.0))
    assert caplog.messages == ["3/4 rollouts, 75% | 0.3/s | ETA 0:03 | reward 1.000"]


def test_nothing_is_divided_by_zero() -> None:
    progress = CollectionProgress(total=0, num_finished=0, clock=Clock())
    assert progress.line() == "0% | 0/s | ETA unknown"
    assert progress.mean_reward is None


def test_a_terminal_shows_a_bar() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    progress = make_collection_progress(console, wanted=True, total=4, num_finished=1)
    assert isinstance(progress, LiveCollectionProgress)
    progress.start()
    progress.rollout(rollout(1.0))
    progress.close()
    assert "2/4" in screen.getvalue()
    assert "reward 1.000" in screen.getvalue()
    assert not isinstance(
        make_collection_progress(Console(file=io.StringIO()), wanted=True, total=4, num_finished=1),
        LiveCollectionProgress,
    )


def test_long_text_is_cut_in_its_middle() -> None:
    assert escape_control_chars("abcdefgh", 5) == "ab…gh"
    assert escape_control_chars("abcde", 5) == "abcde"


def test_control_characters_are_spelled_out() -> None:
    assert escape_control_chars("a\x1b[2Jb\x07\nc") == "a\\x1b[2Jb\\x07\nc"


def test_markup_is_shown_as_text() -> None:
    text = render_table(make_sample_table(("prompt", "[reward]"), [("[bold]hi[/bold] [/nonsense]", 0.5)], title="[x]"))
    for part in ("[bold]hi[/bold] [/nonsense]", "[reward]", "0.5", "[x]"):
        assert part in text
    assert "\x1b" not in text


def test_text_begins_on_a_line_of_its_own() -> None:
    assert render_table(make_sample_table(("a",), [("b",)])).startswith("\n")
