"""What a machine finds about itself: its source files, and whether it shares a folder."""

import json
import os
import re

import pytest

from pipedream_rt.doctor.facts import digest_of, facts, token_file


def test_a_digest_of_source_files(tmp_path):
    assert digest_of(tmp_path) == ""
    (tmp_path / "a.py").write_text("x = 1")
    before = digest_of(tmp_path)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "b.py").write_text("x = 1")
    assert digest_of(tmp_path) == before
    (tmp_path / "a.py").write_text("x = 2")
    assert digest_of(tmp_path) != before


def test_what_is_no_file_has_no_part_in_a_digest(tmp_path):
    """A pipe would wait for ever."""
    (tmp_path / "a.py").write_text("a = 1")
    before = digest_of(tmp_path)
    os.mkfifo(tmp_path / "b.py")
    (tmp_path / "c.py").symlink_to("/dev/zero")
    (tmp_path / "d.py").symlink_to("nothing")
    assert digest_of(tmp_path) == before


def test_a_digest_is_that_of_names_and_contents_and_of_nothing_else(tmp_path):
    for name in ("one", "two", "renamed", "moved"):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "sub" / "a.py").write_text("x = 1")
        (tmp_path / name / "b.py").write_text("y = 1")
    whole = digest_of(tmp_path / "one")
    assert digest_of(tmp_path / "two") == whole
    (tmp_path / "renamed" / "b.py").rename(tmp_path / "renamed" / "c.py")
    (tmp_path / "moved" / "sub").rename(tmp_path / "moved" / "other")
    assert len({whole, *(digest_of(tmp_path / name) for name in ("renamed", "moved"))}) == 3
    for folder in ("__pycache__", ".git", "environment"):
        (tmp_path / "two" / folder).mkdir()
        (tmp_path / "two" / folder / "c.py").write_text("z = 1")
    (tmp_path / "two" / "environment" / "pyvenv.cfg").touch()
    (tmp_path / "two" / "notes.txt").write_text("z = 1")
    (tmp_path / "two" / "data.py").write_bytes(bytes((1 << 20) + 1))
    assert digest_of(tmp_path / "two") == whole


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda path: None, "ok"),
        (lambda path: path.write_text("of another job"), "has another file of the same name"),
        (lambda path: path.unlink(), "No such file or directory: .*-doctor-01234567$"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "it is no ordinary file: .*-01234567$"),
        (lambda path: path.write_text("x" * 5000), "it has 5000 bytes, more than .*-01234567$"),
    ],
    ids=["shared", "another's", "not there", "a pipe", "large"],
)
def test_whether_a_folder_is_shared_is_seen_by_the_file_in_it(tmp_path, change, said):
    token = "0123456789"
    path = token_file(str(tmp_path), token)
    path.write_text(token)
    change(path)
    before = sorted(tmp_path.iterdir())
    assert re.fullmatch(f"(?s:.*)^{said}", facts(str(tmp_path), token, "")["folder"], re.M)
    assert sorted(tmp_path.iterdir()) == before


def test_what_is_not_asked_for_is_left_empty_and_the_rest_can_be_sent():
    found = facts("", "token", "")
    assert (found["folder"], found["source"]) == ("", "")
    assert found["memory"] > 1 << 20
    assert 0 < found["files"] <= found["files_at_most"] or found["files_at_most"] == -1
    assert json.loads(json.dumps(found)) == found
