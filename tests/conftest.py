"""Shared test settings: property tests that draw the same examples in every run."""

import os

import hypothesis

os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Only a change of the code may turn CI red; HYPOTHESIS_PROFILE=explore draws other examples each time.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.register_profile("explore", deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
