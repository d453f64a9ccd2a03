"""What is pickled for a worker can be read where the script is not."""

import sys
import types

import cloudpickle
from torch import nn

from pipedream_rt.models import shipping


def test_classes_of_a_script_that_multiprocessing_has_spawned_travel(monkeypatch):
    """There the script is called ``__mp_main__``, a name that no worker can import."""
    script = types.ModuleType("__mp_main__")
    monkeypatch.setitem(sys.modules, "__mp_main__", script)
    exec("class Layer(nn.Module):\n    width = 3\n", vars(script) | {"nn": nn}, found := {})
    layer = found["Layer"]
    layer.__module__, script.Layer = "__mp_main__", layer
    try:
        written, _ = shipping.dumps(layer())
    finally:
        cloudpickle.unregister_pickle_by_value(script)
    monkeypatch.delitem(sys.modules, "__mp_main__")
    assert cloudpickle.loads(written).width == 3
