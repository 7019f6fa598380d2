"""Bad inputs: recipes, data, models and requests that are refused by name, never with a traceback or in silence.

Each test goes through a table of its own and tells all its failures; test_there_are_220_bad_inputs counts the rows.
Wrong values of the schema's keys are in test_bad_keys.py, bad command lines in test_bad_commands.py.
"""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.command_line import ExitCode, run_command
from nemo_rl.config import loading
from nemo_rl.config.policy import TokenizerConfig
from nemo_rl.data.rows import RowFile, read_jsonl
from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.errors import ConfigError, DataError
from nemo_rl.gateway.dialects.chat_completions import ChatRequest
from nemo_rl.gateway.request_errors import RequestError
from nemo_rl.gateway.session_api import RewardRequest
from nemo_rl.launch.recipe_commands import GRPO_JOB
from nemo_rl.launch.resolved_run import check_stop_tokens, load_prompts
from nemo_rl.observability.console import check_writable
from nemo_rl.policy.hf_model import load_config as load_model_config
from nemo_rl.policy.hf_model import load_model
from tests.templates import byte_tokenizer
from tests.unit.config.conftest import SMALLEST
from tests.unit.policy.tiny import saved_model


def refusal_of(use: Callable[[], object], *, error: type[Exception] | tuple[type[Exception], ...]) -> str:
    """Return the text of the expected error, else what happened instead in capitals."""
    try:
        use()
    except error as found:
        return str(found)
    except BaseException as found:
        return f"CRASH {type(found).__name__}: {found}"
    return "ACCEPTED"


def missing_parts(text: str, *parts: str) -> list[str]:
    return [part for part in parts if part not in text] if not text.startswith(("CRASH", "ACCEPTED")) else [text]


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
)
YAML_CASES: dict[str, tuple[bytes, str]] = {
    "aliases of aliases": (BOMB.encode(), "recipe.yaml:6': is no recipe"),
    "brackets without end": (b"a: " + b"[" * 100_000, "is no recipe"),
    "mappings in mappings": (b"\n".join(b" " * i + b"a:" for i in range(200)), "recipe.yaml:64': is no recipe"),
    "a number of 5,000 digits": (b"grpo:\n  seed: " + b"9" * 5000, "recipe.yaml:2': a number of 5000 digits"),
    "ten megabytes": (b"a: " + b"x" * (11 * 2**20), "is no recipe"),
    "torn": (b"grpo: {num_prompts_per_step: 4", "malformed YAML"),
    "a tab": (b"grpo:\n\tseed: 1", "recipe.yaml:2': malformed YAML"),
    "an anchor in itself": (b"grpo: &a\n  seed: 1\n  b: *a", "recipe.yaml:3': the anchor &a contains itself"),
    "a list in itself": (b"a: &a [*a]", "recipe.yaml:1': the anchor &a contains itself"),
    "a number that is 0": (b"grpo: {val_top_p: 1e-400}", "recipe.yaml:1': malformed YAML: the number 1e-400 is 0.0"),
    "a number that is infinite": (b"a:\n  b: 1.5e999", "recipe.yaml:2': malformed YAML: the number 1.5e999 is inf"),
    "an unknown anchor": (b"grpo:\n  seed: *one", "recipe.yaml:2': malformed YAML"),
    "Python objects": (b"a: !!python/object/apply:os.system [echo]", "recipe.yaml:1': malformed YAML"),
    "a key twice": (b"grpo: {}\ngrpo: {}", "recipe.yaml:2': malformed YAML"),
    "another encoding": ("grpo: {seed: 1} # \xe9".encode("latin-1"), "cannot be read"),
    "UTF-16": ("grpo: {}".encode("utf-16"), "cannot be read"),
    "a null character": (b"grpo: \x00", "cannot be read"),
    "a list": (b"- grpo", "must be a mapping"),
    "a text": (b"grpo", "policy"),
    "an open interpolation": (b"grpo: {seed: '${a'}", "recipe.yaml"),
    "two documents": (b"grpo: {}\n---\ngrpo: {}", "recipe.yaml"),
    "defaults of itself": (b"defaults: recipe.yaml", "recipes include each other"),
    "defaults that are missing": (b"defaults: none.yaml", "no such file"),
    "defaults of a number": (b"defaults: 7", "must be a file name"),
}


@pytest.mark.timeout(300)
def test_recipes_that_are_no_yaml_of_ours_are_named_with_their_line(tmp_path: Path) -> None:
    path, failures = tmp_path / "recipe.yaml", []
    for name, (content, said) in YAML_CASES.items():
        path.write_bytes(content)
        if missing := missing_parts(refusal_of(lambda: loading.load_config(path), error=ConfigError), said):
            failures.append((name, missing))
    assert not failures, "\n".join(map(str, failures))


OVERRIDES: dict[str, str] = {
    "grpo.no_such_key=1": "grpo.no_such_key",
    "no_such_section.a=1": "no_such_section",
    "grpo.seed": "grpo.seed",
    "=1": "=1",
    "grpo.seed=[1": "grpo.seed=[1",
    "++grpo.seed=": "grpo.seed",
    "grpo.seed=1,2": "grpo.seed",
    "~grpo.none": "grpo.none",
    "grpo=7": "grpo",
    "grpo.seed.a=1": "grpo.seed",
    f"grpo.seed={2**63}": "grpo.seed",
    f"++grpo.seed={'9' * 5000}": "grpo.seed",
    "++policy.optimizer.kwargs.lr=inf": "policy.optimizer.kwargs.lr",
    "++grpo.max_num_steps=-1": "grpo.max_num_steps",
    "++env.math.scorers=[none]": "env.math.scorers",
    "++loss_fn.type=no_such_loss": "loss_fn.type",
    "++policy.optimizer.kwargs.lr=1e-400": "policy.optimizer.kwargs.lr = '1e-400'",
    "++loss_fn.ratio_clip_max=0.1": "loss_fn.ratio_clip_max = 0.1: must be at least loss_fn.ratio_clip_min",
    "data.train.repeat=1000000000": "data.train.repeat",
    "gateway.port=65536": "gateway.port",
    "gateway.num_servers=1000000": "gateway.num_servers",
}


def test_overrides_that_cannot_be_applied_are_named(tmp_path: Path) -> None:
    path, failures = tmp_path / "recipe.yaml", []
    path.write_text(SMALLEST)
    for override, said in OVERRIDES.items():
        use = partial(loading.load_config, path, [override])
        if missing := missing_parts(refusal_of(use, error=ConfigError), said):
            failures.append((override[:60], [each[:300] for each in missing]))
    assert not failures, "\n".join(map(str, failures))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "grpo: {max_num_steps: '${rollout.max_retries}'}\nrollout: {max_retries: many}",
            "rollout.max_retries = 'many'",
        ),
        ("rollout: {max_retries: '${grpo.seed}'}\ngrpo: {seed: -5}", "grpo.seed = -5: .*read by rollout.max_retries"),
        ("rollout: {max_retries: '${mul:${grpo.seed},-1}'}\ngrpo: {seed: 5}", "rollout.max_retries = -5: .*mul:"),
    ],
)
def test_a_wrong_value_that_spreads_by_interpolation_is_named_at_its_source(
    tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(SMALLEST)
    (tmp_path / "top.yaml").write_text(f"defaults: recipe.yaml\n{text}")
    with pytest.raises(ConfigError, match=said):
        loading.load_config(tmp_path / "top.yaml")


GOOD_ROW = b'{"a": 1}\n'
ROW_CASES: dict[str, tuple[bytes, str]] = {
    "deep lists": (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    "deep objects": (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, "nested too deeply"),
    "a number of 5,000 digits": (b'{"a": ' + b"9" * 5000 + b"}", "number is too long"),
    "a torn line": (b'{"a": "b', "no valid JSON"),
    "two objects": (b'{"a": 1} {"a": 2}', "no valid JSON"),
    "a list": (b"[1]", "a JSON object was expected, not list"),
    "a text": (b'"a"', "a JSON object was expected, not str"),
    "null": (b"null", "a JSON object was expected, not NoneType"),
    "single quotes": (b"{'a': 1}", "no valid JSON"),
    "a comma too many": (b'{"a": 1,}', "no valid JSON"),
    "a bare word": (b'{"a": yes}', "no valid JSON"),
    "a control character": (b'{"a": "\x01"}', "no valid JSON"),
    "latin-1": ('{"a": "é"}'.encode("latin-1"), "is not UTF-8 text"),
    "UTF-16": ('{"a": 1}'.encode("utf-16-le"), "no valid JSON"),
    "UTF-16 with a mark": ('{"a": 1}'.encode("utf-16"), "is not UTF-8 text"),
    "a mark of UTF-8": (b'\xef\xbb\xbf{"a": 1}', "no valid JSON"),
    "a cut character": (b'{"a": "\xe2\x82"}', "is not UTF-8 text"),
    "gzip": (b"\x1f\x8b\x08\x00abc", "is not UTF-8 text"),
    "a null character": (b"\x00", "no valid JSON"),
    "CSV": (b"a,b,c", "no valid JSON"),
}


@pytest.mark.parametrize("read", ["in order", "by index"])
def test_rows_that_are_no_json_objects_are_named_with_their_line(tmp_path: Path, read: str) -> None:
    path, failures = tmp_path / "rows.jsonl", []
    for name, (line, said) in ROW_CASES.items():
        path.write_bytes(GOOD_ROW * 2 + line)
        use = (lambda: list(read_jsonl(path))) if read == "in order" else (lambda: list(RowFile(path).rows()))
        if missing := missing_parts(refusal_of(use, error=DataError), "rows.jsonl:3", said):
            failures.append((name, missing))
    assert not failures, "\n".join(map(str, failures))


ASKED = {"role": "user", "content": "2 + 2"}
PAIR = {"input": "2 + 2", "output": "4"}
CHAT_ROW = {"messages": [ASKED], "answer": "4"}
FIELD_CASES: list[tuple[dict[str, Any], str]] = [
    *(
        (PAIR | {"output": value}, "'output' is ")
        for value in (None, [], ["4"], {}, float("nan"), float("inf"), "", " ")
    ),
    *((PAIR | {"input": value}, "'input' is ") for value in (None, [], {}, 7, True, "", " ")),
    (PAIR | {"input": "half \ud83d"}, "half a surrogate pair, \\ud83d, at character 5"),
    ({"input": "2 + 2"}, "has no field 'output'"),
    ({"output": "4"}, "has no field 'input'"),
    *((CHAT_ROW | {"answer": value}, "'answer' is ") for value in (None, [], ["4"], float("nan"), "", " ")),
    *((CHAT_ROW | {"messages": value}, "messages") for value in (None, 7, "hi", {}, [7], [None], ["hi"], [[]], [{}])),
    *((CHAT_ROW | {"messages": [{"role": value}]}, "messages[0]") for value in (None, 7, "pirate", "")),
    *((CHAT_ROW | {"messages": [ASKED | {"content": value}]}, "messages[0].content") for value in (7, {"a": 1}, [7])),
    (CHAT_ROW | {"messages": [ASKED | {"content": "\udc00"}]}, "messages[0].content has half a surrogate pair"),
    *(
        (CHAT_ROW | {"messages": [ASKED | {"tool_calls": value}]}, "messages[0].tool_calls")
        for value in (7, "a", [7], [{}])
    ),
    *((CHAT_ROW | {"tools": value}, "tools is ") for value in (7, "add", {"a": 1}, True)),
    *(
        (CHAT_ROW | {"tools": [value]}, "tools[0] is ")
        for value in (
            7,
            None,
            "add",
            {},
            {"type": "function"},
            {"function": 7},
            {"function": {}},
            {"function": {"name": ""}},
        )
    ),
]


def test_rows_whose_fields_cannot_be_used_are_named(tmp_path: Path) -> None:
    recipe, data, failures = tmp_path / "recipe.yaml", tmp_path / "rows.jsonl", []
    recipe.write_text(SMALLEST)
    config = loading.load_config(recipe, [])
    section = config.data.train.model_copy(update={"dataset_name": "jsonl", "data_path": str(data)})  # type: ignore
    config = config.model_copy(update={"data": config.data.model_copy(update={"train": section})})
    for row, said in FIELD_CASES:
        good = PAIR if "input" in row or "output" in row else CHAT_ROW
        data.write_text(json.dumps(good) + "\n" + json.dumps(row) + "\n")
        text = refusal_of(lambda: load_prompts(config), error=DataError)
        if missing := missing_parts(text, said, "1"):
            failures.append((row, missing, text[:200]))
    assert not failures, "\n".join(map(str, failures))


def test_a_stop_token_beyond_the_vocabulary_is_named(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(SMALLEST)
    config = loading.load_config(recipe, ["policy.generation.stop_token_ids=[3,37]"])
    check_stop_tokens(config, 38)
    with pytest.raises(ConfigError, match=r"stop_token_ids = \[3, 37\]: \[37\] are no tokens .* allowed: 0 to 36"):
        check_stop_tokens(config, 37)


MODEL_DAMAGES: dict[str, tuple[str, bytes | None]] = {
    "no config": ("config.json", None),
    "an empty config": ("config.json", b""),
    "a torn config": ("config.json", b'{"model_type": "qw'),
    "a config of another kind": ("config.json", b'{"model_type": "nothing"}'),
    "a config that is a list": ("config.json", b"[]"),
    "a deep config": ("config.json", b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "a config in latin-1": ("config.json", '{"a": "é"}'.encode("latin-1")),
    "sizes that are texts": ("config.json", b'{"model_type": "qwen2", "hidden_size": "big"}'),
    "negative sizes": ("config.json", b'{"model_type": "qwen2", "hidden_size": -4}'),
    "heads that do not divide": (
        "config.json",
        b'{"model_type": "qwen2", "hidden_size": 30, "num_attention_heads": 7, "vocab_size": 37}',
    ),
    "no weights": ("model.safetensors", None),
    "empty weights": ("model.safetensors", b""),
    "weights of zeros": ("model.safetensors", bytes(4096)),
    "a header without end": ("model.safetensors", b"\xff" * 64),
    "a header that is no JSON": ("model.safetensors", (4).to_bytes(8, "little") + b"oops"),
    "weights that are a page": ("model.safetensors", b"<html>404</html>" * 10),
    "a pointer of Git LFS": ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
}
PICKLES: dict[str, bytes] = {
    "an empty pickle": b"",
    "a torn pickle": b"\x80\x02}q\x00(X\x01\x00",
    "a pickle of a call": b"cos\nsystem\n(S'echo'\ntR.",
    "zeros": bytes(4096),
    "a torn archive": b"PK\x03\x04" + bytes(200),
    "a text": b"these are no weights",
}


@pytest.mark.timeout(300)
def test_damaged_models_are_named(tmp_path: Path) -> None:
    failures = []
    damages = MODEL_DAMAGES | {name: ("pytorch_model.bin", content) for name, content in PICKLES.items()}
    for index, (name, (file, content)) in enumerate(damages.items()):
        model = saved_model("qwen2", tmp_path / str(index))
        (model / file).unlink(missing_ok=True)
        if file == "pytorch_model.bin":
            (model / "model.safetensors").unlink()
        if content is not None:
            (model / file).write_bytes(content)
        load = load_model_config if name.startswith("a config that is") else load_model
        text = refusal_of(lambda: load(str(model), {}), error=ConfigError)  # noqa: B023 - called at once
        if missing := missing_parts(text, "policy.model_name", str(model)):
            failures.append((name, [each[:300] for each in missing]))
    assert not failures, "\n".join(map(str, failures))


TOKENIZER_DAMAGES: dict[str, tuple[str, bytes]] = {
    "an empty file": ("tokenizer.json", b""),
    "a torn file": ("tokenizer.json", b'{"model": {'),
    "zeros": ("tokenizer.json", bytes(64)),
    "no model": ("tokenizer.json", b"{}"),
    "a model of no kind": ("tokenizer.json", b'{"version": "1.0", "model": {"type": "None"}}'),
    "a list": ("tokenizer.json", b"[]"),
    "latin-1": ("tokenizer.json", '{"a": "é"}'.encode("latin-1")),
    "a torn configuration": ("tokenizer_config.json", b'{"tokenizer_class": '),
    "a configuration that is a list": ("tokenizer_config.json", b"[]"),
}


@pytest.mark.timeout(300)
def test_damaged_tokenizers_are_named(tmp_path: Path) -> None:
    failures = []
    for index, (name, (file, content)) in enumerate(TOKENIZER_DAMAGES.items()):
        directory = tmp_path / str(index)
        byte_tokenizer("chatml").save_pretrained(directory)
        (directory / file).write_bytes(content)
        text = refusal_of(lambda: load_tokenizer(TokenizerConfig(), str(directory)), error=ConfigError)  # noqa: B023
        if missing := missing_parts(text, "policy.model_name", str(directory)):
            failures.append((name, [each[:300] for each in missing]))
    assert not failures, "\n".join(map(str, failures))


MESSAGE = {"role": "user", "content": "hi"}
CHAT: dict[str, Any] = {"model": "policy", "messages": [MESSAGE]}
BODIES: dict[str, bytes] = {
    "nothing": b"",
    "a text": b'"hi"',
    "a list": b"[]",
    "torn": b'{"messages": [',
    "deep": b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a number of 5,000 digits": b'{"messages": [], "seed": ' + b"9" * 5000 + b"}",
    "latin-1": '{"messages": "é"}'.encode("latin-1"),
    **{
        f"{name} = {value!r}": json.dumps(CHAT | {name: value}).encode()
        for name, values in {
            "messages": (None, 7, "hi", {}, [7], [None], [[]], ["hi"], [{}], [{"role": 7}], [{"role": "pirate"}]),
            "tools": (7, "add", [7], [{}], [{"type": "function"}], [{"type": 7}]),
            "stop": (7, [7], {"a": 1}),
            "max_tokens": ("many", 1.5, -1, 0, [1]),
            "max_completion_tokens": ("many", -1, [1]),
            "n": (0, -1, "two", [1]),
            "stream": ("maybe", [1]),
            "stream_options": (7, "yes"),
            "logprobs": ("maybe", [1]),
            "tool_choice": (7, [1]),
            "metadata": (7, "a", [1]),
        }.items()
        for value in values
    },
}
REWARDS = [
    b"",
    b"{}",
    b"[]",
    b'{"reward": "high"}',
    b'{"reward": NaN}',
    b'{"reward": 1e999}',
    b'{"rewards": {"a": "b"}}',
    b'{"rewards": [1]}',
    b'{"reward": null}',
    b'{"reward": [1]}',
    b'{"reward": 1, "rewards": {"a": 1}}',
    b'{"reward": 1, "completion_id": 7}',
]


def check_request(kind: Any, body: bytes) -> None:
    """Do with a body what the server does before it asks the engine."""
    parsed = kind.from_json(body)
    if isinstance(parsed, ChatRequest):
        assert parsed.to_call().session_id is None
    else:
        parsed.named()


def test_requests_that_say_nothing_of_ours_are_answered_with_400() -> None:
    failures = []
    bodies = [(ChatRequest, name, body) for name, body in BODIES.items()]
    for kind, name, body in [*bodies, *((RewardRequest, str(body), body) for body in REWARDS)]:
        try:
            check_request(kind, body)
        except RequestError as error:
            if error.status != 400 or not str(error):
                failures.append((name, error.status))
        except BaseException as error:
            failures.append((name, repr(error)[:300]))
        else:
            failures.append((name, "ACCEPTED"))
    assert not failures, "\n".join(map(str, failures))


PATHS = ("a_file", "a_file/below", "a_file/below/further", "x" * 300, "null\0character")


@pytest.mark.parametrize("key", ["logger.log_dir", "checkpointing.checkpoint_dir"])
def test_output_directories_that_cannot_be_made_are_refused_before_a_model_loads(
    tmp_path: Path, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a_file").write_text("")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(SMALLEST)
    for path in PATHS:
        text = refusal_of(lambda: check_writable(key, tmp_path / path), error=ConfigError)  # noqa: B023
        assert missing_parts(text, key, "allowed: a directory") == [], path
    command = GRPO_JOB.command("Train.", recipe)
    override = f"++{key}={tmp_path}/a_file"
    assert run_command(command, ["++policy.model_name=nemo_rl/quickstart", override]) == ExitCode.BAD_INPUT
    assert re.search(
        rf"ConfigError: {re.escape(key)} = .*a_file' *: .*is a file; allowed: a directory", capsys.readouterr().err
    )


def test_there_are_220_bad_inputs() -> None:
    tables = (
        YAML_CASES,
        FIELD_CASES,
        OVERRIDES,
        ROW_CASES,
        MODEL_DAMAGES,
        PICKLES,
        TOKENIZER_DAMAGES,
        BODIES,
    )
    assert sum(map(len, (*tables, REWARDS, PATHS))) >= 220
