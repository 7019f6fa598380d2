"""Tags in a model's text, `<answer>...</answer>`, found in time linear in the length of the text.

A regular expression with a lazy middle searches for each opening tag's end again: 64 kB of `<answer>` take seconds.
"""

from collections.abc import Iterator


def find_tags(text: str, *names: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the content of each tag, from left to right; a tag ends at the next end of its name.

    Example: `find_tags("<a>1<a>2</a> <b>", "a", "b")` yields ("a", "1<a>2").
    """
    position, left = 0, set(names)
    while left:
        starts = {name: start for name in left if (start := text.find(f"<{name}>", position)) >= 0}
        left = set(starts)
        for name in sorted(left, key=starts.__getitem__):
            first = starts[name] + len(name) + 2
            if (end := text.find(f"</{name}>", first)) >= 0:
                yield name, text[first:end]
                position = end + len(name) + 3
                break
            left.discard(name)  # nor do later ones end
        else:
            return


def last_tag(text: str, name: str) -> str | None:
    """Return the content of the last tag that ends; None if there is none."""
    contents = [content for _, content in find_tags(text, name)]
    return contents[-1] if contents else None
