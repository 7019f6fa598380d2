"""Names of NeMo-RL's run scripts: what they hand over is what the run reads."""

import importlib
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from torch.utils.data import IterableDataset

from nemo_rl import errors
from nemo_rl.command_line import ExitCode
from nemo_rl.compat import run_scripts, script_data, script_environments
from nemo_rl.compat.data_types import TaskDataSpec
from nemo_rl.compat.python_names import FOREIGN_NAMES
from nemo_rl.compat.run_scripts import (
    OLD_RESULTS,
    RESULTS,
    HandedOver,
    MasterConfig,
    get_tokenizer,
    grpo_train,
    load_config,
    parse_hydra_overrides,
    setup,
)
from nemo_rl.compat.script_data import (
    TRAIN,
    AllTaskProcessedDataset,
    RecipeData,
    ResponseDataset,
    open_datasets,
    read_datum,
)
from nemo_rl.compat.script_environments import BuiltIn, MathEnvironment, open_environments
from nemo_rl.compat.translation import PASS_THROUGH
from nemo_rl.config.registries import DATASETS, ENVIRONMENTS, PROCESSORS
from nemo_rl.data.prompt_sets import split_rows
from nemo_rl.errors import ConfigError
from nemo_rl.quickstart.models import make_tokenizer
from nemo_rl.recipes import find_prompt


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


def recipe() -> dict[str, Any]:
    return {
        "grpo": {"num_prompts_per_step": 2, "max_num_steps": 2},
        "policy": {"tokenizer": {"name": "m"}, "generation": {}},
        "data": {"shuffle": False, "dataset_name": "squad"},
        "checkpointing": {"metric_name": "val:accuracy"},
    }


def to_container(config: Any) -> Any:
    return OmegaConf.to_container(config, resolve=True)


def datum(text: str, **values: Any) -> dict[str, Any]:
    return {"message_log": [{"role": "user", "content": text}], "extra_env_info": {"ground_truth": "7"}, **values}


def test_every_name_is_at_its_import_path() -> None:
    for module, names_by_owner in FOREIGN_NAMES.items():
        for name in (name for names in names_by_owner.values() for name in names):
            assert getattr(importlib.import_module(module), name) is not None
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            _ = importlib.import_module(module).nothing


def test_a_configuration_has_keys_and_attributes() -> None:
    config = MasterConfig(grpo={"seed": 3, "async_grpo": {"enabled": True}}, data={"train": [{"a": 1}]})
    assert (config.grpo["seed"], config.grpo.async_grpo.enabled, config.data["train"][0].a) == (3, True, 1)
    assert not config.data_plane
    assert config.policy.get("draft", {}) == {}
    config.logger["log_dir"] = "lost"  # an absent section is empty, and not kept
    config.grpo["seed"] = 4
    config.policy = {"model_name": "m"}
    assert (config.grpo.seed, config["policy"]["model_name"], "logger" in config) == (4, "m", False)


def test_recipes_are_read_with_those_below_and_overrides(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("grpo: {seed: 1, max_num_steps: 2}\n")
    (tmp_path / "mine.yaml").write_text("defaults: base.yaml\ngrpo: {max_num_steps: '${mul:2,3}'}\n")
    config = parse_hydra_overrides(load_config(tmp_path / "mine.yaml"), ["grpo.seed=5", "++env.own.scale=2"])
    importlib.import_module("nemo_rl.utils.config").register_omegaconf_resolvers()
    assert OmegaConf.to_container(config, resolve=True) == {
        "grpo": {"seed": 5, "max_num_steps": 6},
        "env": {"own": {"scale": 2}},
    }


def test_only_nemo_rls_default_path_means_a_packaged_recipe(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    default = tmp_path / "examples" / "configs" / "grpo_math_1B.yaml"
    assert load_config(default).grpo.num_prompts_per_step == 32
    assert f"{default} is missing; using the packaged recipe grpo_math_1B" in caplog.text
    for path in (tmp_path / "configs" / "grpo_math_1B.yaml", str(tmp_path / "grpo_math_1B.yaml")):
        with pytest.raises(ConfigError, match=r"no such file.*; a packaged recipe is named grpo_math_1B"):
            load_config(path)
    default.parent.mkdir(parents=True)
    default.write_text("grpo: {num_prompts_per_step: 5}\n")
    assert load_config(default).grpo.num_prompts_per_step == 5


@pytest.mark.parametrize(
    "read",
    [
        lambda path: MasterConfig(**to_container(load_config(path))),
        lambda path: to_container(parse_hydra_overrides(load_config(path), ["grpo.seed=5"])),
        OmegaConf.load,
    ],
)
def test_values_of_the_environment_are_written_as_the_recipe_has_them(
    read: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "_interpolations", {})
    monkeypatch.setattr(run_scripts, "run_command", lambda command, arguments: ExitCode.DONE)
    monkeypatch.setenv("SCRIPT_KEY", "secret")
    path = tmp_path / "mine.yaml"
    keys = "key: '${oc.env:SCRIPT_KEY}', header: 'Bearer ${oc.env:SCRIPT_KEY}', text: 'costs \\${price}'"
    path.write_text(f"grpo: {{seed: 1}}\nlogger: {{log_dir: '{tmp_path}', {keys}}}\n")
    config, data = read(path), HandedOver("dataloader", RecipeData())
    none = HandedOver("policy")
    grpo_train(none, none, data, None, None, none, {}, None, none, none, None, config)
    written = tmp_path / run_scripts.RECIPE_FILE
    assert "secret" not in written.read_text()
    assert written.stat().st_mode & 0o777 == 0o600
    assert to_container(OmegaConf.load(written))["logger"] == {
        "log_dir": str(tmp_path), "key": "secret", "header": "Bearer secret", "text": "costs ${price}",
    }  # fmt: skip


def test_setup_returns_what_the_release_returns() -> None:
    config = MasterConfig(grpo={})
    results = setup(config, None, 1, 2)
    assert [one.name or "master_config" for one in results] == list(RESULTS)
    assert len(setup({"grpo": {}}, None, 1)) == len(OLD_RESULTS) == 10
    policy, *_ = setup(config, None, 1)
    policy.shutdown()
    with pytest.raises(AttributeError, match="the run makes its policy itself; it has no 'train'"):
        policy.train()


def test_prompts_have_the_tokens_of_the_script(tokenizer: Any) -> None:
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    for content in (rendered, "ab"):  # some processors keep the text that they rendered, others the question
        log = [{"role": "user", "content": content, "token_ids": ids}]
        prompt = read_datum({**datum(""), "message_log": log}, tokenizer, "task")  # pyright: ignore[reportArgumentType]
        assert tokenizer(prompt.messages[0].content, add_special_tokens=False)["input_ids"] == ids
    assert prompt.env_state == {"ground_truth": "7", "answer": "7"}


def test_datasets_of_a_script_become_entries(tokenizer: Any) -> None:
    written, rows = recipe(), [datum("a", task_name="one"), datum("b", task_name="two", loss_multiplier=0.0)]
    with open_datasets(written, tokenizer, rows, iter([datum("v", task_name="one")])) as tasks:
        assert tasks == {"one"}
        assert written["data"]["train"] == {"dataset_name": TRAIN, "processor": TRAIN}
        section = DATASETS.section("jsonl").model_validate(written["data"]["train"])
        (row,) = DATASETS.entry(TRAIN, key="").make(section, 0)
        assert PROCESSORS.entry(TRAIN, key="").make(row, None).messages[0].content == "a"
    assert TRAIN not in DATASETS.names
    assert written["policy"]["tokenizer"] == {"name": "m", "chat_template": PASS_THROUGH}
    with open_datasets(written := recipe(), tokenizer, rows, None):
        assert (written["data"]["validation"], written["checkpointing"]["metric_name"]) == (None, None)


def test_a_dataset_without_an_end_is_read_as_far_as_a_run_needs(tokenizer: Any) -> None:
    endless = (datum(str(index), task_name="game", stop_strings=["!"]) for index in iter(int, 1))
    written = recipe()
    with open_datasets(written, tokenizer, endless, None):
        section = DATASETS.section("jsonl").model_validate(written["data"]["train"])
        assert len(DATASETS.entry(TRAIN, key="").make(section, 0)) == 4  # 2 steps of 2 prompts
    assert written["policy"]["generation"]["stop_strings"] == ["!"]


def test_at_most_ten_thousand_prompts_are_read_at_start(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Letters(IterableDataset[Any]):
        num_read = 0

        def __iter__(self) -> Iterator[Any]:
            while True:
                self.num_read += 1
                yield datum("a", task_name="game")

    written, train, held_out = recipe(), Letters(), Letters()
    written["grpo"]["max_num_steps"] = 1_000_000
    with open_datasets(written, tokenizer, train, held_out):
        assert (train.num_read, held_out.num_read) == (10_000, 10_000)
    assert written["grpo"]["max_num_epochs"] >= 1_000_000 * 2 / 10_000  # the run ends by its steps
    assert "read the first 10000 prompts" in caplog.text
    with open_datasets(written := recipe(), tokenizer, [datum("a", task_name="game")] * 4, None):
        assert "max_num_epochs" not in written["grpo"]


def test_rows_go_through_the_processor_of_their_task(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "2+5", "truth": "7"}))
    data = ResponseDataset(str(path), input_key="question", output_key="truth")
    spec = TaskDataSpec(data.task_name)
    spec.prompt = "Solve {}"
    processors: Any = defaultdict(lambda: (spec, script_data.math_hf_data_processor))
    rows: Any = data.dataset
    dataset = AllTaskProcessedDataset(rows, tokenizer, spec, processors, max_seq_length=64)
    made: Any
    (made,) = [dataset[index] for index in range(len(dataset))]
    assert "Solve 2+5" in made["message_log"][0]["content"]
    assert (made["extra_env_info"], made["task_name"], made["loss_multiplier"]) == (
        {"ground_truth": "7"}, data.task_name, 1.0,
    )  # fmt: skip
    assert AllTaskProcessedDataset(rows, tokenizer, spec, processors, max_seq_length=3)[0]["loss_multiplier"] == 0.0


def test_a_response_dataset_splits_and_has_its_prompts(tmp_path: Path) -> None:
    path, prompt = tmp_path / "rows.jsonl", tmp_path / "prompt.txt"
    path.write_text("".join(json.dumps({"input": str(index), "output": "7"}) + "\n" for index in range(40)))
    prompt.write_text("Solve {}")
    section = {"dataset_name": "ResponseDataset", "data_path": str(path), "env_name": "math", "subset": None}
    files = {"prompt_file": "examples/prompts/cot.txt", "system_prompt_file": str(prompt)}
    data = script_data.load_response_dataset({**section, **files, "split_validation_size": 0.05, "seed": 3})
    kept, held_out = ([int(row["messages"][0]["content"]) for row in part or ()] for part in data.formatted_ds.values())
    assert (kept, held_out) == split_rows(40, 0.05, 3)
    assert len(held_out) == 2
    assert data.task_spec.system_prompt == "Solve {}"
    assert data.task_spec.prompt == find_prompt("prompts/cot.txt").read_text()
    other = script_data.load_response_dataset({**section, "split_validation_size": 2}, seed=4)
    assert [int(row["messages"][0]["content"]) for row in other.val_dataset or ()] == split_rows(40, 2, 4)[1]
    for key, value, problem in (
        ("split_validation_size", 40, "holds out 40 of 40 rows"),
        ("split_validation_sise", 2, "unknown key of a ResponseDataset.*did you mean data.split_validation_size"),
    ):
        with pytest.raises(ConfigError, match=problem):
            script_data.load_response_dataset({**section, key: value})
    with pytest.raises(TypeError, match="chat_key"):
        ResponseDataset(str(path), chat_key="messages")  # pyright: ignore[reportCallIssue]


def test_environments_of_a_script_become_entries() -> None:
    own = object()
    by_task: Any = defaultdict(lambda: own, math=MathEnvironment.options(num_cpus=1).remote({"num_workers": 3}))
    written: dict[str, Any] = {}
    with open_environments(written, {"math", "other"}, by_task):
        assert written["env"] == {"math": {"num_workers": 3, "type": "math"}, "other": {"type": "script_other"}}
        assert "script_other" in ENVIRONMENTS.names
    assert "script_other" not in ENVIRONMENTS.names
    with (
        pytest.raises(ConfigError, match=r"task_to_env = 'gone'.*no environment; known: math"),
        open_environments(written, {"gone"}, {"math": own}),
    ):
        pass


def train_on(train: Any, validation: Any, environments: Any, log_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run `grpo_train` without the run itself; return the recipe that it writes."""
    monkeypatch.setattr(run_scripts, "run_command", lambda command, arguments: ExitCode.DONE)
    config = {**recipe(), "env": {"math": {"num_workers": 3}}, "logger": {"log_dir": str(log_dir)}}
    loaders, none = (HandedOver("dataloader", train), HandedOver("val_dataloader", validation)), HandedOver("policy")
    grpo_train(none, none, *loaders, None, none, environments, None, none, none, None, config)
    return to_container(OmegaConf.load(log_dir / run_scripts.RECIPE_FILE))


@pytest.mark.parametrize(
    "by_task",
    [
        {},
        None,
        {"squad": MathEnvironment.options().remote({"num_workers": 3})},
        {"nemo_gym": HandedOver("nemo_gym")},
    ],
)
def test_data_of_the_recipe_has_its_environments(by_task: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = train_on(RecipeData(), RecipeData(), by_task, tmp_path, monkeypatch)
    assert (written["env"], written["data"]["dataset_name"]) == ({"math": {"num_workers": 3}}, "squad")


@pytest.mark.parametrize(
    ("by_task", "problem"),
    [
        ({"squad": object()}, r"task_to_env = 'squad': .* this object is never used; write env.<name>.type"),
        (defaultdict(object), "task_to_env = 'any task'"),
        ({"squad": MathEnvironment.options().remote({"num_workers": 4})}, "this BuiltIn is never used"),
    ],
)
def test_environments_beside_data_of_the_recipe_are_refused(
    by_task: Any, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=problem):
        train_on(RecipeData(), None, by_task, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("train", "validation", "problem"),
    [
        (RecipeData(), [datum("v")], "val_dataset = 'list': .*; write it as data.validation"),
        ([datum("a")], RecipeData(), "dataset = 'list': .*; write it as data.train"),
    ],
)
def test_datasets_of_script_and_recipe_are_not_mixed(
    train: Any, validation: Any, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=problem):
        train_on(train, validation, {}, tmp_path, monkeypatch)


def test_registered_names_are_unique_and_reach_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_environments, "ENV_REGISTRY", {})
    monkeypatch.setattr(script_data, "PROCESSOR_REGISTRY", dict(script_data.PROCESSOR_REGISTRY))
    monkeypatch.setattr(script_data, "_own_processors", set())
    script_environments.register_env("game", "games.Game")
    for name in ("game", "math"):
        with pytest.raises(ValueError, match="registered already"):
            script_environments.register_env(name, "games.Game")
    written = {"env": {"game": {"scale": 2}}}
    script_environments.name_environments(written)
    assert written["env"]["game"] == {"type": "games.Game", "kwargs": {"cfg": {"scale": 2}}}
    assert script_environments.create_env("game", {}) == BuiltIn("games.Game", {"kwargs": {"cfg": {}}})
    script_data.register_processor("own", lambda *arguments: None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="registered already"):
        script_data.register_processor("own", lambda *arguments: None)  # pyright: ignore[reportArgumentType]
    mixed = {"data": {"train": [{"processor": "own"}, {"dataset_name": "squad"}]}, "policy": {}}
    with (
        pytest.raises(ConfigError, match="every dataset needs one"),
        script_data.open_processors(mixed, None),
    ):
        pass


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ({}, "own"),
        ({"chat_template": None, "chat_template_kwargs": None}, "<x>"),
        ({"chat_template": "{{ 'T' }}"}, "T"),
        ({"chat_template": "mine.jinja"}, "plain <x>"),
        ({"chat_template": "mine.jinja", "chat_template_kwargs": {"tone": "kind"}}, "kind <x>"),
    ],
)
def test_the_tokenizer_has_the_template_of_the_section(
    template: dict[str, Any], expected: str, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.jinja").write_text("{{ tone or 'plain' }} {{ messages[0].content }}")
    tokenizer.save_pretrained(tmp_path)
    found = get_tokenizer({"name": str(tmp_path), **template})
    text = found.apply_chat_template([{"role": "user", "content": "<x>"}], tokenize=False)
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "<x>"}], tokenize=False)
    assert text == {"own": rendered}.get(expected, expected)


def test_templates_that_cannot_be_read_are_named(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    for key, value in (("chat_template", "gone.jinja"), ("chat_template_kwargs", ["tone"])):
        with pytest.raises(ConfigError, match=rf"policy.tokenizer.{key} = "):
            get_tokenizer({"name": str(tmp_path), key: value})
