"""Texts of models as people read them: Markdown's headings, emphasis, code and tables are styled where they stand.

Nothing of the text is removed or moved: its marks stay, dimmed, so that what is shown is what was sampled, and can be
searched and copied. Links and HTML stay text.
"""

import re
from collections.abc import Iterator

from markupsafe import Markup, escape

_FENCE = re.compile(r"^ {0,3}(```+|~~~+)(.*)$")
_HEADING = re.compile(r"^(#{1,6} )(.+)$")
_BULLET = re.compile(r"^(\s*(?:[-*+]|\d{1,3}[.)]) )(.*)$", re.DOTALL)
_INLINE = re.compile(r"(?P<code>`[^`\n]+`)|(?P<strong>\*\*(?=\S)[^*\n]+?(?<=\S)\*\*)")
_KEYWORDS = re.compile(
    r"(?P<comment>(?:#|//|--) ?.*$)|(?P<string>\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*')"
    r"|(?P<keyword>\b(?:def|class|return|if|elif|else|for|while|in|import|from|as|with|try|except|raise|lambda|not|and|or"
    r"|None|True|False|function|const|let|var|null|true|false|int|void|new|public|static|select|where|async|await|fn)\b)"
    r"|(?P<number>\b\d+(?:\.\d+)?\b)"
)


def style(text: str) -> Markup:
    """Return the HTML of a text, escaped, with its Markdown styled.

    Example: "a **b**" is `a <strong><i>**</i>b<i>**</i></strong>`.
    """
    return Markup("").join(_blocks(text))


def mark_matches(text: str, needle: str) -> Markup:
    """Return the HTML of a text in which each occurrence of `needle` is marked, in any case."""
    if not needle:
        return escape(text)
    parts = re.split(f"({re.escape(needle)})", text, flags=re.IGNORECASE)
    return Markup("").join(
        Markup("<mark>{}</mark>").format(part) if number % 2 else escape(part) for number, part in enumerate(parts)
    )


def _blocks(text: str) -> Iterator[Markup]:
    fence, code = "", list[str]()
    for line in text.splitlines(keepends=True):
        match = _FENCE.match(line.rstrip("\n"))
        if fence and match and match[1].startswith(fence) and not match[2].strip():
            yield Markup("<code class=block>{}<i>{}</i></code>").format(_code("".join(code)), line)
            fence, code = "", []
        elif fence:
            code.append(line)
        elif match:
            fence, code = match[1], []
            yield Markup("<i>{}</i>").format(line)
        else:
            yield _line(line)
    if fence:
        yield Markup("<code class=block>{}</code>").format(_code("".join(code)))


def _line(line: str) -> Markup:
    if match := _HEADING.match(line):
        return (
            Markup("<strong class=heading><i>{}</i>{}</strong>").format(match[1], _inline(match[2]))
            + line[match.end() :]
        )
    if line.lstrip().startswith("|"):
        return Markup("<code class=row>{}</code>").format(line)
    if match := _BULLET.match(line):
        return Markup("<b>{}</b>{}").format(match[1], _inline(match[2]))
    return _inline(line)


def _inline(text: str) -> Markup:
    parts, at = [], 0
    for match in _INLINE.finditer(text):
        width, tag = (1, "code") if match["code"] else (2, "strong")
        mark, inner = match[0][:width], match[0][width:-width]
        parts += [
            escape(text[at : match.start()]),
            Markup("<{0}><i>{1}</i>{2}<i>{1}</i></{0}>").format(Markup(tag), mark, inner),
        ]
        at = match.end()
    return Markup("").join([*parts, escape(text[at:])])


def _code(text: str) -> Markup:
    """Return code with comments, strings, keywords and numbers of common languages in classes."""
    parts = []
    for line in text.splitlines(keepends=True):
        at = 0
        for match in _KEYWORDS.finditer(line.rstrip("\n")):
            kind = Markup(match.lastgroup)
            parts += [escape(line[at : match.start()]), Markup("<span class={}>{}</span>").format(kind, match[0])]
            at = match.end()
        parts.append(escape(line[at:]))
    return Markup("").join(parts)
