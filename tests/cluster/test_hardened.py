"""Every way to start a job in a place as hard as a container: nothing to write to but one folder.

The root is read-only, there is neither a home nor a right nor IPv6, and ``/dev/shm`` is small.
"""

import os
import tempfile
from pathlib import Path

import pytest
from support import hardened
from support.hardened import OTHER_USER, others_can_run_python
from support.ways import CLI, RUN, SCRIPT, TORCHRUN, line_of

pytestmark = [pytest.mark.processes, pytest.mark.rights]


@pytest.fixture(scope="module", autouse=True)
def _can_be():
    if reason := hardened.why_not():
        pytest.skip(reason)


@pytest.fixture
def folder():
    """A folder with a short name, since names of sockets are short."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        (folder / "script.py").write_text(SCRIPT)
        yield folder


WORDS = {"script": [], "run": RUN, "torchrun": TORCHRUN}


@pytest.mark.parametrize(
    ("how", "shm", "tmpdir"),
    [
        ("script", "64k", "of somebody else"), ("run", "1m", "own"),
        ("torchrun", "64k", "of somebody else"),
    ],
)  # fmt: skip
def test_it_starts(how, shm, tmpdir, folder):
    place = folder / "tmp"
    place.mkdir(mode=0o700)
    if tmpdir != "own":  # then Python takes the folder in which the script is started
        os.chown(place, OTHER_USER + 1, OTHER_USER + 1)
    done = hardened.run(
        *WORDS[how], folder / "script.py", folder=folder, shm=shm, TMPDIR=place, HOME="/nowhere"
    )
    assert done.returncode == 0, done.stderr
    assert line_of(done.stdout, "losses")
    assert line_of(done.stdout, "parameters") == "parameters [72, 36]"


@pytest.mark.parametrize("how", WORDS)
def test_another_user_starts_it(how, folder):
    if not others_can_run_python():
        pytest.skip("other users cannot run this interpreter, which lies in a folder of root's")
    done = hardened.run(*WORDS[how], folder / "script.py", folder=folder, as_other_user=True)
    assert done.returncode == 0, done.stderr


def test_nothing_else_can_be_written_to(folder):
    """What the other tests go by."""
    code = (
        "import os, socket\n"
        "def may(place):\n"
        "    try: open(os.path.join(place, 'x'), 'w').close()\n"
        "    except OSError: return False\n"
        "    return True\n"
        "print([may(place) for place in ('.', '/', '/tmp', '/dev/shm', '/var/tmp')])\n"
        "try: print(socket.create_server(('::1', 0), family=socket.AF_INET6))\n"
        "except OSError: print('no IPv6')\n"
    )
    done = hardened.run("-c", code, folder=folder)
    assert done.stdout == "[True, False, False, True, False]\nno IPv6\n"


def test_the_doctor_tells_of_it(folder):
    done = hardened.run(*CLI, "doctor", "--rpc", folder=folder, TMPDIR=folder)
    assert done.returncode == 0, done.stderr
    for row in ("--  /dev/shm", "--  torch RPC"):
        assert row in done.stdout
