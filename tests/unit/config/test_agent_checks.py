import pytest

from nemo_rl.errors import ConfigError
from tests.unit.config.conftest import Load

FUNCTION = "++env.asker={type: agent, function: 'mine:ask'"
HARNESS = "++env.asker={type: agent, command: [env, '{prompt}']"
BOTH = "++env.asker={type: agent, function: 'mine:ask', command: [program]}"


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (["++env.asker={type: agent}"], "env.asker", "either a function or a command"),
        ([BOTH], "env.asker", "either a function or a command"),
        (["++env.asker={type: agent, command: []}"], "env.asker.command", "program"),
        (["++env.asker={type: agent, command: [a], in_tasks: true}"], "env.asker.in_tasks", "allowed: false"),
        ([FUNCTION + ", inherited_variables: [A]}"], "env.asker.inherited_variables", "only with command"),
        ([FUNCTION + ", variables: {A: b}}"], "env.asker.variables", "only with command"),
        ([HARNESS + "}"], "env.asker.scored_by", "reports no reward"),
        ([HARNESS + ", scored_by: math, env_state_fields: [a]}"], "env.asker.env_state_fields", "nothing else"),
        ([FUNCTION + ", side_calls: [{}]}"], "env.asker.side_calls.0", "matches every call"),
        ([FUNCTION + ", side_calls: [{model: '('}]}"], "env.asker.side_calls.0.model", "not a regular expression"),
        ([FUNCTION + ", env_state_fields: [a]}"], "env.asker.env_state_fields", "only with command"),
        (["++env.m={type: mcp, command: [a], tools: [t], reward_tool: t}"], "env.m.tools", "offers env.m.reward_tool"),
        (
            ["++env.m={type: mcp, command: [a], images: true}", "++gateway.images.max_count=3"],
            "env.m.max_images",
            "gateway.images.max_count is 3",
        ),
        ([FUNCTION + ", reward_min: 2, reward_max: 2}"], "env.asker.reward_min", "below env.asker.reward_max = 2"),
        ([FUNCTION + ", batching: {enabled: true}}"], "env.asker.batching.enabled", "allowed: false"),
        ([FUNCTION + ", remote: {enabled: true}}"], "env.asker.remote.enabled", "in_tasks"),
        ([FUNCTION + ", scored_by: asker}"], "env.asker.scored_by", "no entry of env that is an environment"),
        ([FUNCTION + ", scored_by: maths}"], "env.asker.scored_by", "did you mean .*math"),
        ([FUNCTION + ", timeout_s: 600}"], "env.asker.timeout_s", "below rollout.stall_timeout_s = 600"),
        ([FUNCTION + "}", "gateway.session_ttl_s=60"], "env.asker.timeout_s", "below gateway.session_ttl_s = 60"),
    ],
)
def test_agents_that_cannot_run_are_refused(load: Load, overrides: list[str], key: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        load("", *overrides)
    assert caught.value.key == key


@pytest.mark.parametrize(
    "overrides",
    [
        [FUNCTION + ", scored_by: math, in_tasks: true}"],
        ["++env.asker={type: agent, command: [program, '--flag']}"],
        [HARNESS + ", scored_by: math, side_calls: [{system: title, tools: false}]}"],
        [HARNESS + "}", "gateway.token_env=HOME"],
        [FUNCTION + "}", "gateway.host=0.0.0.0"],
        [FUNCTION + "}", "gateway.host=localhost"],
        [FUNCTION + "}", "gateway.host='::1'"],
        ["gateway.host=0.0.0.0"],
    ],
)
def test_agents_that_can_run_are_not(load: Load, overrides: list[str]) -> None:
    load("", *overrides)
