"""Notes which functions of the library a test enters, in whichever process and thread.

Python imports this at its start where the folder is on PYTHONPATH. `MUTANTS_ENTERED` names a
folder: its file `now` has the name of the file to write to, one for each test.
"""

import os
import sys
import threading

_FOLDER = os.environ.get("MUTANTS_ENTERED")
_ROOT = os.environ.get("MUTANTS_ROOT", "")

if _FOLDER:
    seen = set()

    def note(frame, event, argument):
        if event != "call" or frame.f_code in seen:
            return
        code = frame.f_code
        seen.add(code)
        if not code.co_filename.startswith(_ROOT):
            return
        line = f"{code.co_filename[len(_ROOT) :]}:{code.co_firstlineno}\n"
        try:
            with open(os.path.join(_FOLDER, "now")) as now:
                name = now.read()
            file = os.open(
                os.path.join(_FOLDER, name), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666
            )
            os.write(file, line.encode())
            os.close(file)
        except (OSError, ValueError):
            pass

    os.register_at_fork(after_in_child=seen.clear)
    threading.setprofile(note)
    sys.setprofile(note)
