"""What may go wrong with a NeMo Gym server, by who is at fault."""

from nemo_rl.errors import NemoRLError


class GymError(NemoRLError):
    """A NeMo Gym server did not do what was asked; the text names the agent and its address."""

    def __init__(self, problem: str, *, agent: str = "", url: str = "") -> None:
        self.problem = problem
        self.agent = agent
        self.url = url
        where = " at ".join(part for part in (f"agent {agent!r}" if agent else "", url) if part)
        super().__init__(f"{where}: {problem}" if where else problem)


class GymUnavailable(GymError):
    """Nobody answered: connection refused or reset, 502, 503, 504, a timeout. The infrastructure's fault."""


class GymRefused(GymError):
    """The server said no, or failed: 4xx, or 500 with its text. The environment's fault."""


class GymBrokenReply(GymError):
    """The answer is not what NeMo Gym's protocol says. The environment's fault."""
