"""Which of a session's calls are beside its task: a harness's titles and summaries, by rules of the configuration."""

import re
from collections.abc import Callable, Sequence

from nemo_rl.config.environment import SideCallRule
from nemo_rl.gateway.calls import CallRequest
from nemo_rl.types import Message

SideCallTest = Callable[[CallRequest], bool]


def make_side_call_test(rules: Sequence[SideCallRule]) -> SideCallTest | None:
    """Return whether any rule matches a call; None without rules."""
    tests = [_make_test(rule) for rule in rules]
    return (lambda request: any(test(request) for test in tests)) if tests else None


def _make_test(rule: SideCallRule) -> SideCallTest:
    def matches(request: CallRequest) -> bool:
        system = "\n".join(message.content for message in request.messages if message.role == "system")
        last = request.messages[-1] if request.messages else Message("user", "")
        texts = ((rule.model, request.model or ""), (rule.system, system), (rule.last_message, last.content))
        if rule.tools is not None and rule.tools != bool(request.tools):
            return False
        return all(re.search(pattern, text) for pattern, text in texts if pattern is not None)

    return matches
