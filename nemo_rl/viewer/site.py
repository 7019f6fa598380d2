"""The viewer's site: its pages by address, their HTML with every value escaped, and an export that needs no server.

An export is a directory that opens from `file://`, or one file for one group; no page of it requests anything.
"""

import base64
import hashlib
import shutil
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import jinja2
from markupsafe import Markup

from nemo_rl.errors import ConfigError, DataError
from nemo_rl.viewer import pages
from nemo_rl.viewer.charts import format_number
from nemo_rl.viewer.check import check_page
from nemo_rl.viewer.compare import compare_page
from nemo_rl.viewer.conversation import show
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


MAX_PAGES = 3000
SHARES = {"group": 0.3, "rollout": 0.3, "rollouts": 0.1, "text": 0.1}  # of the pages that may be of a kind
PER_PAGE = {"group": 12, "rollout": 8, "rollouts": 4, "text": 4}  # new pages of a kind that one page may lead to
POLICY = "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; "
MARKER = ".nemo-rl-export"  # only a directory with it is replaced


@dataclass(slots=True)
class _Walk:
    """A walk over the pages from the first on, breadth first; bounded by kind, so that all steps are covered."""

    max_pages: int
    names: dict[str, str] = field(default_factory=dict)  # file by address
    pending: deque[str] = field(default_factory=deque)
    num_omitted: int = 0
    _totals: Counter[str] = field(default_factory=Counter)
    _on_page: Counter[str] = field(default_factory=Counter)

    def next(self) -> str:
        """Return the address of the next page to write."""
        self._on_page.clear()
        return self.pending.popleft()

    def resolve(self, address: str) -> str | None:
        """Return the file of an address, which is then written too; None above a bound."""
        plain, _, anchor = address.partition("#")
        if plain not in self.names:
            kind = kind_of(plain)
            is_full = (
                len(self.names) >= self.max_pages
                or self._totals[kind] >= self.max_pages * SHARES.get(kind, 1.0)
                or self._on_page[kind] >= PER_PAGE.get(kind, self.max_pages)
            )
            if is_full:
                self.num_omitted += 1
                return None
            self._totals[kind] += 1
            self._on_page[kind] += 1
            digest = hashlib.sha256(plain.encode(errors="replace")).hexdigest()[:16]
            self.names[plain] = f"page-{digest}.html" if self.names else "index.html"
            self.pending.append(plain)
        return self.names[plain] + (f"#{anchor}" if anchor else "")


def export(sources: Sources, directory: Path, *, max_pages: int = MAX_PAGES) -> int:
    """Write the pages of all sources and return their number.

    Pages are followed breadth first from the list of runs on: overviews and steps first, rollouts as far as the limit
    allows; links to omitted pages are plain text. Raises ConfigError for a directory that holds other files.
    """
    _prepare(directory)
    walk = _Walk(max_pages)
    renderer = Renderer(walk.resolve, static="static")
    walk.resolve("/")
    while walk.pending:
        address = walk.next()
        try:
            html = renderer.page(find_page(sources, address))
        except (DataError, ConfigError) as error:
            problem = pages.Page("problem.html", "Not there", {"heading": "Not there", "problem": str(error)})
            html = renderer.page(problem)
        (directory / walk.names[address]).write_bytes(encode(html))
    (directory / MARKER).write_text(f"{len(walk.names)} pages, {walk.num_omitted} links omitted\n")
    return len(walk.names)


def export_group(sources: Sources, source_id: str, group: str, step: int | None, path: Path) -> None:
    """Write one group as one file that needs no other. Raises DataError for a group that is not there."""
    values = {"group": group, "step": "" if step is None else str(step)}
    page = pages.group_page(sources.get(source_id), "train", values)
    style = (STATIC / "app.css").read_text()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"{POLICY}style-src 'sha256-{digest}'"
    head = Markup('<meta http-equiv="Content-Security-Policy" content="{}"><style>').format(policy)
    html = Renderer(lambda address: None, static="").page(page, head=head + Markup(style) + Markup("</style>"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode(html))


def _prepare(directory: Path) -> None:
    if directory.exists() and any(directory.iterdir()):
        if not (directory / MARKER).exists():
            raise ConfigError("--export", str(directory), "holds other files; name a new or an empty directory")
        shutil.rmtree(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / MARKER).write_text("unfinished\n")
    (directory / "static").mkdir()
    for name in ("app.css", "app.js"):
        shutil.copyfile(STATIC / name, directory / "static" / name)
