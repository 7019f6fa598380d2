from nemo_rl.observability.progress import escape_control_chars, make_sample_table, render_table


def test_long_text_is_cut_in_its_middle() -> None:
    assert escape_control_chars("abcdefgh", 5) == "ab…gh"
    assert escape_control_chars("abcde", 5) == "abcde"


def test_control_characters_are_spelled_out() -> None:
    assert escape_control_chars("a\x1b[2Jb\x07\nc") == "a\\x1b[2Jb\\x07\nc"


def test_markup_is_shown_as_text() -> None:
    text = render_table(make_sample_table(("prompt", "[reward]"), [("[bold]hi[/bold] [/nonsense]", 0.5)], title="[x]"))
    for part in ("[bold]hi[/bold] [/nonsense]", "[reward]", "0.5", "[x]"):
        assert part in text
    assert "\x1b" not in text


def test_text_begins_on_a_line_of_its_own() -> None:
    assert render_table(make_sample_table(("a",), [("b",)])).startswith("\n")
