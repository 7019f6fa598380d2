"""Templates: pages to HTML, every value escaped."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from nemo_rl.viewer import pages
from nemo_rl.viewer.charts import format_number
from nemo_rl.viewer.conversation import show

DIRECTORY = Path(__file__).parent
STATIC = DIRECTORY / "static"


class Renderer:
    """Renders pages; `resolve` turns the address of a page into a link, or None where there is no such page."""

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
        self._environment.filters |= {"number": _number, "show": _show}
        self._environment.globals |= {"address": pages.address, "link": self.link, "resolve": self._resolve}

    def link(self, address: str, text: object, *, kind: str = "") -> Markup:
        """Return a link, or plain text where the page is not there."""
        target = self._resolve(address)
        kind = Markup(' class="{}"').format(kind) if kind else Markup("")
        if target is None:
            return Markup("<span{}>{}</span>").format(kind, text)
        return Markup('<a{} href="{}">{}</a>').format(kind, target, text)

    def page(self, page: pages.Page, *, version: int = 0, head: Markup | str = "") -> str:
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
    """Return UTF-8; what cannot be encoded is replaced."""
    return html.encode("utf-8", errors="replace")


def _number(value: Any) -> str:
    if value is None:
        return "–"
    return format_number(float(value)) if isinstance(value, int | float) else _show(value)


def _show(value: object, limit: int = 2000) -> str:
    text = value if isinstance(value, str) else str(value)
    return show(text[:limit]) + ("…" if len(text) > limit else "")
