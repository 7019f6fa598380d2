"""Types of values that many sections share: each with the bounds beyond which a run would fail later, or never end.

Example: `port: Port = 0`, `start_timeout_s: Seconds | None = None`.
"""

from typing import Annotated

from pydantic import Field

MAX_SECONDS = 1e9  # 30 years; timers of the operating system overflow above some hundred
MAX_PROCESSES = 10_000
MAX_COPIES = 10_000
MAX_SEED = 2**63 - 1

Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS)]
Delay = Annotated[float, Field(ge=0, le=MAX_SECONDS)]  # seconds; 0: none
Port = Annotated[int, Field(ge=0, le=65_535)]  # 0: a free one, if the key allows it
Processes = Annotated[int, Field(gt=0, le=MAX_PROCESSES)]  # started by one key
Copies = Annotated[int, Field(gt=0, le=MAX_COPIES)]
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]  # the vocabulary's size is checked once the model is known
AnyText = Annotated[str, Field(min_length=0)]  # other texts may not be empty
