"""The group of all commands."""

import os


def test_help_has_a_whole_sentence_for_each_verb_in_the_order_of_use(call):
    _, _, lines = call("--help").partition("Commands:\n")
    verbs = [line.split(maxsplit=1) for line in lines.splitlines()]
    assert [verb for verb, _ in verbs] == [
        "init", "run", "watch", "status", "report", "checkpoint", "timeline", "doctor", "worker",
        "schedule", "simulate", "profile", "plan",
    ]  # fmt: skip
    assert all(words.endswith(".") and not words.endswith("...") for _, words in verbs)


def test_the_name_of_a_file_that_is_no_utf_8_is_printed_as_an_error_would_show_it(call, tmp_path):
    path = tmp_path / os.fsdecode(b"caf\xe9.py")
    assert "caf\\udce9.py" in call("init", "gpt2", "-o", path)
    assert path.exists()
