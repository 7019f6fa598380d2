"""Modules that NeMo Gym's processes import, in Gym's own Python; nothing of this project is imported by them."""
