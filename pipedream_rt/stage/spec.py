"""The specification of a stage, which the coordinator sends to the stage's worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from pipedream_rt.devices import HOST, Device
from pipedream_rt.models.code import Code, code_of
from pipedream_rt.models.cut import StageProgram
from pipedream_rt.models.holders import Holder
from pipedream_rt.models.layer_spec import Blueprint
from pipedream_rt.models.modes import Modes
from pipedream_rt.models.pretrained import Pretrained
from pipedream_rt.models.settings import Settings, settings_now
from pipedream_rt.models.tensors import own_buffers
from pipedream_rt.schedules import Plan
from pipedream_rt.stage.codec import GraphCodec
from pipedream_rt.stage.parameters import GradientHook
from pipedream_rt.stage.process_memory import give_free_memory_back
from pipedream_rt.stage.rules.rule import RuleOption
from pipedream_rt.tracing.spans import SpanFolder

LossFunction: TypeAlias = Callable[[Any, Any], "Tensor | Mapping[str, Tensor]"]
"""``loss_fn(output, target)`` returns the loss, a tensor with one element; or a dict that has it
under ``"loss"``, and parts of it, only to be reported, under other names."""


def total_of(loss: Any) -> tuple[Any, dict[str, Any]]:
    """Return the loss to train on, and the named parts to report, of a loss function's result."""
    if not isinstance(loss, Mapping):
        return loss, {}
    return loss.get("loss"), {name: part for name, part in loss.items() if name != "loss"}


def own_loss(output: Any, target: Any) -> Tensor:
    """Return the loss that a model has computed: the loss function of such a model."""
    loss: Tensor = output["loss"] if isinstance(output, dict) else output.loss
    return loss


def has_own_loss(output: Any) -> bool:
    """Whether the output of a model has a loss, under that name."""
    if isinstance(output, dict):
        return output.get("loss") is not None
    return getattr(output, "loss", None) is not None


OnNan: TypeAlias = Literal["raise", "ignore"]
"""The reaction of a stage to a training loss that is NaN or infinite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """The specification of a stage. cloudpickle pickles it, so a script's own classes may be in it.

    Attributes:
        stage: Index of the stage, 0-based.
        layers: The layers by their names in the unsplit model; a loss function that is a module
            is one of them, under the name `LOSS_LAYER`.
        programs: What a forward does, by the number of the program; empty if the layers are called
            one after another.
        loss_fn: The loss function, on the stage that computes the loss; None on the others.
        blueprint: The layers that the worker builds, since they have no values yet.
        pretrained: Where the worker reads weights; None if it reads none.
        autocast: The dtype to which torch's autocast casts in forwards and losses; None for none.
        names: The name in the unsplit model of each trainable parameter, by its name in `layers`;
            they differ for a weight that an earlier stage uses under another name.
        numbers: The place of each of these among the parameters of the unsplit model.
        norm_dtype: The dtype of the norm of all gradients of the model.
        compile: The arguments of `nn.Module.compile` for every layer; None to compile none.
        trace_spans: Number of spans that a worker keeps for a trace; 0 for no trace.
        trace_shown: Where it shows the newest of them; None for nowhere.
        holders: The holders of the script's values, by the numbers that micro-batches name.
        shared_holders: The numbers of the holders that other stages have too.
        shared: The names of the buffers that other stages have too: they must not change.
        aliases: The keys of state dicts under which other stages have weights that this one owns,
            by their keys on this stage.
        modes: Which modules do not follow the mode of the model.
        settings: The settings of torch in the user's process.
        code: The code of all that, as the user's process has it; None to compare none.
        devices: By worker of the plan, what it computes on, as in `device_for`.
        codecs: By source and target stage of an edge.
    """

    stage: int
    layers: nn.Module
    loss_fn: LossFunction | None
    plan: Plan
    seed: int
    on_nan: OnNan
    programs: tuple[StageProgram, ...] = ()
    blueprint: Blueprint = field(default_factory=Blueprint)
    pretrained: Pretrained | None = None
    autocast: torch.dtype | None = None
    rules: tuple[RuleOption, ...] = ()
    names: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    norm_dtype: torch.dtype = torch.float32
    compile: dict[str, Any] | None = None
    recompute: bool = False
    trace_spans: int = 0
    trace_shown: SpanFolder | None = None
    hooks: tuple[GradientHook, ...] = ()
    holders: dict[int, Holder] = field(default_factory=dict)
    shared_holders: tuple[int, ...] = ()
    shared: tuple[str, ...] = ()
    aliases: dict[str, tuple[str, ...]] = field(default_factory=dict)
    modes: Modes = field(default_factory=Modes)
    settings: Settings = field(default_factory=settings_now)
    code: Code | None = None
    devices: tuple[str, ...] = ()
    codecs: dict[tuple[int, int], GraphCodec] = field(default_factory=dict)

    def own_code(self) -> Code:
        """Return the code of the layers and of all functions, as this process has it."""
        steps = (step.target for program in self.programs for step in program.steps)
        hooks = (hook.call for hook in self.hooks)
        of_rules = (thing for rule in self.rules for thing in rule.things())
        codecs = self.codecs.values()
        things = (self.layers, self.loss_fn, *of_rules, *codecs, *hooks, *steps)
        built = bool(self.blueprint.specs)
        return code_of((thing for thing in things if thing is not None), built=built)

    def build(self, device: Device = HOST) -> None:
        """Build the layers, read their weights, put them on a device, and compile them."""
        names = [n for n in self.layers._modules if n in self.blueprint.specs]
        built = self.blueprint.build(names, give_free_memory_back) if names else {}
        for name, layer in built.items():
            layer.train(self.layers.training)
            self.layers._modules[name] = layer
        if self.pretrained is not None:
            self.pretrained.fill(self.layers)
        own_buffers(self.layers)
        device.place(self.layers)
        if self.compile is not None:
            for name in self.plan.layers[self.stage]:
                try:
                    layer = self.layers.get_submodule(name)
                except AttributeError:  # a parameter or a buffer beside the layers
                    continue
                layer.compile(**self.compile)
