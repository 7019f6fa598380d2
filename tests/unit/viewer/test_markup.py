import html
import re

import pytest

from nemo_rl.viewer.markup import mark_matches, style
from tests.unit.viewer.hostile import TEXTS

ANSWER = """## Plan

1. Add **both** numbers with `add`.
- then stop

```python
def add(a, b):  # the <sum>
    return a + "x"
```
| a | b |
2*3*4 is 24, and a_b_c stays.
"""


@pytest.mark.parametrize("text", [ANSWER, *TEXTS, "```\nno end", "", "`", "** a**", "a\r\nb\x85c"])
def test_styled_text_is_the_text(text: str) -> None:
    assert html.unescape(re.sub(r"<[^>]*>", "", style(text))) == text


def test_styled_text_has_only_the_tags_of_the_styles() -> None:
    tags = set(re.findall(r"</?([a-z]+)[^>]*>", "".join(map(style, TEXTS))))
    assert tags <= {"code", "i", "b", "strong", "span"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a **b**", "a <strong><i>**</i>b<i>**</i></strong>"),
        ("`x < y`", "<code><i>`</i>x &lt; y<i>`</i></code>"),
        ("2**3**4 * 5", "2<strong><i>**</i>3<i>**</i></strong>4 * 5"),
        ("# Top\n", "<strong class=heading><i># </i>Top</strong>\n"),
        ("- one", "<b>- </b>one"),
        (
            "```py\nif x:\n```\n",
            "<i>```py\n</i><code class=block><span class=keyword>if</span> x:\n<i>```\n</i></code>",
        ),
        ("[a](javascript:b)", "[a](javascript:b)"),
    ],
)
def test_markdown_is_styled_where_it_stands(text: str, expected: str) -> None:
    assert style(text) == expected


def test_matches_are_marked_in_any_case_and_escaped() -> None:
    assert mark_matches("A<b> a<B>", "<b>") == "A<mark>&lt;b&gt;</mark> a<mark>&lt;B&gt;</mark>"
    assert mark_matches("<i>", "") == "&lt;i&gt;"
