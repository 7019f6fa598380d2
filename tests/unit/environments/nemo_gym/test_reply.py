"""What counts as a reply of a NeMo Gym agent."""

import copy
import json
from typing import Any

import pytest

from nemo_rl.environments.nemo_gym.reply import GymCall, GymInvalidReply, find_answer, parse_reply

CALL = {"prompt_token_ids": [1, 2], "generation_token_ids": [3, 4], "generation_log_probs": [-0.5, 0]}
BODY = {
    "responses_create_params": {"input": "?"},
    "reward": 1,
    "score": 0.25,
    "label": "hard",
    "is_right": True,
    "info": {"nested": 1},
    "response": {
        "output": [
            {"type": "reasoning", "summary": []},
            {"type": "function_call", "name": "add", "arguments": "{}", **CALL},
            {"type": "function_call_output", "output": "7"},
            {"type": "message", "content": [], **CALL, "prompt_token_ids": [1, 2, 3, 4, 5]},
        ],
        "incomplete_details": None,
    },
}


def changed(*path: str | int, to: Any) -> dict[str, Any]:
    """The body with another value at a path."""
    body: Any = copy.deepcopy(BODY)
    place = body
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = to
    return body


def test_calls_are_the_items_with_tokens_in_order() -> None:
    reply = parse_reply(BODY)
    assert reply.calls == (GymCall((1, 2), (3, 4), (-0.5, 0.0)), GymCall((1, 2, 3, 4, 5), (3, 4), (-0.5, 0.0)))
    assert (reply.reward, reply.is_incomplete, reply.mask_sample) == (1.0, False, False)
    assert [item["type"] for item in reply.output] == ["reasoning", "function_call", "function_call_output", "message"]


def test_plain_fields_of_the_environment_are_kept_and_others_left_out() -> None:
    assert parse_reply(BODY).extras == {"score": 0.25, "label": "hard", "is_right": True}


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        ({"extracted_answer": "B"}, "B"),
        (
            {"extracted_answer": None, "extracted_model_output": "So: ...", "extracted_model_code": "print(1)"},
            "print(1)",
        ),
        ({"extracted_code": "int main() {}"}, "int main() {}"),
        ({"extracted_sql": "SELECT 1"}, "SELECT 1"),
        ({"extracted_answer": 7.0}, "7.0"),
        ({"extracted_model_code": None, "label": "hard"}, None),
    ],
)
def test_answer_is_the_field_that_gyms_majority_compares(fields: dict[str, Any], answer: str | None) -> None:
    reply = parse_reply({**BODY, **fields})
    assert find_answer(reply.extras) == find_answer({**BODY, **fields}) == answer


def test_named_rewards_are_those_that_add_up_to_the_reward() -> None:
    assert parse_reply(BODY).reward_components == {}
    several = changed("reward_components", to={"right": 0.75, "form": 0.25})
    assert parse_reply(several).reward_components == {"right": 0.75, "form": 0.25}
    for wrong in ({"right": 0.75}, {"right": "high"}, [1.0]):
        with pytest.raises(GymInvalidReply, match="reward"):
            parse_reply(changed("reward_components", to=wrong))


def test_incomplete_and_masked_replies_say_so() -> None:
    assert parse_reply(changed("response", "incomplete_details", to={"reason": "max_output_tokens"})).is_incomplete
    assert parse_reply(changed("mask_sample", to=True)).mask_sample


def test_items_whose_token_fields_are_null_have_no_tokens() -> None:
    nothing = dict.fromkeys(CALL)
    assert parse_reply(changed("response", "output", to=[{"type": "message", **nothing}])).calls == ()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ([], "the reply must be an object, not list"),
        ("text", "the reply must be an object, not str"),
        (changed("reward", to=None), "reward must be a finite number, not nothing"),
        (changed("reward", to="1"), "reward must be a finite number, not '1'"),
        (changed("reward", to=True), "reward must be a finite number, not True"),
        (changed("reward", to=float("nan")), "reward must be a finite number, not nan"),
        (changed("reward", to=10**400), "reward must be a finite number, not 1000"),
        (changed("response", to=None), "response must be an object, not missing"),
        (changed("response", "output", to="text"), "response.output must be a list of objects"),
        (changed("response", "output", to=["text"]), "response.output must be a list of objects"),
        (changed("mask_sample", to="no"), "mask_sample must be true or false, not 'no'"),
        (changed("response", "output", 1, "generation_token_ids", to=[3]), "output.1: 1 tokens with 2 log-probs"),
        (changed("response", "output", 1, "generation_log_probs", to=None), "generation_log_probs must be a list"),
        (changed("response", "output", 3, "generation_log_probs", 0, to=float("nan")), "nan: no finite log-prob"),
        (changed("response", "output", 3, "generation_log_probs", 0, to=None), "nothing: no finite log-prob"),
        (changed("response", "output", 3, "generation_log_probs", 0, to=float("-inf")), "-inf: no finite log-prob"),
        (changed("response", "output", 3, "prompt_token_ids", 0, to="1"), "prompt_token_ids holds '1': no token id"),
        (changed("response", "output", 3, "generation_token_ids", 0, to=-1), "generation_token_ids holds -1"),
        (changed("response", "output", 3, "generation_token_ids", 0, to=True), "generation_token_ids holds True"),
        (changed("response", "output", 3, "generation_token_ids", 0, to=1.0), "generation_token_ids holds 1.0"),
    ],
)
def test_broken_replies_name_the_field(body: Any, said: str) -> None:
    with pytest.raises(GymInvalidReply) as error:
        parse_reply(body)
    assert said in str(error.value)


def test_json_that_was_cut_short_of_a_number_is_no_reward() -> None:
    body = json.loads(json.dumps(changed("reward", to=float("inf"))))
    with pytest.raises(GymInvalidReply, match="not inf"):
        parse_reply(body)
