"""The base of every part of the configuration: strict, frozen, defaults in the schema alone."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One mapping of the YAML. Unknown keys are refused; nothing changes after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)
