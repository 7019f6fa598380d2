import pytest

from nemo_rl.build.placement import placement_plan
from tests.unit.build.conftest import Recipe


def test_the_plan_has_a_line_a_part(recipe: Recipe) -> None:
    assert placement_plan(recipe("policy.model_name=m")).splitlines() == [
        "# placement",
        "#   policy: m, FSDP2, 1 rank on cpu, float32",
        "#   reference policy: none (no KL penalty)",
        "#   generation: hf on cpu, started by the driver, float32",
        "#   environments: letters",
        "#   weight sync: shared memory",
    ]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("loss_fn.reference_policy_kl_penalty=0.1", "#   reference policy: a frozen copy beside the policy"),
        ("policy.generation={backend: vllm, in_actor: true}", "#   generation: vllm on cpu, in a Ray actor, float32"),
        (
            "policy.generation={backend: vllm, vllm_cfg: {precision: bfloat16}}",
            "#   generation: vllm on cpu, started by the driver, bfloat16",
        ),
        ("++env.asker={type: agent, command: [cat]}", "#   environments: letters"),
        ("++env.asker={type: agent, command: [cat]}", "#   agents: asker; gateway on 127.0.0.1"),
    ],
)
def test_the_plan_follows_the_configuration(recipe: Recipe, override: str, line: str) -> None:
    assert line in placement_plan(recipe(override)).splitlines()
