"""Attributes that people look for on a pipeline because an ``nn.Module`` or a trainer has them."""

from __future__ import annotations

from collections.abc import Mapping

_WHOLE = (
    "pipe.module() returns a copy of the whole model, and pipe.on_stages(f) calls f(module) on its "
    "stages"
)
_BEFORE = "do it to the model before you give it to Pipeline"
_HOOKS = f"{_BEFORE}; hooks go along with it"
_DTYPE = "give Pipeline the model in that dtype, or Training(autocast=torch.bfloat16)"
_CPU = "the stages are on their devices, as Pipeline(devices=...) says, and outputs come on the CPU"
_PARAMETERS = (
    "pipe.state_dict() has copies of them, pipe.optimizer.param_groups has what a scheduler needs, "
    "and clipping is Training(clip=Clip(...))"
)
_BY_ITSELF = (
    "the stages do it by themselves: for result in pipe.train_epoch(loader), or pipe.submit(x, y); "
    "a loss that the script computes has loss.backward() and pipe.step()"
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
    **dict.fromkeys(("to", "cpu", "cuda", "xpu", "ipu", "mtia"), _CPU),
    **dict.fromkeys(("parameters", "named_parameters"), _PARAMETERS),
    **dict.fromkeys(("half", "bfloat16", "float", "double", "type"), _DTYPE),
    **dict.fromkeys(("requires_grad_", "apply", "share_memory", "to_empty", "add_module"), _BEFORE),
    **dict.fromkeys(("register_forward_hook", "register_forward_pre_hook"), _HOOKS),
    **dict.fromkeys(("register_full_backward_hook", "register_buffer"), _HOOKS),
    **dict.fromkeys(("modules", "named_modules", "children", "named_children"), _WHOLE),
    **dict.fromkeys(("get_submodule", "get_parameter", "get_buffer", "model"), _WHOLE),
    **dict.fromkeys(("buffers", "named_buffers"), "pipe.state_dict() has them"),
    **dict.fromkeys(
        ("clip_grad_norm_", "clip_grad_norm", "clip_grad_value_", "clip_gradients"),
        "Training(clip=Clip(1.0)) clips on the stages, before each update",
    ),
    "compile": "Training(compile=True) compiles the layers",
    "eval": "pipe.train(False), for training in eval mode; pipe(x) and evaluate use it anyway",
    "training": "pipe.train() and pipe.train(False) set the mode",
    "lr_scheduler": "a scheduler of torch over pipe.optimizer, stepped once for each result",
}
"""By name of the attribute, what to do instead."""
