"""The secret that ranks of one machine hand to each other."""

import tempfile
from datetime import timedelta

import pytest

from pipedream_rt.cluster import torchrun
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import ConfigError


@pytest.mark.parametrize("folder", ["open", "a file", "long"])
def test_a_user_without_a_folder_for_sockets_is_told_what_to_set(folder, tmp_path, monkeypatch):
    """As where somebody else has made the folder that this user's sockets would be in."""
    place = tmp_path
    if folder == "long":
        place = tmp_path / ("x" * 120)
        place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    own = place / f"pipedream-rt-{torchrun.os.geteuid()}"
    if folder == "a file":
        own.touch()
    elif folder == "open":
        own.mkdir()
        own.chmod(0o777)
    with pytest.raises(ConfigError, match="set TMPDIR to a folder of yours"):
        torchrun._hand_over(None, "key", 1, Deadline(timedelta(seconds=5)))
