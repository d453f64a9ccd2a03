import json

import pytest
from hypothesis import given, settings
from support.profiles import profiles

from pipedream_rt.errors import ConfigError
from pipedream_rt.planning import files
from pipedream_rt.planning.profile import LayerCosts, Profile


@settings(max_examples=30)
@given(profile=profiles(branches=True))
def test_what_is_saved_is_loaded(tmp_path_factory, profile):
    path = tmp_path_factory.mktemp("profiles") / "model.profile"
    files.save(profile, path)
    assert files.load(path) == profile


def test_facts_are_kept_and_a_person_can_read_the_file(tmp_path):
    layers = (LayerCosts(name="a", forward=0.25), LayerCosts(name="b", forward=0.0))
    profile = Profile(layers=layers, micro_batch=8, process_bytes=1e8, facts={"dtype": "float32"})
    files.save(profile, tmp_path / "x")
    assert files.load(tmp_path / "x") == profile
    assert (tmp_path / "x").read_text().splitlines() == [
        '{"pipedream-rt profile": 1, "micro_batch": 8, "process_bytes": 100000000.0, '
        '"facts": {"dtype": "float32"}, "layers": [',
        ' {"forward": 0.25, "name": "a"},',
        ' {"forward": 0.0, "name": "b"}',
        "]}",
    ]


def test_an_address_is_no_file():
    profile = Profile(layers=(LayerCosts(name="a", forward=0.25),))
    for call in (files.load, lambda path: files.save(profile, path)):
        with pytest.raises(ConfigError, match="the file of the profile is 's3://b/a', an address"):
            call("s3://b/a")


GOOD = {"pipedream-rt profile": 1, "layers": [{"name": "a", "forward": 1}]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pipedream-rt profile": 2}, "no profile of format 1"),
        ({"layers": {}}, "'layers' must be a list"),
        ({"layers": []}, "there is no layer"),
        ({"layers": [{"name": "a", "forward": 1, "x\x1b": 2}]}, "a layer has 'x.*1b', none of"),
        ({"layers": [{"name": "a"}]}, "every layer needs a 'name' and a 'forward'"),
        ({"layers": [{"name": 3, "forward": 1}]}, "every layer needs a 'name'"),
        ({"layers": [{"name": "a", "forward": -1}]}, "forward of layer 'a' must be a number"),
        ({"layers": [{"name": "a", "forward": True}]}, "forward of layer 'a' must be a number"),
        ({"layers": [{"name": "a", "forward": 1e99}]}, "forward of layer 'a' must be a number"),
        ({"layers": [{"name": "a", "forward": 10**400}]}, "forward of layer 'a' must be a number"),
        ({"layers": [{"name": "a", "forward": 1}] * 2}, "two layers are called 'a'"),
        ({"edges": [[0]]}, "'edges' must be a list of pairs"),
        ({"edges": [[0, 1]]}, "an edge goes from a layer to a later one, not from 0 to 1 of 1"),
        ({"micro_batch": 0}, "'micro_batch' is 0"),
        ({"process_bytes": -1}, "'process_bytes' is -1"),
        ({"facts": {"a": 1}}, "'facts' must be an object of texts"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(tmp_path, change, message):
    path = tmp_path / "model.profile"
    path.write_text(json.dumps({**GOOD, **change}))
    with pytest.raises(ConfigError, match=message) as found:
        files.load(path)
    assert str(path) in str(found.value)


@pytest.mark.parametrize("text", ["", "\n", "{", "[" * 10**5, "{" * 10**5, "\x00", "node"])
def test_what_is_no_profile_is_refused(tmp_path, text):
    path = tmp_path / "model.profile"
    path.write_text(text)
    with pytest.raises(ConfigError):
        files.load(path)


def test_files_that_cannot_be_read_or_written_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        files.load(tmp_path / "none")
    with pytest.raises(ConfigError, match="Is a directory"):
        files.load(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        files.load(tmp_path / "binary")
    with pytest.raises(ConfigError, match="cannot be written"):
        files.save(Profile(layers=(LayerCosts(name="a", forward=1.0),)), tmp_path / "no" / "x")
