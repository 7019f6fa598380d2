"""What pages say about errors is what the code does: quoted refusals, the tree of errors, exit codes."""

import ast
import itertools
import re
import tomllib
from pathlib import Path

import pytest

import nemo_rl.errors
from nemo_rl.command_line import ExitCode
from nemo_rl.config.loading import load_config
from nemo_rl.errors import ConfigError, NemoRLError
from tests.unit.docs.pages import PAGES, ROOT, fenced_blocks, normalized, quoted_errors, tables, text_of

QUICKSTART = ROOT / "examples" / "configs" / "quickstart.yaml"
EIGHT_GPUS = "policy.device=cuda cluster.gpus_per_node=8 "
SPLIT = "policy.generation.colocated.enabled=false policy.generation.colocated.resources.gpus_per_node=4 "
SEVERAL_POLICIES = (
    "policy.dtensor_cfg.lora_cfg.enabled=true policy.dtensor_cfg.lora_cfg.save_merged=false "
    "++policies={first:{},second:{}} "
)

# (page, overrides of the quickstart): the page quotes the refusal word for word.
REFUSALS = [
    ("README.md", "grpo.num_prompt_per_step=4"),
    (
        "agents.md",
        "++env.asker.type=agent ++env.asker.function=examples.agents.single_turn:ask ++env.asker.scored_by=asker",
    ),
    ("checkpoints.md", "checkpointing.metric_name=accuracy"),
    ("checkpoints.md", "checkpointing.metric_name=val:acuracy"),
    ("checkpoints.md", "checkpointing.metric_name=val:greedy_accuracy grpo.val_greedy=false"),
    ("clusters.md", EIGHT_GPUS + SPLIT + "policy.dtensor_cfg.data_parallel_size=8"),
    ("clusters.md", "policy.device=cuda policy.generation.colocated.enabled=false"),
    (
        "clusters.md",
        "policy.device=cuda grpo.async_grpo.enabled=true loss_fn.use_importance_sampling_correction=true",
    ),
    ("configuration.md", "grpo.num_prompt_per_step=4"),
    ("configuration.md", "policy.optimizer.kwargs.weight_decai=0"),
    ("configuration.md", "policy.train_micro_batch_size=7"),
    ("configuration.md", "policy.generation.temperature=3"),
    ("configuration.md", "policy.generation.max_new_tokens=128"),
    ("configuration.md", "policy.model_name='${policy.foo}'"),
    ("configuration.md", "a=x=y"),
    ("data.md", "data.train.env_name=reasoning_gim"),
    ("data.md", "data.train.dataset_name=jsonll"),
    ("ecosystem.md", "++env.counter={type:mcp}"),
    ("ecosystem.md", "++env.speller.type=openenv ++env.speller.url='localhost:8000'"),
    ("ecosystem.md", "++env.harbor.type=harbor ++env.harbor.answer_file=/etc/passwd"),
    ("environments.md", "++env.maths.type=maths"),
    ("generation.md", "policy.generation.temperature=0"),
    (
        "generation.md",
        "grpo.adv_estimator.name=opd grpo.num_generations_per_prompt=1 ++teacher.model_name=m "
        "policy.train_global_batch_size=8 grpo.num_prompts_per_step=8 policy.train_micro_batch_size=8 "
        "policy.generation.top_p=0.9",
    ),
    ("generation.md", "policy.generation.backend=hf policy.generation.in_actor=true"),
    ("generation.md", "policy.generation.backend=sglang"),
    ("policy.md", "policy.sequence_packing.enabled=true policy.dynamic_batching.enabled=true"),
    (
        "policy.md",
        "policy.sequence_packing.enabled=true policy.max_total_sequence_length=512 "
        "policy.sequence_packing.train_mb_tokens=511",
    ),
    (
        "policy.md",
        "policy.sequence_packing.enabled=true policy.sequence_packing.share_prefixes=true "
        "policy.megatron_cfg.enabled=true",
    ),
    ("policy.md", "policy.train_global_batch_size=100"),
    ("policy.md", "policy.train_micro_batch_size=7"),
    ("policy.md", "policy.dtensor_cfg.compile=true policy.dtensor_cfg.tensor_parallel_size=2"),
    ("policy.md", "policy.dtensor_cfg.lora_cfg.enabled=true policy.megatron_cfg.enabled=true"),
    ("policy.md", "policy.dtensor_cfg.lora_cfg.enabled=true ++policy.dtensor_cfg.lora_cfg.dropout=0.05"),
    (
        "policy.md",
        SEVERAL_POLICIES + "weight_sync.adapter=merged",
    ),
    (
        "policy.md",
        SEVERAL_POLICIES + "++env.duel.type=math ++env.duel.policies=[first,sceond]",
    ),
    ("megatron.md", "policy.megatron_cfg.enabled=true ++policy.megatron_cfg.fp8_cfg.enabled=true"),
]


@pytest.mark.parametrize(("page", "overrides"), REFUSALS)
def test_a_configuration_is_refused_in_the_words_of_the_page(
    page: str, overrides: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # recipes name their prompt files from there
    with pytest.raises(ConfigError) as caught:
        load_config(QUICKSTART, overrides.split())
    assert f"ConfigError: {caught.value}" in normalized(text_of(page))


# What from_nemo_rl.md says is not available in recipes of NeMo-RL.
NOT_AVAILABLE = [
    "policy.megatron_cfg.enabled=true ++policy.megatron_cfg.mtp_num_layers=2",
    "++policy.generation.vllm_cfg.pipeline_parallel_size=2",
    "++policy.generation.vllm_cfg.kv_cache_dtype=fp8",
]


@pytest.mark.parametrize("overrides", NOT_AVAILABLE)
def test_what_is_not_available_is_refused(overrides: str) -> None:
    with pytest.raises(ConfigError, match="not available: "):
        load_config(QUICKSTART, overrides.split())


# Refusals that need more than a configuration: a model, data, a device, or the layout of a cluster.
NEED_MORE = {
    "agents.md": {"env.asker.function"},
    "checkpoints.md": {"checkpointing.metric_name"},
    "configuration.md": {"policy.train_global_batch_size"},
    "data.md": {
        "data.train.data_path",
        "data.train.task",
        "data.disjoint",
        "data.max_input_seq_length",
        "policy.tokenizer.chat_template",
    },
    "ecosystem.md": {"env.coder.mounts"},
    "environments.md": {"env.my_game.type", "env.my_reward.kwargs"},
    "generation.md": {"policy.generation.vllm_kwargs", "policy.generation.vllm_kwargs.enable_chunked_prefill"},
    "megatron.md": {
        "policy.megatron_cfg.enabled",
        "policy.megatron_cfg.tensor_model_parallel_size",
        "policy.megatron_cfg.pipeline_model_parallel_size",
    },
    "policy.md": {
        "policy.sequence_packing.enabled",
        "policy.sequence_packing.share_prefixes",
        "policy.optimizer.kwargs.lrr",
        "policy.optimizer.name",
        "policy.optimizer.kwargs",
        "policy.scheduler.name",
        "policy.model_name",
        "policy.hf_config_overrides.num_hidden_layer",
        "policy.device",
        "policy.dtensor_cfg.tensor_parallel_size",
        "policy.dtensor_cfg.context_parallel_size",
        "policy.dtensor_cfg.expert_parallel_size",
        "policy.dtensor_cfg.lora_cfg.target_modules",
        "policy.moe.bias_update_rate",
    },
    "supervised.md": {"policy.tokenizer.chat_template"},
    "weight_sync.md": {"weight_sync.transport", "weight_sync.adapter"},
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_quoted_refusal_is_tried_or_needs_more_than_a_configuration(page: Path) -> None:
    errors = quoted_errors(page.read_text(encoding="utf-8"))
    quoted = {error.split()[1] for error in errors if error.startswith("ConfigError: ")}
    assert quoted - _tried_keys(page.name) - NEED_MORE.get(page.name, set()) == set()


def _tried_keys(page: str) -> set[str]:
    """Return the keys that a page's refusals set, and those whose default is refused then."""
    overrides = [override for name, case in REFUSALS if name == page for override in case.split()]
    defaults = {"policy.generation.colocated.resources.gpus_per_node", "policy.generation.vllm_cfg.enable_sleep_mode"}
    return {override.lstrip("+~").partition("=")[0] for override in overrides} | {"override"} | defaults


# Their words are those of another library, or of a made-up name.
OF_LIBRARIES = {
    "WorkerDied: policy rank 1",
    "ConfigError: policy.model_name = 'nemo_rl/quickstart-x'",
    "ConfigError: task",
    "ConfigError: policy.generation.vllm_kwargs",
}


@pytest.fixture(scope="module")
def corpus() -> str:
    """Return all texts of the package, those of f-strings with one word for each value."""
    texts = []
    for path in (ROOT / "nemo_rl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else " VALUE " for part in node.values]
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return normalized(" | ".join(texts))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_words_of_every_quoted_error_are_in_the_code(page: Path, corpus: str) -> None:
    unknown = []
    for error in quoted_errors(page.read_text(encoding="utf-8")):
        name, _, text = error.partition(": ")
        if not hasattr(nemo_rl.errors, name):
            continue  # Python's own
        if error.split()[1] in _tried_keys(page.name) or error.startswith(tuple(OF_LIBRARIES)):
            continue
        words = re.findall(r"[A-Za-z][a-z'-]*[a-z]", text)
        pairs = [f"{first} {second}" for first, second in itertools.pairwise(words) if f"{first} {second}" in text]
        if sum(pair in corpus for pair in pairs) < len(pairs) / 2:
            unknown.append(error)
    assert unknown == []


def test_the_docstring_of_errors_is_the_tree_of_errors() -> None:
    drawn = (nemo_rl.errors.__doc__ or "").partition("What happens")[0]
    tree = set(re.findall(r"\b[A-Z]\w+(?:Error|Died|Exit|Timeout)\b", drawn))
    types = {
        name
        for name, value in vars(nemo_rl.errors).items()
        if isinstance(value, type) and issubclass(value, NemoRLError)
    }
    assert tree == types


def test_exit_codes_of_the_page_are_those_of_the_code() -> None:
    (table,) = (table for table in tables(ROOT / "docs" / "configuration.md") if table.head[0] == "exit code")
    assert table.rows == tuple((str(int(code)), code.meaning) for code in ExitCode)


def test_the_layers_of_the_page_are_those_of_the_import_contract() -> None:
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ][0]
    section = text_of("architecture.md").partition("## Layers")[2]
    (_, block), *_ = fenced_blocks(section)
    assert block.split("\n")[:-1] == contract["layers"]
