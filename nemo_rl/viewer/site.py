"""Addresses of pages: the server and the export find a page by the same ones."""

from collections.abc import Mapping
from urllib.parse import parse_qsl, unquote, urlsplit

from nemo_rl.errors import DataError
from nemo_rl.viewer import pages
from nemo_rl.viewer.check import check_page
from nemo_rl.viewer.compare import compare_page
from nemo_rl.viewer.sources import Source, Sources

MAX_COMPARED = 8


def kind_of(address: str) -> str:
    """Return the kind of page of an address.

    Example: "/s/exp_001/group/train?step=3" is a "group", "/s/exp_001" a "source".
    """
    path = _split(address)
    return path[2] if len(path) > 2 else "source" if path[0] == "s" else path[0]


def find_page(sources: Sources, address: str) -> pages.Page:
    """Return the page of an address. Raises DataError where there is none, ConfigError for what cannot be compared."""
    path, parameters = _split(address), parse_qsl(urlsplit(address).query, keep_blank_values=True)
    values = dict(parameters)
    if path == [""]:
        return pages.runs_page(sources)
    if path == ["compare"]:
        names = [value for name, value in parameters if name in ("a", "b") and value]
        return compare_page([sources.get(name) for name in dict.fromkeys(names[:MAX_COMPARED])])
    if path[0] == "s" and len(path) > 1 and (page := _find_of(sources.get(path[1]), path[2:], values)):
        return page
    raise DataError(f"there is no page {unquote(urlsplit(address).path)}")


def _find_of(source: Source, path: list[str], values: Mapping[str, str]) -> pages.Page | None:
    match path:
        case []:
            return pages.source_page(source, values)
        case ["step", step] if step.isascii() and step.isdigit() and len(step) < 10:
            return pages.step_page(source, int(step))
        case ["validation"]:
            return pages.validation_page(source, values)
        case ["check"]:
            return check_page(source)
        case ["group", split]:
            return pages.group_page(source, split, values)
        case ["rollouts", split]:
            return pages.rollouts_page(source, split, values)
        case ["rollout", split, key]:
            return pages.rollout_page(source, split, key, values)
        case ["text", split, key]:
            return pages.text_page(source, split, key, values)
    return None


def _split(address: str) -> list[str]:
    return [unquote(part) for part in urlsplit(address).path.strip("/").split("/")]
