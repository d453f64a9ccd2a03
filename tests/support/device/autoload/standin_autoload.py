"""Torch calls `load` when it is imported, in every process that has this folder on its path."""

import importlib.util
import sys
from pathlib import Path


def load():
    path = Path(__file__).resolve().parent.parent / "standin.py"
    spec = importlib.util.spec_from_file_location("standin", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["standin"] = module
    spec.loader.exec_module(module)
    module.load()
