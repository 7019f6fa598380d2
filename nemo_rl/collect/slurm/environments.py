"""The variables of components: in files that only their owner reads, and shown without secrets."""

import re
import shlex
from collections.abc import Mapping

SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
HIDDEN = "(hidden)"


def format_environment(variables: Mapping[str, str]) -> str:
    """Assignments that a shell reads; the script sources them for the steps of one component."""
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in variables.items())


def format_redacted_environment(variables: Mapping[str, str]) -> str:
    """The same, without the values of what is named like a secret, and without passwords in addresses."""
    shown = {name: HIDDEN if SECRET.search(name) else redact_passwords(value) for name, value in variables.items()}
    return format_environment(shown)


def redact_passwords(text: str) -> str:
    """Example: "http://me:pw@proxy" is shown as "http://(hidden)@proxy"."""
    return re.sub(r"(://)[^/@\s]+@", rf"\1{HIDDEN}@", text)
