"""Contexts of torch that a recorded forward enters: kept, without effect, or refused by name."""

import importlib
import inspect

import pytest
import torch
import torch.nn.functional as F
from support.between import Forward, X, recorded
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pipedream_rt.errors import ConfigError

KEPT = {
    "torch.autograd.grad_mode.no_grad": (),
    "torch.autograd.grad_mode.set_grad_enabled": (False,),
    "torch.amp.autocast_mode.autocast": ("cpu", torch.bfloat16),
}
"""With the arguments of each. A program has them beside the steps under them."""

REFUSED = {
    "torch.autograd.grad_mode.inference_mode": (),
    "torch.autograd.graph.saved_tensors_hooks": (lambda t: t, lambda t: t),
    "torch.autograd.graph.save_on_cpu": (),
    "torch.autograd.graph.disable_saved_tensors_hooks": ("no",),
    "torch.autograd.graph.allow_mutation_on_saved_tensors": (),
    "torch.autograd.forward_ad.dual_level": (),
    "torch.autograd.anomaly_mode.detect_anomaly": (),
    "torch.autograd.anomaly_mode.set_detect_anomaly": (True,),
    "torch.nn.attention.sdpa_kernel": (SDPBackend.MATH,),
    "torch.nn.utils.parametrize.cached": (),
    "torch.backends.nnpack.flags": (False,),
    "torch.utils.flop_counter.FlopCounterMode": (None, 2, False),
    "torch.utils._python_dispatch.TorchDispatchMode": (),
}
"""A program cannot keep them."""

if hasattr(torch.autograd.graph, "node_creation_hook"):  # since torch 2.14
    REFUSED["torch.autograd.graph.node_creation_hook"] = (lambda node: None,)

NO_EFFECT = {
    "torch.autograd.grad_mode.enable_grad": (),
    "torch.autograd.grad_mode.set_multithreading_enabled": (False,),
    "torch.autograd.profiler.record_function": ("",),
    "torch.autograd.profiler.profile": (),
    "torch.profiler.profiler.profile": (),
    "torch.random.fork_rng": ([],),
    "torch.jit._fuser.optimized_execution": (False,),
    "torch.sparse.check_sparse_tensor_invariants": (),
    "torch.utils.checkpoint.set_checkpoint_early_stop": (False,),
    "torch.utils.checkpoint.set_checkpoint_debug_enabled": (False,),
    "torch.utils.module_tracker.ModuleTracker": (),
}
"""They change nothing of what dense operators compute on a CPU, beside what is on already."""

ELSEWHERE = (
    "torch.cuda.", "torch.xpu.", "torch.mtia.", "torch.accelerator.", "torch.cpu.", "torch.Stream",
    "torch.serialization.", "torch.package.", "torch.hub.", "torch.jit.", "torch.testing.",
    "torch.utils.data.", "torch.utils.hooks.", "torch.library.", "torch._", "torch.compiler._",
    "torch.utils._contextlib.", "torch.overrides.", "torch.utils.checkpoint.", "torch.device",
    "torch.utils._python_dispatch.Base", "torch.backends.mkl.",
    "torch.autograd.profiler.emit_", "torch.backends.__", "torch.ExcludeDispatchKeyGuard",
    "torch.autograd.grad_mode.enforce_grad_layout_policy",
)  # fmt: skip
"""Those of other devices, of files and of the inside of torch; and bases of other contexts."""

MODULES = [
    "", ".amp", ".autograd", ".autograd.forward_ad", ".autograd.grad_mode", ".autograd.graph",
    ".autograd.profiler", ".autograd.anomaly_mode", ".backends", ".backends.cpu", ".backends.mha",
    ".backends.mkl", ".backends.mkldnn", ".backends.nnpack", ".backends.opt_einsum",
    ".backends.quantized", ".compiler", ".func", ".jit", ".nn.attention", ".nn.init",
    ".nn.utils.parametrize", ".overrides", ".profiler", ".random", ".sparse", ".utils.checkpoint",
    ".utils.deterministic", ".utils.flop_counter", ".utils.module_tracker",
    ".utils._python_dispatch",
]  # fmt: skip


class Ours(TorchDispatchMode):
    """A mode of a user's that looks at operators."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def entering(name):
    """What enters the context of this name, with its arguments."""
    module, _, attribute = name.rpartition(".")
    context = getattr(importlib.import_module(module), attribute)
    arguments = {**KEPT, **REFUSED, **NO_EFFECT}[name]
    return lambda: Ours() if context is TorchDispatchMode else context(*arguments)


class Tripled(TorchFunctionMode):
    """A mode of a user's that changes what a function is given."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        return made * 3 if func is torch.tanh else made


class Model(nn.Module):
    """Two layers, and a context around what is between them, or around a layer."""

    def __init__(self, enter, around):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.enter, self.around = enter, around

    def forward(self, x):
        x = self.a(x)
        with self.enter():
            x = torch.tanh(x) if self.around == "a function" else self.b(x)
        return self.c(x)


def contexts():
    """The context managers that are in torch."""
    found = set()
    for name in MODULES:
        module = importlib.import_module(f"torch{name}")
        for value in vars(module).values():
            is_class = inspect.isclass(value) and hasattr(value, "__enter__")
            made = getattr(value, "__wrapped__", None)
            if is_class or (inspect.isfunction(value) and inspect.isgeneratorfunction(made)):
                full = f"{value.__module__}.{value.__qualname__}"
                if full.startswith("torch.") and not full.split(".")[-1].startswith("_"):
                    found.add(full)
    return found


def test_every_context_of_torch_is_in_one_of_the_tables():
    known = {*KEPT, *REFUSED, *NO_EFFECT}
    assert {name for name in contexts() - known if not name.startswith(ELSEWHERE)} == set()


both = pytest.mark.parametrize("around", ["a function", "a layer"])


@both
@pytest.mark.parametrize("name", KEPT)
def test_some_are_kept(name, around):
    steps = recorded(Model(entering(name), around), X).steps
    assert [step.around.grad is not None or step.around.autocast is not None for step in steps] == [
        False, True, False,
    ]  # fmt: skip


@both
@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_by_name_with_the_line(name, around):
    with pytest.raises(ConfigError, match=r"while .* is on.*nn\.Module of their own") as caught:
        recorded(Model(entering(name), around), X)
    assert f"{__file__}:" in str(caught.value)
    word = name.rsplit(".", 1)[-1]
    said = {
        "save_on_cpu": "save_on_cpu",
        "flags": "nnpack.flags",
        "detect_anomaly": "is_anomaly_enabled",
        "set_detect_anomaly": "is_anomaly_enabled",
        "TorchDispatchMode": "the mode Ours",
        "FlopCounterMode": "the mode ",
        "allow_mutation_on_saved_tensors": "",
    }
    assert said.get(word, word) in str(caught.value)


@both
@pytest.mark.filterwarnings("ignore:.*checkpoint:UserWarning")
@pytest.mark.parametrize("name", NO_EFFECT)
def test_the_rest_changes_nothing(name, around):
    plain = recorded(Model(torch.enable_grad, around), X)
    assert str(recorded(Model(entering(name), around), X)) == str(plain)


def test_a_context_that_was_there_before_is_that_of_all_stages():
    with parametrize.cached():
        assert len(recorded(Model(torch.enable_grad, "a function"), X).steps) == 3


def test_a_default_device_is_recorded_with_what_it_makes_and_reaches_no_layer():
    def meta():
        return torch.device("meta")

    assert len(recorded(Model(meta, "a function"), X).steps) == 3
    with pytest.raises(ConfigError, match="get_default_device"):
        recorded(Model(meta, "a layer"), X)


def test_a_mode_of_functions_is_recorded_with_what_it_does_and_reaches_no_layer():
    assert [step.name for step in recorded(Model(Tripled, "a function"), X).steps] == [
        "a", "(tanh 1)", "(mul 2)", "c",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="layer 'b' is called while the mode Tripled is on"):
        recorded(Model(Tripled, "a layer"), X)


def test_a_layer_takes_no_other_weights():
    def given(self, x):
        weights = {"weight": self.a.weight * 2, "bias": self.a.bias}
        return torch.func.functional_call(self.b, weights, (self.a(x),))

    with pytest.raises(ConfigError, match=r"another tensor in the place of 'b\.weight'"):
        recorded(Forward(given), X)


def test_layers_may_enter_what_they_like():
    class Inside(nn.Module):
        def forward(self, x):
            with sdpa_kernel(SDPBackend.MATH), torch.autograd.graph.save_on_cpu():
                return F.scaled_dot_product_attention(x, x, x)

    model = Model(torch.enable_grad, "a layer")
    model.b = Inside()
    assert [step.name for step in recorded(model, X).steps] == ["a", "b", "c"]
