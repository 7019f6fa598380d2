"""An export of the site that needs no server: a directory that opens from `file://`, or one file for one group.

No page of an export requests anything from a server.
"""

import base64
import hashlib
import logging
import shutil
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path

from markupsafe import Markup

from nemo_rl.errors import ConfigError, DataError, describe_error
from nemo_rl.viewer import group_pages
from nemo_rl.viewer.page import Page
from nemo_rl.viewer.site import STATIC, Renderer, encode, find_page, kind_of
from nemo_rl.viewer.viewer_sources import ViewerSources

logger = logging.getLogger(__name__)

MAX_PAGES = 3000
SHARES = {
    "group": 0.3,
    "rollout": 0.3,
    "rollouts": 0.1,
    "text": 0.1,
    "charts": 0.1,
    "difference": 0.1,
}  # largest share of pages per kind
PER_PAGE = {
    "group": 12,
    "rollout": 8,
    "rollouts": 4,
    "text": 4,
    "charts": 16,
    "difference": 4,
}  # new pages of a kind that one page may lead to
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


def export_site(sources: ViewerSources, directory: Path, *, max_pages: int = MAX_PAGES) -> int:
    """Write the pages of all sources and return their number; a page that cannot be shown says why.

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
            html = renderer.page(_problem_page("Not there", str(error)))
        except Exception as error:  # one page fails; the others are written  # noqa: BLE001
            logger.warning("export: %s cannot be shown: %s", address, describe_error(error))
            html = renderer.page(_problem_page("Cannot be shown", describe_error(error)))
        (directory / walk.names[address]).write_bytes(encode(html))
    (directory / MARKER).write_text(f"{len(walk.names)} pages, {walk.num_omitted} links omitted\n")
    return len(walk.names)


def export_group(sources: ViewerSources, source_id: str, group: str, step: int | None, path: Path) -> None:
    """Write one group as one file that needs no other. Raises DataError for a group that is not there."""
    values = {"group": group, "step": "" if step is None else str(step)}
    page = group_pages.group_page(sources.get(source_id), "train", values)
    style = (STATIC / "app.css").read_text()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"{POLICY}style-src 'sha256-{digest}'"
    head = Markup('<meta http-equiv="Content-Security-Policy" content="{}"><style>').format(policy)
    html = Renderer(lambda address: None, static="").page(page, head=head + Markup(style) + Markup("</style>"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode(html))


def _problem_page(heading: str, problem: str) -> Page:
    return Page("problem.html", heading, {"heading": heading, "problem": problem})


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
