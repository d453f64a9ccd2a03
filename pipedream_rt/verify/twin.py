"""Copies of a job's stages in this process: all that they compute can be seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from pipedream_rt.batches.cutting import unmarked
from pipedream_rt.batches.forwards import Forwards
from pipedream_rt.batches.items import Batch
from pipedream_rt.batches.micro_batches import CutBatch
from pipedream_rt.batches.recorded_forwards import RecordedForwards
from pipedream_rt.coordinator.run import attach, start
from pipedream_rt.job.given_optimizer import GivenOptimizer, OptimizerParts
from pipedream_rt.job.job import Job, prepare
from pipedream_rt.job.options import Layout, Observe, Options, Recovery
from pipedream_rt.job.rules import scale_of
from pipedream_rt.stage.hyper import Hyper, set_hyper
from pipedream_rt.stage.stage import Stage
from pipedream_rt.stage.stage_state import state_dict
from pipedream_rt.verify.compare import Place, Seen, sampled
from pipedream_rt.verify.plain import Copies, Tap


class Twin:
    """The stages of a job on a plan without staleness, in the thread of the script.

    Attributes:
        parts: The optimizer, taken apart.
        left_out: The parts of the job that are left out, in sentences.
        forwards: The forwards of the copy.
        gradients: Copies of those with which the stages have stepped last, by name.
    """

    def __init__(self, job: Job, copies: Copies, batch: Batch) -> None:
        assert job.reading.optimizer is not None
        self.parts: OptimizerParts = job.reading.optimizer
        options, self.left_out = _plain_options(job, copies, batch)
        made = prepare(copies.model, options)
        made = replace(
            made,
            reading=replace(made.reading, optimizer=job.reading.optimizer),
            decisions=replace(made.decisions, of_loss=job.decisions.of_loss),
            given=GivenOptimizer(None),
            brought={},
        )
        self.forwards = made.reading.forwards
        self._plan, self._group = made.plan, start(made, None)
        with self._group.life.guard("it was opened"):
            self._run = attach(made, self._group, None)
            cluster = self._group.cluster
            self._stages: list[Stage] = [
                cluster.reference(address, "stage").local_value() for address in made.plan.addresses
            ]
        self._run.feeder.decision.announce = lambda text: None  # the run itself says it
        self._group.recovery._specs.clear()  # never started again, so nobody needs the weights here
        # The script changes nothing meanwhile; plain PyTorch trains the copy of its model.
        made.script_values.watches = False
        self.gradients: dict[str, Tensor] = {}
        self._seen: Seen = {}
        self._step, self._stepped = 0, set[str]()
        for stage in self._stages:
            self._watch(stage)

    def __enter__(self) -> Twin:
        return self

    def __exit__(self, *error: object) -> None:
        self._group.life.close()

    def set_mode(self, training: bool | None) -> None:
        """Set the mode of all modules; None leaves them as they are."""
        if training is not None:
            self._run.feeder.set_training(training)

    def cut(self, batch: Batch) -> CutBatch:
        """Return a mini-batch in micro-batches."""
        return self._run.feeder.cut(batch)

    def step(self, step: int, batch: Batch, hyper: Sequence[Hyper], stepped: set[str]) -> Seen:
        """Train on a mini-batch, and return what was computed; keep gradients of ``stepped``."""
        feeder, self._step, self._stepped = self._run.feeder, step, stepped
        self._seen.clear()
        self.gradients.clear()
        assert feeder.optimizer is not None
        for group, packed in zip(feeder.optimizer.param_groups, hyper, strict=True):
            set_hyper(group, packed)
        result, cut = feeder.inject(batch).result(), self.cut(batch)
        for i, loss in zip(cut.with_loss, result.losses, strict=True):
            self._seen[Place(step, step * len(cut.parts) + i, "loss")] = loss
        for name, value in self.state().items():
            if isinstance(value, Tensor):
                self._seen[Place(step, -1, "state", name)] = sampled(value)
        return dict(self._seen)

    def state(self) -> dict[str, Any]:
        """Return the weights and buffers of now: those of the stages, not copies."""
        self._run.feeder.flush()
        return {name: value for each in self._stages for name, value in state_dict(each).items()}

    def _watch(self, stage: Stage) -> None:
        """Note what the layers of a stage compute, and with which gradients it steps."""
        layers = {}
        for name in self._plan.layers[stage.index]:
            try:
                layers[name] = stage.module.get_submodule(name)
            except AttributeError:  # a parameter or a buffer beside the layers
                continue
        tap, train = Tap(layers, self._seen), stage.runner.train

        def watched(program: int, values: dict[int, Any], number: int) -> list[Any]:
            # Another stage may have made other calls of the same layer.
            names: dict[int, list[str]] = {}
            for step in stage.runner.programs[program].whole.steps:
                if step.layer is not None:
                    names.setdefault(id(layers[step.layer]), []).append(step.name)
            tap.begin(self._step, number, names)
            try:
                return train(program, values, number)
            finally:
                tap.at = None  # what is computed again in the backward was seen

        stage.runner.train = watched  # type: ignore[method-assign]
        if stage.optimizer is not None and stage.optimizer.torch_optimizer is not None:
            # Just before the step, so after clipping: as plain training notes them.
            named = stage.parameters.named
            stage.optimizer.torch_optimizer.register_step_pre_hook(
                lambda *_: self._note_gradients(named)
            )

    def _note_gradients(self, named: Mapping[str, nn.Parameter]) -> None:
        """Note the gradients with which a stage steps."""
        for name, parameter in named.items():
            place = Place(self._step, -1, "gradient", name)
            # Once: a step that calls that of its base class may have changed them before.
            if parameter.grad is not None and place not in self._seen:
                self._seen[place] = sampled(parameter.grad)
                if name in self._stepped:
                    self.gradients[name] = parameter.grad.detach().clone()


def _plain_options(job: Job, copies: Copies, batch: Batch) -> tuple[Options, list[str]]:
    """Return the options of a job that plain PyTorch has too, and a note about the others."""
    options, training, layout, plan = (
        job.options,
        job.options.training,
        job.options.layout,
        job.plan,
    )
    assert job.reading.optimizer is not None
    # The names are bound by a default: a closure would see those of the last group.
    rules: Any = [
        (lambda name, parameter, mine=frozenset(names): name in mine, of_group)
        for names, of_group in job.reading.optimizer.groups
    ]
    left_out = [
        text
        for text, there in (
            ("corrections for staleness", bool(job.decisions.corrections)),
            ("codecs", layout.codecs is not None),
            ("replicas", plan.replicated),
            ("the average of weights", training.ema is not None),
            ("scaling of losses", scale_of(training) is not None),
            ("torch.compile", bool(training.compile)),
            (f"the schedule, {plan.title}, for 1f1b", not plan.flushes),
        )
        if there
    ]
    example = None if job.model.sequence is not None else unmarked(batch)
    return replace(
        options,
        loss_fn=copies.loss_fn,
        example=example,
        optimizer=(job.reading.optimizer.optimizer_class, job.reading.optimizer.kwargs, rules),
        schedule=options.schedule if plan.flushes else "1f1b",
        micro_batches=plan.per_update,
        corrections=(),
        workers="serial",
        checkpoint=None,
        devices=None,
        training=replace(
            training, ema=None, loss_scale=None, autocast=training.autocast, compile=False
        ),
        layout=Layout(
            stages_per_worker=layout.stages_per_worker if plan.flushes else None,
            threads=layout.threads,
        ),
        recovery=Recovery(max_restarts=0),
        observe=Observe(),
    ), ([f"left out: {', '.join(left_out)}"] if left_out else [])


def names_by_stage(job: Job) -> list[list[str]]:
    """Return, by stage, the names of the parameters that it steps."""
    seen: set[str] = set()
    found = []
    for layers in job.plan.layers:
        part = job.model.part(layers)
        mine = [job.model.names[id(p)] for p in part.parameters() if id(p) in job.model.names]
        found.append([name for name in mine if name not in seen])
        seen.update(mine)
    # What no stage has belongs to the loss, which is on the last one.
    found[-1] += [name for name in job.model.names.values() if name not in seen]
    return found


def steps_that_draw(forwards: Forwards) -> dict[int, list[str]]:
    """Return, by number of a program, the steps between layers that draw random numbers."""
    if not isinstance(forwards, RecordedForwards):
        return {}
    return {
        number: [
            step.name
            for stage in made.stages
            for step in stage.steps
            if step.layer is None and step.random
        ]
        for number, made in forwards.cuts.items()
    }
