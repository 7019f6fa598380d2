"""What the process that forks the ranks imports: the jobs' modules, and with them transformers and Megatron."""

import tests.contracts.policies  # noqa: F401
from nemo_rl.policy.megatron.start import import_megatron

import_megatron()
