from dataclasses import replace

import pytest

from nemo_rl.data.chat import flat_token_ids
from nemo_rl.gateway.echoes import Claim, EchoedCallStore, build_chains, resolve_claims
from nemo_rl.gateway.sessions import Echo, UnknownEcho
from nemo_rl.types import Message
from tests.unit.gateway.engines import codec_of, completion_of, text_of, tokens_of

HI = Message("user", "hi")


class Clock:
    """A clock that stands still until it is moved."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def calls_of(clock: Clock | None = None, *, max_calls: int = 10) -> EchoedCallStore:
    return EchoedCallStore(codec_of("qwen3"), max_calls=max_calls, ttl_s=60.0, clock=clock or Clock())


def asked(
    calls: EchoedCallStore, messages: list[Message], text: str, *, echo: Echo | None = None, num_known: int = 0
) -> Echo:
    call = calls.begin(messages, echo=echo, num_known=num_known)
    ids = tokens_of("qwen3", text)
    calls.commit(call, completion_of(ids, versions=(1, 2)), Message("assistant", text))
    return Echo(call.prompt_token_ids, ids)


def test_an_echo_is_continued_whatever_the_client_made_of_the_text():
    calls = calls_of()
    first = asked(calls, [HI], "<think>so</think>\n\n4")
    messages = [Message("user", "edited"), Message("assistant", "else"), Message("user", "sure?")]
    second = asked(calls, messages, "yes", echo=first, num_known=2)
    seen = (*first.prompt_token_ids, *first.generation_token_ids)
    assert second.prompt_token_ids[: len(seen)] == seen
    added = text_of("qwen3", second.prompt_token_ids[len(seen) :])
    assert added == "\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"


def test_the_tokens_log_probs_and_versions_of_an_echoed_chain_are_kept():
    calls = calls_of()
    echo = asked(calls, [HI], "hello")
    (chain,) = build_chains(calls.find(echo))
    assert flat_token_ids(chain.message_log) == (*echo.prompt_token_ids, *echo.generation_token_ids)
    assert chain.message_log[-1].generation_logprobs == completion_of(echo.generation_token_ids).logprobs
    assert chain.weight_versions == (1, 2)


def test_one_call_may_be_continued_twice():
    calls = calls_of()
    first = asked(calls, [HI], "hello")
    seen = (*first.prompt_token_ids, *first.generation_token_ids)
    for question in ("one", "two"):
        messages = [HI, Message("assistant", "hello"), Message("user", question)]
        again = asked(calls, messages, "ok", echo=first, num_known=2)
        assert again.prompt_token_ids[: len(seen)] == seen


def test_without_an_echo_a_chain_begins():
    calls = calls_of()
    asked(calls, [HI], "hello")
    messages = [HI, Message("assistant", "hello"), Message("user", "on")]
    assert calls.begin(messages, echo=None, num_known=2).parent is None


@pytest.mark.parametrize("change", ["prompt", "generation", "seam"])
def test_changed_tokens_are_refused(change):
    calls = calls_of()
    echo = asked(calls, [HI], "hello")
    prompt, generation = echo.prompt_token_ids, echo.generation_token_ids
    changed = {
        "prompt": Echo((*prompt[:-1], prompt[-1] + 1), generation),
        "generation": Echo(prompt, generation[:-1]),
        "seam": Echo(prompt[:-1], (prompt[-1], *generation)),
    }[change]
    with pytest.raises(UnknownEcho, match="the tokens were changed"):
        calls.begin([HI, Message("assistant", "hello"), HI], echo=changed, num_known=2)


def test_calls_are_forgotten_by_number_and_by_age_and_kept_by_use():
    clock = Clock()
    calls = calls_of(clock, max_calls=2)
    echoes = [asked(calls, [HI], text) for text in "abc"]
    assert len(calls) == 2
    assert not calls.find(echoes[0])
    clock.now = 50.0
    assert calls.find(echoes[1])
    clock.now = 70.0
    calls.expire()
    assert len(calls) == 1
    assert calls.find(echoes[1])
    assert not calls.find(echoes[2])


def test_tokens_sampled_again_are_kept_as_the_newest():
    calls = calls_of(max_calls=2)
    a, b, _, _ = (asked(calls, [HI], text) for text in "abac")
    assert len(calls.find(a)) == 2
    assert not calls.find(b)


def test_a_forgotten_call_leaves_its_twin():
    calls = calls_of()
    echo = asked(calls, [HI], "a")
    asked(calls, [HI], "a")
    first, second = calls.find(echo)
    calls.forget(echo, second)
    assert calls.find(echo) == (first,)
    calls.forget(echo, first)
    assert not calls.find(echo)
    assert len(calls) == 0
    calls.forget(echo, first)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2)])
def test_equal_requests_whose_log_probs_differ_by_numerics_are_a_call_each(order):
    calls, ids = calls_of(), tokens_of("qwen3", "4")
    claims = []

    def sample(messages, logprob, echo=None):
        call = calls.begin(messages, echo=echo, num_known=len(messages) - 1)
        completion = replace(completion_of(ids), logprobs=(logprob,) * len(ids))
        calls.commit(call, completion, Message("assistant", "4"))
        claims.append(Claim(Echo(call.prompt_token_ids, ids), completion.logprobs))

    sample([HI], -0.5)
    sample([HI], -0.5003)
    sample([HI, Message("assistant", "4"), HI], -0.1, echo=claims[1].echo)
    first, second, last = calls.find(claims[0].echo) + calls.find(claims[2].echo)
    assert last.parent is second
    assert resolve_claims([claims[i] for i in order], calls.find) == tuple((first, second, last)[i] for i in order)
