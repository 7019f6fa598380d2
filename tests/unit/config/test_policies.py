"""The table `policies`: what it means, and what several policies are refused with."""

import pytest

from nemo_rl.config.layout_planner import make_layout
from nemo_rl.config.loading import load_config
from nemo_rl.config.master import GRPORunConfig
from nemo_rl.errors import ConfigError
from nemo_rl.recipes import find_recipe
from nemo_rl.weight_sync.adapters import choose_adapter_refit


def load(*overrides: str) -> GRPORunConfig:
    return load_config(find_recipe("self_play"), list(overrides))


def test_a_policy_has_the_values_of_the_run_unless_it_has_its_own() -> None:
    config = load(
        "policies.second={optimizer: {kwargs: {lr: 0.5}}, loss_fn: {type: cispo}}",
        "loss_fn.reference_policy_kl_penalty=0.1",
    )
    assert {name: loss.type for name, loss in config.losses.items()} == {"first": "ppo", "second": "cispo"}
    own = config.policies["second"].applied_to(config.policy).optimizer
    assert own.kwargs == config.policy.optimizer.kwargs | {"lr": 0.5}
    assert config.policies["first"].applied_to(config.policy) is config.policy
    assert config.needs_reference
    assert config.speakers == {
        "spelling_duel": ("first", "second"),
        "return_duel": ("second", "first"),
        "duel_with_start": ("first", "start"),
    }


def test_a_run_without_the_table_has_one_policy_without_a_name() -> None:
    config = load_config(find_recipe("lora"), [])
    assert (config.policy_names, list(config.losses), config.speakers) == (("",), [""], {})


def test_an_environment_without_policies_is_that_of_the_first() -> None:
    assert load("+env.other={type: math}").speakers["other"] == ("first",)


def test_adapters_of_several_policies_go_to_the_engine_alone() -> None:
    config = load()
    assert choose_adapter_refit(config, make_layout(config, "cpu")) == (
        "separate",
        "the engine samples several policies",
    )
    large = load("policy.dtensor_cfg.lora_cfg.dim=513")
    with pytest.raises(ConfigError, match=r"policies = .*lora_cfg\.dim is 513.*; allowed: \{\}"):
        choose_adapter_refit(large, make_layout(large, "cpu"))


def test_a_frozen_policy_with_an_adapter_of_its_own_leaves_the_reference_to_others() -> None:
    config = load("policies.start.adapter_path=here", "loss_fn.reference_policy_kl_penalty=0.1")
    assert config.needs_reference
    assert config.policies["start"].adapter_path == "here"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ("policies.first.adapter_path=here", "loss_fn.reference_policy_kl_penalty=0.1"),
            r"policies\.first\.adapter_path = 'here': the reference of adapters is their base",
        ),
        (("+policies.A-b={}",), r"policies\.A-b = 'set': a name has"),
        (("policies.first={trainable: false}", "policies.second={trainable: false}"), "none of them is trained"),
        (("+policies.start.optimizer={kwargs: {lr: 1}}",), r"policies\.start\.optimizer = 'set': policies\.start"),
        (("+policies.start.loss_fn={type: ppo}",), r"policies\.start\.loss_fn = 'set': policies\.start\.trainable"),
        (("+policies.first.loss_fn={type: ppo, use_kl_in_reward: true}",), r"policies\.first\.loss_fn\.reference_pol"),
        (("policy.dtensor_cfg.lora_cfg.enabled=false",), r"policy\.dtensor_cfg\.lora_cfg\.enabled = False: required"),
        (("policy.dtensor_cfg.lora_cfg.save_merged=true",), r"lora_cfg\.save_merged = True: checkpoints of several"),
        (
            (
                "policy.dtensor_cfg.lora_cfg.enabled=false",
                "++policy.megatron_cfg={enabled: true, peft: {enabled: true}}",
            ),
            r"policies = .*Megatron trains a single policy",
        ),
        (("policy.generation.backend=hf",), r"policy\.generation\.backend = 'hf': holds whole weights"),
        (("weight_sync.adapter=merged",), r"weight_sync\.adapter = 'merged': an engine holds one merged model"),
        (("+policy.router_replay={enabled: true, mode: R3}",), r"policy\.router_replay\.enabled = True"),
        (
            ("+policy.sequence_packing={enabled: true, share_prefixes: true}",),
            r"share_prefixes = True: rows of several",
        ),
        (("grpo.use_dynamic_sampling=true",), r"grpo\.use_dynamic_sampling = True: a group that teaches one"),
        (("grpo.adv_estimator.name=remax",), r"grpo\.adv_estimator\.name = 'remax': reads a greedy rollout"),
        (("+reward_penalties.penalize_empty_final_answer=true",), "reward_penalties = .*penalise the reply of one"),
        (("grpo.invalid_tool_call_advantage=-1",), r"grpo\.invalid_tool_call_advantage = -1\.0: is for replies"),
        (("+env.coder={type: agent, function: a.b}",), r"env\.coder = 'set': agents call the gateway"),
        (
            ("+env.spelling_duel.scorers=[one]", "+scorers.one={type: function, function: a.b}"),
            "score a rollout of one",
        ),
        (("env.spelling_duel.policies=[first, sceond]",), r"'sceond': is not in `policies`.*did you mean 'second'"),
        (("env.spelling_duel.policies=[first, first]",), "names a policy twice"),
        (("grpo.async_grpo.enabled=true",), "loss_fn.use_importance_sampling_correction = False"),
    ],
)
def test_what_several_policies_cannot_be_combined_with_is_refused(overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(*overrides)


def test_environments_of_a_run_of_one_policy_name_none() -> None:
    with pytest.raises(ConfigError, match=r"env\.reasoning_gym\.policies = \['first'\]: the run has no table"):
        load_config(find_recipe("lora"), ["+env.reasoning_gym.policies=[first]"])
