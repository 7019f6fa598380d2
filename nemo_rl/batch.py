"""The keys of a training batch: what each tensor means, its shape and dtype.

B samples, T tokens (right-padded to the longest), R named rewards, K tokens that a teacher finds most likely. Entry t
of every [B, T] tensor belongs to token t; entry 0 carries no loss. experience/assembly.py makes the batch; the loop's
stages add the last groups of keys.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nemo_rl.image_features import ImageTable, PlacedImage

if TYPE_CHECKING:
    from tensordict import TensorDict

TOKEN_IDS = "token_ids"  # [B, T] int64; padding is 0
TOKEN_MASK = "token_mask"  # [B, T] float32; 1 where the policy sampled the token
GENERATION_LOGPROBS = "generation_logprobs"  # [B, T] float32; the engine's; 0 where the mask is 0
LENGTHS = "lengths"  # [B] int64; tokens before padding
SAMPLE_MASK = "sample_mask"  # [B] float32; 0: no gradient from this sample (overlong filtering and the like)
TRAJECTORY_ID = "trajectory_id"  # [B] int64; 0..N-1 in the order of the batch; samples of one trajectory share it
GROUP_ID = "group_id"  # [B] int64; rollouts that are compared with each other
TRAJECTORY_TOKENS = "trajectory_tokens"  # [B] float32; sum of token_mask over all samples of the trajectory
REWARD = "reward"  # [B] float32; of the trajectory, or of the chain if it has its own, after scaling and shaping
BASELINE_REWARD = "baseline_reward"  # [B] float32; reward of the group's greedy rollout, if there is one
REWARD_COMPONENTS = "reward_components"  # nested: reward name -> [B] float32, before scaling and shaping
# nested: name -> [B, T, ...] of the engine's dtype (token_columns.py), missing after a row's tokens; absent without any
COLUMNS = "columns"
# [B, T] int64; the token's row among the features of IMAGES, -1: its embedding is its own; absent without images
IMAGE_ROWS = "image_rows"
IMAGES = "images"  # non-tensor: the `ImageTable` of the distinct images of the whole batch, whatever rows are selected
TRUNCATED = "truncated"  # [B] bool; the rollout was cut

PREV_LOGPROBS = "prev_logprobs"  # [B, T] float32; of the training backend before the first optimizer step
REFERENCE_LOGPROBS = "reference_logprobs"  # [B, T] float32
PREFERENCE = (
    "preference"  # [B] float32; 1: the chosen answer of a pair, -1: the rejected; a pair is a group, kept whole
)
ADVANTAGE_OVERRIDE = "advantage_override"  # [B, T] float32; in place of the estimator's, NaN elsewhere; gone after it
ADVANTAGES = "advantages"  # [B, T] float32
RECORDED = "recorded"  # [B] int64; number among the rows whose log-probs a training step keeps; below 0: not kept

TEACHER_LOGPROBS = "teacher_logprobs"  # [B, T] float32; of the tokens themselves
TEACHER_TOPK_IDS = "teacher_topk_ids"  # [B, T, K] int64; negative ids are padding
TEACHER_TOPK_LOGPROBS = "teacher_topk_logprobs"  # [B, T, K] float32; of the whole vocabulary's log_softmax
TEACHER_UNMATCHED = "teacher_unmatched"  # [B, T, K] float32; teacher-only tokens' probabilities, descending
SPAN_LENGTHS = "span_lengths"  # [B, T] int64; tokens of the span that is compared as a whole from here on, else 0


def add_images(batch: "TensorDict", rows: Sequence[Sequence[PlacedImage]]) -> None:
    """Add the images of each row to a batch with TOKEN_IDS; nothing if there are none."""
    if not any(rows):
        return
    import torch
    from tensordict import NonTensorData

    table, numbers = ImageTable.lay_out(rows, batch[TOKEN_IDS].shape[1])
    batch[IMAGE_ROWS] = torch.from_numpy(numbers)
    batch[IMAGES] = NonTensorData(table, batch_size=batch.batch_size)
