"""The settings of torch that go to the workers, and what around a pipeline would not reach them."""

import sys

import pytest
import torch
from support import forked
from support.deadlines import LATEST_S
from torch.overrides import TorchFunctionMode

from pipedream_rt.errors import ConfigError
from pipedream_rt.models.settings import (
    apply_settings,
    refuse_contexts,
    refuse_global_hooks,
    refuse_no_grad,
    refuse_other_settings,
    settings_in_forward,
    settings_now,
    settings_of_devices,
)


@pytest.fixture(autouse=True)
def as_it_was():
    settings = settings_now()
    yield
    apply_settings(settings)


def test_what_kernels_of_a_gpu_go_by_is_applied_too():
    """By the names that the script has used: to mix the old and the new is an error in torch."""
    done = forked.run(
        [sys.executable, "-c", _ANOTHER_PROCESS], capture_output=True, text=True, timeout=LATEST_S
    )
    assert done.stdout.split() == ["old", "new", "half"], done.stdout + done.stderr


_ANOTHER_PROCESS = """
import os, torch
from pipedream_rt.models.settings import apply_settings, settings_now

def in_a_child(change):
    reader, writer = os.pipe()
    if os.fork() == 0:
        change()
        os.write(writer, repr(settings_now(of_devices=True)).encode())
        os._exit(0)
    os.wait()
    return eval(os.read(reader, 1 << 16), {"torch": torch})

def old():
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = True

def new():
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    torch.backends.cuda.matmul.fp32_precision = "tf32"

def half():
    matmul = torch.backends.cuda.matmul
    try:
        matmul.allow_bf16_reduced_precision_reduction = (False, False)
    except RuntimeError:  # older versions know nothing of split-K
        matmul.allow_bf16_reduced_precision_reduction = False

assert settings_now().keys() < settings_now(of_devices=True).keys()
for change in (old, new, half):
    settings = in_a_child(change)
    if os.fork() == 0:
        apply_settings(settings)
        assert settings_now(of_devices=True) == settings
        if change is old:
            with torch.backends.cudnn.flags(enabled=False):  # it reads by the old name
                pass
            assert not torch.backends.cudnn.allow_tf32
        if change is new:
            assert torch.backends.cudnn.conv.fp32_precision == "ieee"
        os._exit(0)
    assert os.wait()[1] == 0, change
    print(change.__name__)
"""


@pytest.mark.skipif(
    not hasattr(torch.autograd.graph, "node_creation_hook"), reason="it came with torch 2.14"
)
def test_a_hook_on_new_nodes_is_refused_around_a_pipeline_too():
    """torch tells nobody that there is one, so we count them."""
    with (
        torch.autograd.graph.node_creation_hook(lambda node: None),
        pytest.raises(ConfigError, match="node_creation_hook is on around the pipeline"),
    ):
        refuse_contexts()
    refuse_contexts()


def test_settings_are_told_by_the_expression_that_reads_them():
    for name, value in settings_now().items():
        if name.startswith("torch.get_"):
            assert str(eval(name, {"torch": torch})) == str(value)


CHANGES = {
    "torch.get_default_dtype()": (torch.set_default_dtype, torch.float64),
    "torch.get_default_device()": (torch.set_default_device, "meta"),
    "torch.are_deterministic_algorithms_enabled()": (
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
        [True, True],
    ),
    "torch.get_float32_matmul_precision()": (torch.set_float32_matmul_precision, "high"),
    "torch.backends.mha.get_fastpath_enabled()": (
        torch.backends.mha.set_fastpath_enabled,
        not torch.backends.mha.get_fastpath_enabled(),
    ),
    "torch.is_anomaly_enabled()": (torch.autograd.set_detect_anomaly, True),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_is_read_applied_and_put_back(name):
    change, value = CHANGES[name]
    before = settings_now()
    change(value)
    changed = settings_now()
    others = {key for key in before if before[key] != changed[key]} - {name}
    assert others <= {"torch.backends.mkldnn.matmul.fp32_precision"}  # another name of a precision
    assert changed[name] == value
    apply_settings(before)
    assert settings_now() == before
    apply_settings({name: value})  # others are left as they are
    assert settings_now() == changed


def test_a_setting_that_was_changed_since_the_start_is_refused_with_both_values():
    before = settings_now()
    refuse_other_settings(before)
    refuse_other_settings(settings_now(of_devices=True))
    torch.set_default_dtype(torch.float64)
    words = (
        r"get_default_dtype\(\) was torch.float32 when the pipeline started and is torch.float64"
    )
    with pytest.raises(ConfigError, match=words):
        refuse_other_settings(before)


def test_settings_are_read_in_a_forward_without_computing():
    """To see whether denormal numbers are flushed one must compute with one."""
    names = settings_now(of_devices=True).keys() - {*settings_in_forward(), *settings_of_devices()}
    assert names == {"torch.set_flush_denormal(...)"}


class Mode(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("context", "words"),
    [
        (lambda: torch.autocast("cpu"), "torch.autocast is on around the pipeline"),
        (torch.autograd.graph.save_on_cpu, "saved_tensors_hooks .* are on around"),
        (Mode, "the mode Mode is on around the pipeline; it acts on this thread alone"),
    ],
    ids=["autocast", "saved tensors", "mode"],
)
def test_a_context_that_would_not_reach_the_workers_is_refused(context, words):
    with context(), pytest.raises(ConfigError, match=words):
        refuse_contexts()
    refuse_contexts()


def test_a_default_device_is_a_setting_and_no_mode():
    with torch.device("meta"):
        refuse_contexts()
        assert settings_now()["torch.get_default_device()"] == "meta"


def test_hooks_on_all_modules_are_refused_by_kind():
    for kind in ("forward_hook", "forward_pre_hook"):
        register = getattr(torch.nn.modules.module, f"register_module_{kind}")
        handle = register(lambda *given: None)
        try:
            with pytest.raises(ConfigError, match=f"a {kind} was registered on all modules"):
                refuse_global_hooks()
        finally:
            handle.remove()
    refuse_global_hooks()


def test_nothing_is_trained_without_gradients():
    refuse_no_grad()
    for context in (torch.no_grad, torch.inference_mode):
        with context(), pytest.raises(ConfigError, match="leave that block, or use evaluate"):
            refuse_no_grad()
