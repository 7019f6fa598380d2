"""NeMo-RL's recipes in this project's terms: what has another shape, name or place here is rewritten.

`translate` runs on a resolved recipe, before the schema reads it; tables.py has single keys.
"""

from collections.abc import Callable
from typing import Any

from nemo_rl.compat import (
    counterparts,
    data_sections,
    environment_sections,
    megatron_models,
    moe_sections,
    reward_model_recipes,
)
from nemo_rl.compat.tables import (
    Cause,
    Report,
    apply_release_defaults,
    apply_rules,
    choose_backend,
    find_models,
    find_named_models,
    find_release,
    load_table,
    reach,
)
from nemo_rl.config.recipe_files import (
    COMMANDS,
    Family,
    at,
)
from nemo_rl.errors import ConfigError

SUPERVISED: tuple[Family, ...] = ("sft", "dpo", "rm")
SAMPLING_KEYS = ("max_new_tokens", "temperature", "top_p", "top_k", "stop_token_ids", "stop_strings")
SERVER_KEYS = ("tensor_parallel_size", "gpu_memory_utilization", "max_model_len", "enforce_eager")
ENGINE = Cause("speed", "vLLM samples the same distribution; write policy.generation.backend: vllm")
FP8 = Cause("speed", "engines and layers compute in bfloat16 or float32")
ONE_NODE = Cause("layout", "an engine runs on one node; write at most the GPUs that engines have there")
NO_TEACHER_LIST = Cause("results", "teachers are named by task: teachers.<task>, or teacher for all")
SERVED_TEMPLATE = Cause("results", "the gateway renders what the policy is trained on: policy.tokenizer.chat_template")
PASS_THROUGH = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
PASSED_THROUGH = "{key}.tokenizer.chat_template: null joins the contents of messages without any text between them"
OWN_VARIABLES = ("NRL_", "NEMO_RL_")  # NeMo-RL's own switches
_RATIO_OPTIONS = ("force_on_policy_ratio", "ratio_clip_c")
# NeMo-RL's switches of `loss_fn`: the loss that each turns on (ppo without any), and the options that it excludes.
LOSS_SWITCHES: dict[str, tuple[str, tuple[str, ...]]] = {
    "use_cispo": ("cispo", _RATIO_OPTIONS),
    "disable_ppo_ratio": ("reinforce", _RATIO_OPTIONS),
    "sequence_level_importance_ratios": ("gspo", ()),
}


def translate_resolved(config: dict[str, Any], family: Family, *, allow_unsupported: bool = False) -> Report:
    """Rewrite a resolved recipe of NeMo-RL, in place; one of this project's own stays as it is."""
    report = Report(allow_unsupported)
    _remove_moved_keys(config)
    try:
        _translate(config, family, report)
    except ConfigError as error:
        report.problems.append(error)
    return report


def _translate(config: dict[str, Any], family: Family, report: Report) -> None:
    release = report.release = find_release(config)
    if family == "eval":
        _move_sampled_model(config)
    data_sections.spread_flat_data(config)
    if family == "rm" and release is not None:
        reward_model_recipes.admit(config, report)
    choose_backend(config)
    _clip_as_megatron(config)
    _rename(config, family)
    if family in ("dpo", "rm"):
        data_sections.translate_preferences(config)
    for step in _STEPS:
        step(config, report)
    unmapped = megatron_models.find_unmapped(config)
    apply_rules(config, report)
    megatron_models.train_elsewhere(unmapped, report)
    if family not in SUPERVISED:
        translate_loss_switches(config)
    data_sections.name_datasets(config, family)
    if family in SUPERVISED:
        _translate_supervised(config, is_foreign=release is not None)
    if family == "rm" and release is not None:
        reward_model_recipes.translate(config, report)
    if release is not None:
        apply_release_defaults(config, release, report)


def translate_loss_switches(config: dict[str, Any]) -> None:
    """Write NeMo-RL's switches of `loss_fn` as its type, in place; raises ConfigError if they contradict it."""
    loss = config.get("loss_fn")
    if not isinstance(loss, dict):
        return
    switches = {name: loss.pop(name) for name in LOSS_SWITCHES if name in loss}
    _check_loss_switches(switches, loss)
    for switch in (name for name, is_on in switches.items() if is_on and "type" not in loss):
        loss["type"] = LOSS_SWITCHES[switch][0]
        if loss["type"] == "gspo" and loss.get("token_level_loss", True):
            problem = f"{switch} (GSPO) needs false: one ratio a sequence"
            raise ConfigError("loss_fn.token_level_loss", True, problem)


def _check_loss_switches(switches: dict[str, Any], loss: dict[str, Any]) -> None:
    """Raise ConfigError for switches that exclude each other, an option of the loss, or its type."""
    for switch, is_on in switches.items():
        if not isinstance(is_on, bool):
            raise ConfigError(f"loss_fn.{switch}", is_on, "must be true or false")
        loss_type, excluded = LOSS_SWITCHES[switch]
        others = {name: value for name, value in switches.items() if name != switch}
        others |= {name: loss[name] for name in excluded if name in loss}
        for name, value in others.items():
            if is_on and value:
                allowed = "null" if name == "ratio_clip_c" else "false"
                raise ConfigError(f"loss_fn.{name}", value, f"has no meaning with loss_fn.{switch}; allowed: {allowed}")
        named = loss.get("type")
        if named is not None and is_on != (named == loss_type):
            problem = f"contradicts loss_fn.type: {named}; write loss_fn.type alone"
            raise ConfigError(f"loss_fn.{switch}", is_on, problem)


def moved_key(key: str) -> str | None:
    """Return the key that holds NeMo-RL's `key` here; None if it has not moved."""
    return load_table("releases")["moved"].get(key)


def copy_moved_keys(layer: dict[str, Any]) -> None:
    """Copy moved keys of one layer to where they are read, in place; if a layer has both, the inner one wins.

    The outer ones stay until interpolations are resolved, since others may refer to them.
    """
    for old, new in load_table("releases")["moved"].items():
        section, name = old.split(".")
        inner = new.split(".")[1]
        values = layer.get(section)
        if isinstance(values, dict) and name in values:
            target = values.get(inner)
            if not isinstance(target, dict):
                target = values[inner] = {}
            target.setdefault(name, values[name])


def _remove_moved_keys(config: dict[str, Any]) -> None:
    """Remove the outer spelling of moved keys from a resolved recipe, in place."""
    for old in load_table("releases")["moved"]:
        section, name = old.split(".")
        if isinstance(config.get(section), dict):
            config[section].pop(name, None)


def _rename(config: dict[str, Any], family: Family) -> None:
    algorithm = family if family in ("grpo", "distillation") else None
    for old, new in load_table("releases")["renamed"].items():
        *parent, name = old.split(".")
        holder = at(config, parent)
        if not isinstance(holder, dict) or name not in holder:
            continue
        value = holder.pop(name)
        if value is None or (algorithm is None and "{algorithm}" in new):
            continue
        *target, new_name = new.replace("{algorithm}", algorithm or "").split(".")
        reach(config, target).setdefault(new_name, value)


def _move_sampled_model(config: dict[str, Any]) -> None:
    """Move an evaluation's `generation` and `tokenizer` to `policy` and `server`, and its flat data to `data.input`."""
    generation = config.pop("generation", None)
    if isinstance(generation, dict):
        policy = reach(config, ["policy"])
        engine = generation.get("vllm_cfg") if isinstance(generation.get("vllm_cfg"), dict) else {}
        assert isinstance(engine, dict)
        policy.setdefault("model_name", generation.get("model_name"))
        if isinstance(engine.get("max_model_len"), int):
            policy.setdefault("max_total_sequence_length", engine["max_model_len"])
        if engine.get("precision") in ("bfloat16", "float32"):
            policy.setdefault("precision", engine["precision"])
        sampling = {name: generation[name] for name in SAMPLING_KEYS if generation.get(name) not in (None, -1)}
        policy["generation"] = sampling | (policy.get("generation") or {})
        server = reach(config, ["server"])
        for name in SERVER_KEYS:
            if engine.get(name) is not None:
                server.setdefault(name, engine[name])
        if generation.get("vllm_kwargs"):
            server.setdefault("vllm_kwargs", generation["vllm_kwargs"])
    if "tokenizer" in config:
        reach(config, ["policy"]).setdefault("tokenizer", config.pop("tokenizer"))
    data = config.get("data")
    if isinstance(data, dict) and "input" not in data and data.get("dataset_name"):
        names = {"problem_key": "input_key", "solution_key": "output_key", "data_paths": "data_path"}
        data["input"] = {
            names.get(key, key): data.pop(key)
            for key in list(data)
            if key not in ("max_input_seq_length", "input", "default", "seed") and data[key] is not None
        }
        data["input"].pop("file_format", None)
        for key in [key for key, value in data.items() if value is None and key != "max_input_seq_length"]:
            del data[key]


def _clip_as_megatron(config: dict[str, Any]) -> None:
    """Use megatron_cfg.optimizer.clip_grad, which Megatron reads, as max_grad_norm; 0 disables clipping."""
    for model in find_models(config):
        clip = at(model, ["megatron_cfg", "optimizer", "clip_grad"])
        if clip is not None:
            model["max_grad_norm"] = clip or None
        optimizer = at(model, ["megatron_cfg", "optimizer"])
        if isinstance(optimizer, dict):
            optimizer.pop("clip_grad", None)


def _translate_validation(config: dict[str, Any], report: Report) -> None:
    """Write "never" as 0, and leave out validation sampling that equals the training's."""
    for family in COMMANDS:
        section = config.get(family)
        if isinstance(section, dict):
            for name in ("val_period", "val_batches"):
                if section.get(name) == -1:
                    section[name] = 0 if name == "val_period" else None
    generation = at(config, ["policy", "generation"])
    for family in ("grpo", "distillation"):
        section = config.get(family)
        if not isinstance(section, dict):
            continue
        for name in ("temperature", "top_p", "top_k"):
            is_same = isinstance(generation, dict) and section.get(f"val_{name}") == generation.get(name)
            if is_same or section.get(f"val_{name}") == -1:
                section.pop(f"val_{name}", None)


def _translate_engine(config: dict[str, Any], report: Report) -> None:
    """Refuse other engines and FP8; with --allow-unsupported vLLM and bfloat16 replace them."""
    generation = at(config, ["policy", "generation"])
    if not isinstance(generation, dict):
        return
    if report.release is not None and generation.get("backend") in ("megatron", "sglang", "trtllm", "dynamo"):
        report.refuse("policy.generation.backend", generation.pop("backend"), ENGINE)
    engine = generation.get("vllm_cfg")
    if isinstance(engine, dict) and engine.get("precision") == "fp8":
        report.refuse("policy.generation.vllm_cfg.precision", engine.pop("precision"), FP8)
    if isinstance(engine, dict) and report.release is not None:
        _fit_engine(config, generation, engine, report)
    _translate_served_chat(config, engine, report)


def _fit_engine(config: dict[str, Any], generation: dict[str, Any], engine: dict[str, Any], report: Report) -> None:
    """Refuse an engine of more GPUs than a node has for it; with --allow-unsupported it has these."""
    own = at(generation, ["colocated", "resources", "gpus_per_node"])
    is_colocated = at(generation, ["colocated", "enabled"]) is not False
    size, gpus = engine.get("tensor_parallel_size"), at(config, ["cluster", "gpus_per_node"])
    gpus = gpus if is_colocated or not isinstance(own, int) else own
    if isinstance(size, int) and isinstance(gpus, int) and 0 < gpus < size:
        report.refuse("policy.generation.vllm_cfg.tensor_parallel_size", size, ONE_NODE)
        engine["tensor_parallel_size"] = gpus if report.allow_unsupported else size


def _translate_served_chat(config: dict[str, Any], engine: Any, report: Report) -> None:
    """Give the gateway the parsers of the engine's HTTP server, since it is what agents call here."""
    key = "policy.generation.vllm_cfg.http_server_serving_chat_kwargs"
    served = engine.pop("http_server_serving_chat_kwargs", None) if isinstance(engine, dict) else None
    if isinstance(engine, dict):
        engine.pop("tool_parser_plugin", None)
        engine.pop("reasoning_parser_plugin", None)
    if not isinstance(served, dict):
        return
    table = load_table("releases")
    for name in ("tool_parser", "reasoning_parser"):
        parser = served.get(name)
        if parser is not None:  # an unlisted name is one of vLLM's registry, which the gateway looks up
            reach(config, ["gateway"]).setdefault(name, table[f"{name}s"].get(parser, parser))
    if isinstance(served.get("default_chat_template_kwargs"), dict):
        tokenizer = reach(config, ["policy", "tokenizer"])
        tokenizer["chat_template_kwargs"] = {
            **served["default_chat_template_kwargs"],
            **(tokenizer.get("chat_template_kwargs") or {}),
        }
    template = served.get("chat_template")
    own = at(config, ["policy", "tokenizer", "chat_template"])
    if template is not None and own in (None, "default") and at(config, ["env", "nemo_gym"]) is not None:
        reach(config, ["policy", "tokenizer"])["chat_template"] = template  # agents' rollouts are rendered with it
    elif template is not None and template != own:
        report.refuse(f"{key}.chat_template", template, SERVED_TEMPLATE)


def _pass_messages_through(config: dict[str, Any], report: Report) -> None:
    """Write the template that `chat_template: null` means in NeMo-RL; without the key it is the tokenizer's own."""
    for key, model in find_named_models(config) if report.release is not None else ():
        tokenizer = model.get("tokenizer")
        if isinstance(tokenizer, dict) and tokenizer.get("chat_template", "default") is None:
            tokenizer["chat_template"] = PASS_THROUGH
            report.notes.append(PASSED_THROUGH.format(key=key))


def _translate_gym(config: dict[str, Any], report: Report) -> None:
    """Move NeMo Gym's tags and patterns to `reward_penalties`."""
    section = at(config, ["env", "nemo_gym"])
    if not isinstance(section, dict):
        return
    for name in ("thinking_tags", "invalid_tool_call_patterns"):
        if name in section:
            value = section.pop(name)
            if "grpo" in config and value is not None:
                reach(config, ["reward_penalties"]).setdefault(name, value)


def _collect_env_vars(config: dict[str, Any], report: Report) -> None:
    """Gather the `env_vars` of all workers in `cluster.env_vars`, which every process of the run inherits."""
    holders = [(model.get(name), name) for model in find_models(config) for name in ("dtensor_cfg", "megatron_cfg")]
    holders.append((at(config, ["policy", "generation", "vllm_cfg"]), "vllm_cfg"))
    for holder, name in holders:
        values = holder.get("env_vars") if isinstance(holder, dict) else None
        if not isinstance(holder, dict) or not isinstance(values, dict):
            continue
        del holder["env_vars"]
        own = {key: value for key, value in values.items() if key.startswith(OWN_VARIABLES)}
        for key, value in own.items():
            report.skip(f"{name}.env_vars.{key}", value, Cause("speed", "a switch of NeMo-RL's own code"))
        kept = {key: str(value) for key, value in values.items() if key not in own}
        if kept:
            target = reach(config, ["cluster", "env_vars"])
            target.update({key: value for key, value in kept.items() if key not in target})


def _remove_empty_truncation(config: dict[str, Any], report: Report) -> None:
    """Remove a truncation without a bound, with which NeMo-RL truncates nothing."""
    loss = config.get("loss_fn")
    if report.release is None or not isinstance(loss, dict):
        return
    if loss.get("truncated_importance_sampling_type") == "tis" and not loss.get("truncated_importance_sampling_ratio"):
        del loss["truncated_importance_sampling_type"]


def _name_metric(config: dict[str, Any], report: Report) -> None:
    section = config.get("checkpointing")
    metric = section.get("metric_name") if isinstance(section, dict) else None
    is_supervised, table = any(family in config for family in SUPERVISED), load_table("releases")
    if isinstance(section, dict) and isinstance(metric, str) and (report.release is not None or is_supervised):
        names = table["metrics"] | ({} if is_supervised else table["rollout_metrics"])
        section["metric_name"] = names.get(metric, metric)


def _refuse_teacher_list(config: dict[str, Any], report: Report) -> None:
    if isinstance(config.get("teachers"), list):
        report.refuse("teachers", f"a list of {len(config['teachers'])}", NO_TEACHER_LIST)
        del config["teachers"]


def _translate_supervised(config: dict[str, Any], *, is_foreign: bool) -> None:
    """Leave out what supervised training does not read."""
    policy, data = config.get("policy"), config.get("data")
    if isinstance(policy, dict):
        policy.pop("generation", None)
    if not isinstance(data, dict) or not is_foreign:
        return
    for one in data_sections.dataset_sections(data):
        one.pop("env_name", None)


_STEPS: tuple[Callable[[dict[str, Any], Report], None], ...] = (
    *counterparts.STEPS,
    moe_sections.translate_routers,
    moe_sections.translate_expert_parallel,
    _translate_validation,
    _translate_engine,
    _pass_messages_through,
    data_sections.translate_loaders,
    environment_sections.translate_environments,
    _translate_gym,
    _collect_env_vars,
    data_sections.find_prompts,
    _refuse_teacher_list,
    _remove_empty_truncation,
    _name_metric,
    counterparts.translate_ranking,
    data_sections.bound_prompts,
)
