"""The viewer's site: its pages by address, their HTML with every value escaped, and an export that needs no server.

An export is a directory that opens from `file://`, or one file for one group; no page of it requests anything.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import jinja2
from markupsafe import Markup

from nemo_rl.errors import DataError
from nemo_rl.viewer import (
    chart_pages,
    group_pages,
    overview_pages,
    rollout_pages,
    runs_page,
    step_pages,
    timeline_page,
)
from nemo_rl.viewer.charts import format_number
from nemo_rl.viewer.check import check_page
from nemo_rl.viewer.compare import compare_page
from nemo_rl.viewer.conversation import show
from nemo_rl.viewer.markup import mark_matches, style
from nemo_rl.viewer.page import Page, address
from nemo_rl.viewer.viewer_sources import ViewerSource, ViewerSources

MAX_COMPARED = 8  # runs on one page of a comparison
PAGES: Mapping[str, Callable[[ViewerSource, Mapping[str, str]], Page]] = {
    "validation": step_pages.validation_page,
    "check": lambda source, values: check_page(source),
    "groups": group_pages.groups_page,
    "timeline": timeline_page.timeline_page,
}
SPLIT_PAGES: Mapping[str, Callable[[ViewerSource, str, Mapping[str, str]], Page]] = {
    "group": group_pages.group_page,
    "difference": group_pages.difference_page,
    "rollouts": rollout_pages.rollouts_page,
}
ROLLOUT_PAGES: Mapping[str, Callable[[ViewerSource, str, str, Mapping[str, str]], Page]] = {
    "rollout": rollout_pages.rollout_page,
    "text": rollout_pages.text_page,
}
DIRECTORY = Path(__file__).parent
STATIC = DIRECTORY / "static"


def kind_of(address: str) -> str:
    """Return the kind of page of an address.

    Example: "/s/exp_001/group/train?step=3" is a "group", "/s/exp_001" a "source".
    """
    path = _split(address)
    return path[2] if len(path) > 2 else "source" if path[0] == "s" else path[0]


def find_page(sources: ViewerSources, address: str) -> Page:
    """Return the page of an address. Raises DataError for an unknown one, ConfigError for runs that do not compare."""
    path, parameters = _split(address), parse_qsl(urlsplit(address).query, keep_blank_values=True)
    values = dict(parameters)
    if path == [""]:
        return runs_page.runs_page(sources, values)
    if path == ["charts"]:
        return chart_pages.charts_page(sources, parameters)
    if path == ["compare"]:
        names = [value for name, value in parameters if name in ("run", "a", "b") and value]
        return compare_page([sources.get(name) for name in dict.fromkeys(names[:MAX_COMPARED])])
    if path[0] == "s" and len(path) > 1 and (page := _find_of(sources.get(path[1]), path[2:], values)):
        return page
    raise DataError(f"there is no page {unquote(urlsplit(address).path)}")


def _find_of(source: ViewerSource, path: list[str], values: Mapping[str, str]) -> Page | None:
    match path:
        case []:
            return overview_pages.source_page(source, values)
        case ["step", step] if step.isascii() and step.isdigit() and len(step) < 10:
            return step_pages.step_page(source, int(step))
        case [name] if name in PAGES:
            return PAGES[name](source, values)
        case [name, split] if name in SPLIT_PAGES:
            return SPLIT_PAGES[name](source, split, values)
        case [name, split, key] if name in ROLLOUT_PAGES:
            return ROLLOUT_PAGES[name](source, split, key, values)
    return None


def _split(address: str) -> list[str]:
    try:
        path = urlsplit(address).path
    except ValueError as error:  # "//[" is no host
        raise DataError(f"there is no page {unquote(address)}") from error
    return [unquote(part) for part in path.strip("/").split("/")]


class Renderer:
    """Renders pages; `resolve` turns the address of a page into a link, or into None if the page does not exist."""

    def __init__(self, resolve: Callable[[str], str | None] | None = None, *, static: str = "/static") -> None:
        self._resolve = resolve or (lambda address: address)
        self._is_export = resolve is not None
        self._static = static
        self._environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(DIRECTORY / "templates"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters |= {
            "number": _number,
            "show": _show,
            "styled": style,
            "marked": mark_matches,
            "date": _date,
            "duration": _duration,
        }
        self._environment.globals |= {"address": address, "link": self.link, "resolve": self._resolve}

    def link(self, address: str, text: object, *, kind: str = "") -> Markup:
        """Return a link, or plain text if the page does not exist."""
        target = self._resolve(address)
        kind = Markup(' class="{}"').format(kind) if kind else Markup("")
        if target is None:
            return Markup("<span{}>{}</span>").format(kind, text)
        return Markup('<a{} href="{}">{}</a>').format(kind, target, text)

    def page(self, page: Page, *, version: int = 0, head: Markup | str = "") -> str:
        """Return the HTML of a page; `version` is that of the live source that it shows."""
        template = self._environment.get_template(page.template)
        return template.render(
            **page.context,
            title=show(page.title),
            live=page.live,
            version=version,
            is_export=self._is_export,
            static=self._static,
            head=head,
        )


def encode(html: str) -> bytes:
    """Return UTF-8; characters that cannot be encoded are replaced."""
    return html.encode("utf-8", errors="replace")


def _number(value: Any) -> str:
    if value is None:
        return "–"
    try:
        return format_number(float(value)) if isinstance(value, int | float) else _show(value)
    except OverflowError:  # an integer of hundreds of digits
        return _show(value)


def _date(seconds: float | None) -> str:
    """Return a time as the clock of this machine shows it."""
    return "–" if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _duration(seconds: float | None) -> str:
    """Return a duration in its two largest units.

    Example: 7980 is "2 h 13 min", 59.6 is "1 min 0 s".
    """
    if seconds is None:
        return "–"
    whole = round(seconds)
    for unit, size, rest, rest_size in (("d", 86_400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // rest_size} {rest}"
    return f"{whole} s"


def _show(value: object, limit: int = 2000) -> str:
    text = value if isinstance(value, str) else str(value)
    return show(text[:limit]) + ("…" if len(text) > limit else "")
