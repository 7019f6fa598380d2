"""Names of NeMo Gym's collection files and of the keys in them (nemo-gym 0.4.0)."""

from dataclasses import dataclass
from pathlib import Path

TASK_INDEX = "_ng_task_index"
ROLLOUT_INDEX = "_ng_rollout_index"
ANSWER = "extracted_answer"  # of environments that look for one in the reply
FAILURE_CLASS = "_ng_failure_class"
AGENT = "agent_ref"
PARAMETERS = "responses_create_params"
RESPONSE = "response"

# In a row of ours: what Gym's row held beside its key, so that an import may be exported again as it was.
ORIGINAL_GYM_ROW = "nemo_gym"


@dataclass(frozen=True, slots=True)
class NemoGymFiles:
    """The files of one collection; their names begin like that of the rollouts."""

    rollouts: Path

    @property
    def inputs(self) -> Path:
        return self.rollouts.with_name(f"{self.rollouts.stem}_materialized_inputs.jsonl")

    @property
    def failures(self) -> Path:
        return self.rollouts.with_name(f"{self.rollouts.stem}_failures.jsonl")
