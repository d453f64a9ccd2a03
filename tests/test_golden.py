"""A text is compared with its file, whole; `--renew` writes the file."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.golden import Golden, tell_renewed

TESTS = Path(__file__).parent


def compared(folder, text, renew=False, **varying):
    golden = Golden(folder / "golden", renew, [])
    golden("name", text, **varying)
    return golden.properties


def test_what_differs_is_shown_with_what_to_do_until_it_is_renewed(tmp_path):
    file = tmp_path / "golden" / "name.txt"
    renewed = [("renewed", str(file))]
    assert compared(tmp_path, "one\ntwo\n", renew=True) == renewed
    assert compared(tmp_path, "one\ntwo\n") == compared(tmp_path, "one\ntwo\n", renew=True) == []
    for other in ("one\ntoo\n", "one\ntwo", "one\ntwo \n", "one\r\ntwo\n", "one\n", ""):
        with pytest.raises(pytest.fail.Exception, match=r"`pytest --renew` writes .*name.txt anew"):
            compared(tmp_path, other)
    with pytest.raises(pytest.fail.Exception, match=r"\n one\n-two\n\+too\n"):
        compared(tmp_path, "one\ntoo\n")
    assert file.read_text() == "one\ntwo\n"
    assert compared(tmp_path, "one\n", renew=True) == renewed
    assert file.read_text() == "one\n"


@pytest.mark.parametrize("text", ["one", ""])
def test_a_text_without_a_file_fails(tmp_path, text):
    with pytest.raises(pytest.fail.Exception, match="--renew"):
        compared(tmp_path, text)
    assert list(tmp_path.iterdir()) == []


def test_what_varies_has_a_name(tmp_path):
    varying = {"run": tmp_path, "pid": re.compile(r"(?<=pid )\d+")}
    compared(tmp_path, f"{tmp_path}/a, pid 7, 7\n", renew=True, **varying)
    assert (tmp_path / "golden" / "name.txt").read_text() == "<run>/a, pid <pid>, 7\n"


def test_what_is_renewed_is_told_in_the_end():
    report = SimpleNamespace(user_properties=[("other", "b"), ("renewed", "a.txt")])
    said = []
    tell_renewed(SimpleNamespace(getreports=lambda kind: [report], write_line=said.append))
    assert said == ["a.txt is written anew: look at git diff"]


def test_every_file_is_that_of_a_test_beside_it():
    files = sorted(TESTS.rglob("golden/*.txt"))
    assert files
    for file in files:
        tests = "".join(path.read_text() for path in file.parent.parent.glob("test_*.py"))
        assert f'"{file.stem}"' in tests, file
