"""The base of every part of the configuration: strict, frozen, defaults in the schema alone."""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One mapping of the YAML. Unknown keys are refused; nothing changes after validation."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False, defer_build=True
    )

    @classmethod
    def with_defaults(cls, **values: Any) -> Self:
        """Return the section with these values and defaults for all others, as the default of a field.

        Unlike a call of the class this validates nothing, and so builds no validator, which takes milliseconds each.
        """
        return cls.model_construct(**values)
