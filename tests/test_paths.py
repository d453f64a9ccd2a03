"""Paths as people give them."""

import os
from pathlib import Path

import pytest

from pipedream_rt.errors import ConfigError
from pipedream_rt.paths import given_path, is_address, refuse_address


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("RUN", "one")
    monkeypatch.setenv("BUCKET", "s3://bucket")
    monkeypatch.setenv("BEHIND", "~/behind")
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.delenv("NOT_SET", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("run/a", "run/a"),
        ("/run/a", "/run/a"),
        ("../a", "../a"),
        ("~/run", "/home/me/run"),
        ("~", "/home/me"),
        ("~root/run", os.path.expanduser("~root/run")),
        ("$HOME/run", "/home/me/run"),
        ("${HOME}/a-$RUN.html", "/home/me/a-one.html"),
        ("$BEHIND/run", "/home/me/behind/run"),
        ("a~b", "a~b"),
        ("costs-5$", "costs-5$"),
        ("$5", "$5"),
        ("12:30:00/run", "12:30:00/run"),
        ("run/lr:/0.1", "run/lr:/0.1"),
        ("lr:0.1", "lr:0.1"),
    ],
)
def test_a_path_is_what_a_shell_makes_of_it(kind, given, meant):
    assert given_path(kind(given), "the folder") == Path(meant)


@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.parametrize(
    "given",
    [
        "s3://bucket/run", "gs://bucket/run", "az://there/run", "abfss://a@b.example/run",
        "hdfs://name:8020/run", "http://there.example/run", "simplecache::s3://bucket/run",
        "S3://bucket/run", "dbfs:/run", "C:/run", "$BUCKET/run",
    ],
)  # fmt: skip
def test_an_address_is_no_path(kind, given):
    with pytest.raises(ConfigError, match=r"^the folder is '.*', an address, where a path"):
        given_path(kind(given), "the folder")


@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.parametrize(
    "given", ["file:///data/run", "file:/data/run", "file://localhost/data/run"]
)
def test_of_a_local_address_the_path_is_said(kind, given):
    with pytest.raises(ConfigError, match=r"give the path itself, '/data/run'$"):
        given_path(kind(given), "the folder")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("$NOT_SET/run", "variable NOT_SET is not set"),
        ("run/${NOT_SET}", "variable NOT_SET is not set"),
        ("$EMPTY/run", "variable EMPTY is not set, or is empty"),
        ("~nobody-of-that-name/run", "no home folder for '~nobody-of-that-name'"),
        ("", "must be the path of a file or folder, not ''"),
        ("a\0b", r"must be the path of a file or folder, not 'a\\x00b'"),
        (b"run", "must be the path of a file or folder, not b'run'"),
        (5, "must be the path of a file or folder, not 5"),
        (None, "must be the path of a file or folder, not None"),
    ],
)
def test_what_leads_nowhere_is_refused(given, words):
    with pytest.raises(ConfigError, match=f"^the folder .*{words}"):
        given_path(given, "the folder")


@pytest.mark.parametrize("kind", [str, Path])
def test_what_is_there_by_that_name_is_meant(tmp_path, kind):
    for name in ("a$NOT_SET", "b$RUN", "exp:", "~of-mine"):
        (tmp_path / name).mkdir()
    for given in ("a$NOT_SET/run", "b$RUN", "exp:/run", "~of-mine/run"):
        assert given_path(kind(given), "the folder") == Path(given)
    assert given_path(kind("a$NOT_SET/$RUN"), "the folder") == Path("a$NOT_SET/one")


def test_two_slashes_are_an_address_whatever_is_there(tmp_path):
    (tmp_path / "s3:").mkdir()
    assert is_address("s3://bucket/run")
    assert not is_address("s3:/bucket/run")
    with pytest.raises(ConfigError, match=r"^output_dir is 's3://bucket', an address"):
        refuse_address("s3://bucket", "output_dir")
