"""What people look for on a pipeline because an ``nn.Module`` or a trainer has it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipedream_rt.errors import ConfigError
from pipedream_rt.torch_private import make_subclass

_WHOLE = (
    "pipe.module() returns a copy of the whole model, and pipe.on_stages(f) calls f(module) on its "
    "stages"
)
_BEFORE = "do it to the model before you give it to Pipeline"
_HOOKS = f"{_BEFORE}; hooks go along with it"
_DTYPE = "give Pipeline the model in that dtype, or Training(autocast=torch.bfloat16)"
_CPU = "the stages are on their devices; say where, as Pipeline(devices=...)"
_BY_ITSELF = (
    "the stages do it by themselves: for result in pipe.train_epoch(loader), or pipe.submit(x, y)"
)

ADVICE: Mapping[str, str] = {
    **dict.fromkeys(("backward", "zero_grad", "training_step"), _BY_ITSELF),
    **dict.fromkeys(("fit", "train_step"), "for result in pipe.train_epoch(loader)"),
    **dict.fromkeys(("train_batch", "forward_backward", "run"), _BY_ITSELF),
    **dict.fromkeys(
        ("forward_only", "eval_batch", "inference"),
        "pipe(x) returns the output for one input, pipe.predict(loader) yields those of a loader, "
        "and pipe.evaluate(loader) returns the mean loss",
    ),
    **dict.fromkeys(("cuda", "xpu", "ipu", "mtia"), _CPU),
    **dict.fromkeys(("half", "bfloat16", "float", "double", "type"), _DTYPE),
    **dict.fromkeys(("requires_grad_", "apply", "share_memory", "to_empty", "add_module"), _BEFORE),
    **dict.fromkeys(("register_forward_hook", "register_forward_pre_hook"), _HOOKS),
    **dict.fromkeys(("register_full_backward_hook", "register_buffer"), _HOOKS),
    **dict.fromkeys(("modules", "named_modules", "children", "named_children"), _WHOLE),
    **dict.fromkeys(("get_submodule", "get_parameter", "get_buffer", "model"), _WHOLE),
    **dict.fromkeys(("buffers", "named_buffers"), "pipe.state_dict() has them"),
    "forward": "call the pipeline: pipe(x)",
    "compile": "Training(compile=True) compiles the layers",
    "training": "pipe.train() and pipe.eval() set the mode",
    "lr_scheduler": "a scheduler of torch over pipe.optimizer, stepped once for each result",
}
"""By name of the attribute, what to do instead."""


class ParameterOnStages(nn.Parameter):
    """A copy of a parameter to look at. To ask for its gradient, as clipping does, is an error."""

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override] # nobody may set it
        raise ConfigError(
            "this is a copy of a parameter, whose gradient is on its stage alone. Clipping is "
            "Clip(...) of Pipeline, steps are done by the stages, and hooks of parameters that are "
            "registered before go along with the model"
        )


def copies_of(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the names of the parameters of a model, and copies with other values."""
    for name, parameter in model.named_parameters():
        copied = values[name].detach().clone()
        yield name, make_subclass(ParameterOnStages, copied, parameter.requires_grad)


def require_cpu(*args: Any, **kwargs: Any) -> None:
    """Refuse what ``to`` is given, unless it is the CPU."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.dtype | Tensor):
            given = "tensor" if isinstance(value, Tensor) else value
            raise ConfigError(f"pipe.to({given}) does not convert the stages: {_DTYPE}")
        if isinstance(value, str | torch.device) and torch.device(value).type != "cpu":
            raise ConfigError(f"pipe.to({str(value)!r}) does not move the stages: {_CPU}")
