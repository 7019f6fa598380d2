"""A data row of NeMo Gym as it is sent to its agent: the rollout's session in it, and nothing that the run decides.

What the gateway would refuse was left out when the row was read: data/nemo_gym.py.
"""

import logging
from collections.abc import Mapping
from typing import Any

from nemo_rl.gateway.schema import SESSION_FIELD

PARAMETERS = "responses_create_params"
DECIDED_BY_THE_RUN = frozenset({"model", "seed", "temperature", "top_p"})
DECIDED_IN_METADATA = frozenset({"chat_template_kwargs", "extra_body"})  # Gym unfolds them into the call of the model

logger = logging.getLogger(__name__)


class SentRows:
    """Prepares rows; notes once what it leaves out of them."""

    def __init__(self) -> None:
        self._noted: set[str] = set()

    def of(self, row: Mapping[str, Any], session_id: str) -> dict[str, Any]:
        """The row with the session's id in the metadata of its parameters; `row` itself stays as it is.

        Gym passes a row's metadata on with each call of the model. Where an agent does not, its calls have no session:
        they are sampled as the run is, and found by their tokens.
        """
        given = row.get(PARAMETERS)
        if not isinstance(given, Mapping):
            return dict(row)  # Gym says what is wrong with it
        parameters = {name: value for name, value in given.items() if name not in DECIDED_BY_THE_RUN}
        metadata = given.get("metadata") or {}
        own = {name: value for name, value in metadata.items() if name not in DECIDED_IN_METADATA}
        left_out = {name for name in given.keys() - parameters.keys() if given[name] is not None}
        self._note(left_out | {f"metadata.{name}" for name in metadata.keys() - own.keys()})
        return {**row, PARAMETERS: {**parameters, "metadata": {**own, SESSION_FIELD: session_id}}}

    def _note(self, names: set[str]) -> None:
        if fresh := sorted(names - self._noted):
            self._noted.update(fresh)
            logger.info("%s of NeMo Gym's rows are left out: the run decides how tokens are sampled", ", ".join(fresh))
