"""The smallest recipe, and a way to load it."""

from tests.unit.config.conftest import load, recipe  # noqa: F401
