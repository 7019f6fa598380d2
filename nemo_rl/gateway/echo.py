"""The tokens of an earlier call, as a client sends them back: they name the call."""

from array import array
from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True, slots=True)
class Echo:
    """The tokens of an earlier call, as a client sent them back."""

    prompt_token_ids: tuple[int, ...]
    generation_token_ids: tuple[int, ...]

    def digest(self) -> bytes:
        """Of both and of where one ends: the same tokens split elsewhere are another call."""
        prompt, generation = self.prompt_token_ids, self.generation_token_ids
        digest = blake2b(len(prompt).to_bytes(8, "little"), digest_size=16)
        digest.update(array("q", (*prompt, *generation)).tobytes())
        return digest.digest()


class UnknownEcho(Exception):
    """Tokens of a call that is not, or no longer, kept here."""

    def __init__(self, echo: Echo) -> None:
        super().__init__(
            f"no call of {len(echo.prompt_token_ids)} prompt and {len(echo.generation_token_ids)} generated tokens "
            "is kept here: the tokens were changed, or the call is too old"
        )
