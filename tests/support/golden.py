"""Texts that tests expect, each whole in a file of `golden/` beside its test.

    golden("plan", call("plan", profile))

With `pytest --renew` a text that differs is written into its file, and git shows what has changed.
"""

import difflib
import re

import pytest


def masked(text, varying):
    """Put names in the place of what differs from run to run or from machine to machine.

    It maps a name to what is replaced: a path or another text, or a pattern.
    """
    for name, what in varying.items():
        pattern = what if isinstance(what, re.Pattern) else re.escape(str(what))
        text = re.sub(pattern, f"<{name}>", text)
    return text


def differences(came, expected, path):
    """Return the lines in which a text differs from its file, and what to do."""
    lines = [text.splitlines(keepends=True) for text in (expected, came)]
    found = "".join(difflib.unified_diff(*lines, str(path), "what came"))
    return f"{found}\nIf this is right, `pytest --renew` writes {path} anew; then look at git diff."


class Golden:
    """Compares texts with the files of a folder, or renews these, and notes that for the report."""

    def __init__(self, folder, renew, properties):
        self.folder, self.renew, self.properties = folder, renew, properties

    def __call__(self, name, text, **varying):
        path, text = self.folder / f"{name}.txt", masked(text, varying)
        expected = path.read_bytes().decode() if path.exists() else ""
        if path.exists() and text == expected:
            return
        if not self.renew:
            pytest.fail(differences(text, expected, path), pytrace=False)
        self.folder.mkdir(exist_ok=True)
        path.write_bytes(text.encode())
        self.properties.append(("renewed", str(path)))


def tell_renewed(terminal):
    """Say in the end which files are written anew, also by other processes."""
    for report in terminal.getreports("passed"):
        for name, path in report.user_properties:
            if name == "renewed":
                terminal.write_line(f"{path} is written anew: look at git diff")
