"""Bad command lines of every command: an exit code that --help documents, one line that says what is wrong, and no
traceback, hang or start."""

import contextlib
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from nemo_rl.cli import VERBS, run
from nemo_rl.command_line import ExitCode
from nemo_rl.experience import cancellation
from nemo_rl.jobs import supervisor
from nemo_rl.launch import (
    evaluation,
    resolved_run,
    reward_model_training,
    sampled,
    supervised_training,
)
from tests.unit.viewer.rundirs import rollout, write_collection, write_run

LIMIT_S = 10.0
RECIPE_VERBS = ("grpo", "distill", "sft", "dpo", "rm", "eval", "collect")
DATA_KEYS = {verb: "data.input" if verb in ("eval", "collect") else "data.train" for verb in RECIPE_VERBS}
BEGINNINGS = (
    "ConfigError: ",
    "DataError: ",
    "UnusableRowError: ",
    "nemo-rl {verb}: error: ",
    "nemo-rl grpo: error: ",
    "[Errno ",
)

# By verb: words after it, and what the last line says. {name}: a thing in the working directory, see `directory`.
Lines = list[tuple[str, str]]
OF_A_RECIPE: Lines = [
    ("--no-such-option", "unrecognized arguments: --no-such-option"),
    ("--config", "expected one argument"),
    ("--config=", "config = ''"),
    ("--config missing.yaml", "missing.yaml"),
    ("--config directory", "'directory'"),
    ("--config fifo", "'fifo'"),
    ("--config empty", "required, but not set"),
    ("--config binary", "binary': cannot be read"),
    ("--config quickstart --config missing.yaml", "missing.yaml"),
    ("words", "not an override"),
    ("''", "not an override"),
    ("=1", "'=1'"),
    ("no_such_section.key=1", "no_such_section"),
    ("policy.no_such_key=1", "policy.no_such_key"),
    ("policy.model_name=", "policy.model_name"),
    ("policy.model_name=./missing", "policy.model_name"),
    ("policy.model_name=./file", "policy.model_name = './file'"),
    ("policy.model_name=./fifo", "policy.model_name = './fifo'"),
    ("policy.model_name=./directory", "has no config.json"),
    ("policy.tokenizer.name=./fifo", "policy.tokenizer.name = './fifo'"),
    ("++logger.log_dir=", "logger.log_dir"),
    ("++logger.log_dir=file/below", "logger.log_dir = 'file/below'"),
    ("++logger.log_dir=fifo", "logger.log_dir = 'fifo'"),
    ("++logger.level=LOUD", "logger.level"),
    ("--dry-run ++logger.log_dir=file", "logger.log_dir = 'file'"),
]
OF_A_DIRECTORY: Lines = [
    ("", "the following arguments are required"),
    ("run --no-such-option", "--no-such-option"),
    ("''", "'' is no path"),
    ("' '", "' ' is no path"),
    ("missing", "missing"),
    ("file", "file"),
    ("fifo", "fifo"),
    ("directory", "directory"),
]
OF_A_MODEL: Lines = [
    *OF_A_DIRECTORY,
    ("run", "has no checkpoint"),
    ("collection", "has no checkpoint"),
    ("run --step x", "invalid int value"),
    ("run --step 3", "has no checkpoint"),
]
LINES: dict[str, Lines] = {
    **{verb: list(OF_A_RECIPE) for verb in RECIPE_VERBS},
    "view": [
        ("missing", "'missing'"),
        ("file", "'file'"),
        ("fifo", "'fifo'"),
        ("directory", "'directory'"),
        ("--no-such-option", "--no-such-option"),
        ("run --port 65536", "65536 is no port"),
        ("run --port -1", "-1 is no port"),
        ("run --port x", "invalid int value"),
        ("run --host 0.0.0.0", "--host = '0.0.0.0'"),
        ("run --host a..b", "a..b"),
        ("run --host=", "--host"),
        ("run --export=", "'' is no path"),
        ("run --export file", "file"),
        ("run --export out --max-pages x", "invalid int value"),
        ("run --export out --max-pages 0", "--max-pages = 0"),
        ("run --group g", "--group = 'g': needs --export"),
        ("run --export out --group none", "has no such group"),
        ("run collection --export out --group g", "name the one run"),
        ("run --step 1", "--step = 1: needs --group"),
    ],
    "convert": [
        ("", "the following arguments are required"),
        ("missing -o out", "missing"),
        ("file -o out", "file"),
        ("directory -o out", "directory"),
        ("run -o out", "run"),
        ("run -o out --no-such-option", "--no-such-option"),
    ],
    "export": [
        *((f"{words} --to out" if words else "--to out", said) for words, said in OF_A_MODEL),
        ("run", "required: --to"),
        ("run --to=", "'' is no path"),
        ("run --to file/below", "--to"),
        ("run --to out --dtype int8", "invalid choice"),
        ("run --to out --public", "belongs to --push"),
        ("run --to out --push a/b/c", "organisation/name"),
        ("run --to out --policy", "expected one argument"),
    ],
    "serve": [*OF_A_MODEL, ("run --port x", "invalid int value"), ("run --host", "expected one argument")],
    "chat": [
        *OF_A_MODEL,
        ("run --temperature x", "invalid float value"),
        ("run --max-tokens x", "invalid int value"),
        ("run --system", "expected one argument"),
        ("run --policy", "expected one argument"),
    ],
    "compare": [
        *OF_A_DIRECTORY,
        ("run missing", "'missing'"),
        ("run collection", "is a collection"),
        ("run run --json=", "'' is no path"),
        ("run run --json directory", "directory"),
        ("run run --json missing/file", "missing/file"),
    ],
    "check": [
        *OF_A_DIRECTORY,
        ("collection", "is a collection"),
        ("run --replay x", "invalid int value"),
        ("run --replay -1", "-1"),
        ("missing --replay 1", "'missing'"),
    ],
    "trace": [
        *OF_A_DIRECTORY,
        ("run", "has no trace.json.gz; start it with logger.trace.enabled=true"),
        ("run --jsom", "--jsom"),
    ],
    "plan": [
        *((words, "required, but not set" if words == "file" else said) for words, said in OF_A_DIRECTORY),
        ("run", "has no trace.json.gz; start it with logger.trace.enabled=true"),
        ("run --against run", "has no trace.json.gz; start it with logger.trace.enabled=true"),
        ("quickstart", "--device = None: a recipe has no trace"),
        ("quickstart --device H1OO", "has no stated peaks; allowed: A10, A10G, A100"),
        ("quickstart --device H100 --tokens 0", "--tokens = 0: must be from 1"),
        ("run --steps 1", "must be from 2 to 10000"),
        ("run --steps x", "invalid int value"),
        ("run --sweep grpo.num_prompts_per_stop=4", "did you mean grpo.num_prompts_per_step"),
        ("run --sweep grpo.num_prompts_per_step=0", "must be a whole number from 1"),
        ("run --sweep grpo.num_prompts_per_step=99999999999", "must be a whole number from 1"),
        ("run --sweep grpo.num_prompts_per_step=4,", "must be a whole number from 1"),
        ("run --sweep grpo.async_grpo.enabled=1", "must be true or false"),
    ],
    "merge": [
        *OF_A_DIRECTORY,
        ("run", "holds no rollouts"),
        ("collection --seeds=", "seeds look like"),
        ("collection --seeds x", "seeds look like"),
        ("collection --seeds 3..1", "from a seed to one that is not smaller"),
        ("collection --seeds 0..99999999999", "at most 100000 seeds"),
        ("collection --seeds 7", "of these seeds"),
        ("collection --to-nemo-gym=", "'' is no path"),
        ("collection --to-atif directory", "exists already"),
        ("made --from-nemo-gym missing", "missing"),
        ("made --from-nemo-gym fifo", "fifo"),
        ("made --from-nemo-gym directory", "directory"),
    ],
    "profile": [
        *OF_A_DIRECTORY,
        ("collection --seeds 0,x", "seeds look like"),
        ("collection --seeds 7", "of these seeds"),
        ("collection --k=", "must be numbers"),
        ("collection --k 0", "k = 0"),
        ("collection --k 99", "k = 99"),
        ("collection --k 1.5", "must be numbers"),
        ("collection --thresholds nan", "must be numbers"),
        ("collection --thresholds a,b", "must be numbers"),
        ("collection --output file", "file"),
        ("collection --output=", "'' is no path"),
        ("collection --compare missing", "'missing'"),
        ("collection --min-reward 1", "needs --curriculum"),
        ("collection --curriculum out --min-reward nan", "nan"),
        ("collection --curriculum out --min-reward 1 --max-reward 0", "reward"),
        ("collection --curriculum out --dataset none", "none"),
        ("collection --curriculum directory --min-reward 0", "directory"),
    ],
    "run": [
        ("", "COMMAND"),
        ("--", "COMMAND"),
        ("grpo", "unrecognized arguments: grpo"),
        ("--no-such-option -- grpo", "--no-such-option"),
        ("--restarts x -- grpo", "invalid int value"),
        ("--restarts -1 -- grpo", "--restarts = -1"),
        ("--crash-loop 0 -- grpo", "--crash-loop = 0"),
        ("--backoff-s nan -- grpo", "--backoff-s = nan"),
        ("--hang-timeout-s 0 -- grpo", "--hang-timeout-s = 0"),
        ("--stop-timeout-s -1 -- grpo", "--stop-timeout-s = -1"),
        ("--directory= -- grpo", "'' is no path"),
        ("--directory file -- grpo", "file"),
        ("--directory file/below -- grpo", "file/below"),
        ("--directory fifo -- grpo", "fifo"),
        ("-- no_such_command", "COMMAND = 'no_such_command'"),
        ("-- ''", "COMMAND = ''"),
        ("-- missing.py", "COMMAND = 'missing.py'"),
        ("-- --config quickstart", "COMMAND = '--config'"),
        ("-- view run", "COMMAND = 'view'"),
    ],
    "replicas": [
        *OF_A_DIRECTORY,
        ("run", "replicas.json: not there"),
        ("run 0", "COUNT = 0"),
        ("run x", "invalid int value"),
        ("run 2 --wait x", "invalid float value"),
        ("run 2 --wait nan", "--wait = nan"),
        ("run 2 --wait -1", "--wait = -1"),
        ("run -1 --wait 1", "COUNT = -1"),
    ],
    "submit": [
        ("", "--config = None"),
        ("--no-such-option", "--no-such-option"),
        ("--config=", "config = ''"),
        ("--config missing", "'missing'"),
        ("--config fifo", "'fifo'"),
        ("--config directory", "'directory'"),
        ("--config quickstart", "grpo"),
        ("slurm.no_such_key=1 -- grpo --config quickstart", "slurm.no_such_key"),
        ("-- no_such_command", "COMMAND = 'no_such_command'"),
        ("-- ''", "COMMAND = ''"),
        ("-- rm --config rm_quickstart", "COMMAND = 'rm'"),
        ("-- grpo", "--config = None"),
        ("-- grpo --config missing", "'missing'"),
        ("-- grpo --config", "expected one argument"),
        ("--config quickstart -- grpo", "belongs to the training command"),
        ("slurm.directory=file/below -- grpo --config quickstart", "slurm.directory"),
    ],
    "init": [
        ("", "the following arguments are required"),
        ("made --no-such-option", "--no-such-option"),
        ("''", "'' is no path"),
        ("file", "directory = 'file'"),
        ("file/below", "directory = 'file/below'"),
        ("fifo", "directory = 'fifo'"),
        ("project", "has data/train.jsonl already"),
    ],
    "doctor": [
        ("--no-such-option", "--no-such-option"),
        ("--config", "expected one argument"),
    ],
    "env": [
        ("", "the following arguments are required"),
        ("play my:Env", "invalid choice"),
        ("test", "the following arguments are required"),
        ("test my:Env", "--data = None: required without --config"),
        ("test my:Env --data missing.jsonl", "module 'my' cannot be imported"),
        ("test json:loads --data missing.jsonl", "missing.jsonl"),
        ("test json:loads --data binary.parquet", "binary.parquet"),
        ("test words --config quickstart", "TARGET = 'words'"),
        ("test words --config sft_quickstart", "has no env"),
        ("test reasoning_gym --config quickstart --rows 0", "--rows = 0"),
        ("test reasoning_gym --config quickstart --rows x", "invalid int value"),
        ("test reasoning_gym --config quickstart --turns -1", "--turns = -1"),
        ("test reasoning_gym --config quickstart --model gpt", "--model = 'gpt'"),
        ("test reasoning_gym --config missing", "'missing'"),
    ],
    "config": [
        ("", "the following arguments are required"),
        ("no_such_action", "invalid choice"),
        ("list --no-such-option", "--no-such-option"),
        *((f"{action}", "needs a name") for action in ("show", "explain", "translate")),
        *(
            (f"{action} {name}", "")
            for action in ("show", "translate")
            for name in ("missing", "fifo", "directory", "empty", "binary", "''")
        ),
        ("show quickstart no_such=1", "no_such"),
        ("show quickstart words", "not an override"),
        ("explain no_such_key", "no command has such a key"),
        ("explain ''", "no command has such a key"),
        ("schema no_such_command", "no_such_command"),
        ("schema ''", "''"),
        ("list -o directory", "directory"),
        ("list -o missing/file", "missing/file"),
        ("list -o ''", "'' is no path"),
    ],
    "constraints": [
        ("words", "unrecognized arguments"),
        ("--engine", "expected one argument"),
        ("--engine none", "invalid choice"),
        ("--engine=", "invalid choice"),
    ],
    "route": [
        ("", "the following arguments are required"),
        *((member, "is no HOST:PORT") for member in ("''", "host", "host:", ":8000", "host:x", "host:0", "host:65536")),
        *((member, "is no HOST:PORT") for member in ("http://host:80", "'a b:80'", "host:80/v1", "host:-1")),
        ("host:80 --port 65536", "65536 is no port"),
        ("host:80 --port x", "invalid int value"),
        ("host:80 --host a..b", "a..b"),
        ("host:80 --address-file=", "'' is no path"),
        ("host:80 --address-file missing/file", "missing/file"),
    ],
}
# What a file system refuses ends with 1, as a full disk does.
REFUSED_BY_THE_DISK = ("--json", "--export file", "--output file", "--curriculum directory", "-o ", "--address-file m")


def start(*arguments: Any, **named: Any) -> NoReturn:
    for argument in arguments:
        if hasattr(argument, "close"):
            argument.close()  # a coroutine
    raise AssertionError("STARTED")


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a working directory with what a path may lead to, besides what is missing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(logging, "raiseExceptions", False)  # handlers of earlier commands, on closed streams
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").write_text("")
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    (tmp_path / "directory").mkdir()
    (tmp_path / "made").mkdir()
    (tmp_path / "project/data").mkdir(parents=True)
    (tmp_path / "project/data/train.jsonl").write_text("")
    os.mkfifo(tmp_path / "fifo")
    write_run(tmp_path / "run", metrics=[{"step": 1, "train/reward": 1.0}], train=[rollout(1)])
    write_collection(tmp_path / "collection", ((0, 1), (1, 1)))
    return tmp_path


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    def end(number: int, frame: object) -> NoReturn:
        raise AssertionError(f"HANGS for {seconds:g} s")

    previous = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def outcome_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[object, list[str]]:
    """Return the exit code of a command, or what it raised, and its lines on standard error."""
    capsys.readouterr()
    try:
        with deadline(LIMIT_S):
            code: object = run(words)
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        code = f"{type(error).__name__}: {error}"
    return code, capsys.readouterr().err.splitlines()


def split(text: str) -> list[str]:
    """Split a command line at blanks, but for words in single quotes, which may be empty."""
    words, quoted = [], False
    for index, part in enumerate(text.split("'")):
        quoted = index % 2 == 1
        words += [part] if quoted else part.split()
    return words


def problem_of(verb: str, text: str, said: str, capsys: pytest.CaptureFixture[str]) -> object:
    """Return what is wrong with how a command answers a bad command line; None if it is as it should be."""
    code, lines = outcome_of([verb, *split(text)], capsys)
    last = lines[-1] if lines else ""
    expected = ExitCode.FAILED if any(part in text for part in REFUSED_BY_THE_DISK) else ExitCode.BAD_INPUT
    is_one_line = last.startswith(tuple(one.format(verb=verb) for one in BEGINNINGS))
    if code not in (expected, ExitCode.BAD_INPUT) or not is_one_line or said not in last:
        return text, code, lines[-3:]
    return (text, lines) if any("Traceback" in line for line in lines) else None


@pytest.mark.timeout(300)
@pytest.mark.parametrize("verb", LINES)
def test_bad_command_lines_are_refused_in_one_line(
    verb: str, directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancellation, "run_async", start)
    monkeypatch.setattr(reward_model_training, "train_reward_model", start)
    monkeypatch.setattr(evaluation, "run_evaluation", start)
    monkeypatch.setattr(supervisor.Supervisor, "run", start)
    problems = [problem_of(verb, text, said, capsys) for text, said in LINES[verb]]
    assert not any(problems), "\n".join(str(one) for one in problems if one)


DATA: Lines = [
    ("data_path=missing", "no such file"),
    ("data_path=directory", "no such file"),
    ("data_path=fifo", "no such file"),
    ("data_path=", "data_path"),
    ("data_path=null", "data_path"),
    ("data_path=empty", "no rows"),
    ("data_path=binary", "binary:1: "),
    ("dataset_name=none", "dataset_name = 'none'"),
    ("prompt_file=fifo data_path=rows", "prompt_file"),
    ("prompt_file=directory data_path=rows", "prompt_file"),
    ("prompt_file=binary data_path=rows", "binary"),
    ("system_prompt_file=missing data_path=rows", "system_prompt_file"),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("verb", RECIPE_VERBS)
def test_bad_data_is_refused_before_a_model_loads(
    verb: str, directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in (
        (resolved_run, "resolve_policy"),
        (supervised_training, "resolve_policy"),
        (reward_model_training, "_open_model"),
        (sampled, "resolve_model"),
    ):
        monkeypatch.setattr(module, name, start)
    (directory / "rows").write_text('{"input": "2 + 2", "output": "4"}\n')
    key, problems = DATA_KEYS[verb], []
    for text, said in DATA:
        overrides = " ".join(f"++{key}.{part}" for part in text.split())
        name = "" if "dataset_name" in text else f"++{key}.dataset_name=jsonl "
        problems.append(problem_of(verb, name + overrides, said, capsys))
    assert not any(problems), "\n".join(str(one) for one in problems if one)


def test_a_home_that_cannot_be_written_is_named(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NEMO_RL_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(directory / "file"))
    monkeypatch.delenv("XDG_CACHE_HOME")
    problems = [problem_of(verb, "", "NEMO_RL_CACHE = ", capsys) for verb in ("grpo", "sft", "dpo", "eval", "collect")]
    assert not any(problems), "\n".join(str(one) for one in problems if one)
    assert outcome_of(["view", "run", "--export", "out"], capsys)[0] == ExitCode.DONE  # without a stored index


def test_every_command_is_tried_with_over_300_bad_lines() -> None:
    assert set(LINES) == set(VERBS)
    assert sum(map(len, LINES.values())) + len(DATA) * len(RECIPE_VERBS) >= 300
