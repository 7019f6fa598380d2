from nemo_rl.errors import ConfigError, summarize_error


def test_an_unknown_key_names_the_nearest_known_one() -> None:
    error = ConfigError("grpo.num_prompt_per_step", 4, "unknown key", known=["num_prompts_per_step", "seed"])
    assert str(error) == "grpo.num_prompt_per_step = 4: unknown key; did you mean grpo.num_prompts_per_step?"


def test_an_unknown_value_names_the_nearest_known_one() -> None:
    error = ConfigError("data.train.task", "gdc", "unknown task", known=["gcd", "lcm"])
    assert str(error) == "data.train.task = 'gdc': unknown task; did you mean 'gcd'?"


def test_without_a_near_name_all_are_listed() -> None:
    assert str(ConfigError("a.b", 1, "no", known=["zz", "yy"])) == "a.b = 1: no; known: yy, zz"


def test_an_error_seen_from_further_out_has_the_whole_key() -> None:
    error = ConfigError("task", "gdc", "unknown task", known=["gcd"]).under("data.train")
    assert str(error) == "data.train.task = 'gdc': unknown task; did you mean 'gcd'?"


def test_a_cause_is_the_type_and_the_first_line_of_an_error() -> None:
    assert summarize_error(ValueError("\nfirst\nsecond")) == "ValueError: first"
    assert summarize_error(TimeoutError()) == "TimeoutError"


def test_a_long_path_is_shown_with_both_ends_and_a_shorter_one_whole() -> None:
    path = "/scratch/" + "x" * 271 + "/weights/model.safetensors"  # 306 characters and the quotes
    assert len(path) == 306
    assert str(ConfigError("a", path[:300], "no")) == f"a = {path[:300]!r}: no"
    shown = f"{repr(path)[:150]}[... 8 characters ...]{repr(path)[-150:]}"
    assert str(ConfigError("a", path, "no")) == f"a = {shown}: no"


def test_a_long_section_is_shown_with_both_ends() -> None:
    shown = f"[{'0, ' * 19}0,[... 180 characters ...] {'0, ' * 19}0]"
    assert str(ConfigError("a", [0] * 100, "no")) == f"a = {shown}: no"
