"""Events, logs and stops of an epoch come as those of a plain Trainer, and no row is lost."""

import pytest
import torch
from support.trainers import (
    ASYNCHRONOUS,
    CALM,
    EVALUATED,
    FLUSHED,
    SAVED,
    Calls,
    as_plain,
    llama,
    logs_of,
    padded,
    rows,
    same,
    total,
    trained,
    trainer_of,
    weights_of,
    with_callback,
)
from transformers import TrainerCallback

from pipedream_rt.hf import PipelineTrainer

pytestmark = CALM


EVENTS = [name for name in vars(TrainerCallback) if name.startswith("on_")]


@pytest.mark.parametrize(
    ("reads", "parts"), [(False, 1), (True, 2)], ids=["flags", "weights of parts"]
)
def test_every_event_comes_in_the_same_order_and_sees_the_same(reads, parts, tmp_path):
    def records(name):
        def event(model, state, seen, given):
            control, optimizer = given["control"], given["optimizer"]
            rates = [g["lr"] for g in getattr(optimizer, "param_groups", ())]
            flags = (control.should_log, control.should_evaluate, control.should_save)
            step = (name, state.global_step, state.epoch, rates, flags, model.training)
            seen.append([*step, control.should_training_stop, total(model) if reads else 0.0])

        return event

    options = {
        **EVALUATED, **SAVED, "gradient_accumulation_steps": parts, "logging_steps": 1,
        "eval_on_start": True,
    }  # fmt: skip

    def does(cls):
        calls = Calls([], **{name: records(name) for name in EVENTS})
        with trainer_of(
            cls, tmp_path / cls.__name__, options=options, callbacks=[calls],
            pipeline={"micro_batches": parts},
        ) as trainer:  # fmt: skip
            trainer.train()
            trainer.predict(rows(3))
            return calls.seen, logs_of(trainer)

    seen, _ = as_plain(does)
    left_out = {"on_push_begin", *(["on_substep_end"] if parts == 1 else [])}
    assert {name for name, *_ in seen} == set(EVENTS) - left_out


@pytest.mark.parametrize("event", ["on_step_end", "on_log"])
def test_a_run_that_a_callback_stops_ends_at_that_step(event, tmp_path):
    def stops(model, state, seen, given):
        given["control"].should_training_stop = state.global_step >= 5

    *_, steps = as_plain(with_callback(tmp_path, **{event: stops}))
    assert steps == 5
    if event == "on_step_end":
        *_, steps = with_callback(tmp_path, pipeline=ASYNCHRONOUS, **{event: stops})(
            PipelineTrainer
        )
        assert steps == 5


def test_logs_of_an_asynchronous_run_tell_of_their_own_steps(tmp_path):
    seen = []

    def notes(model, state, _, given):
        seen.append((state.global_step, state.epoch, given["logs"].get("grad_norm")))

    *_, logs, _, _ = with_callback(tmp_path, pipeline=ASYNCHRONOUS, on_log=notes)(PipelineTrainer)
    losses = [row for row in logs if "loss" in row]
    assert [row["step"] for row in losses] == list(range(1, 9))
    assert all(row["grad_norm"] > 0 for row in losses)
    assert [s for s in seen if s[2]] == [(r["step"], r["epoch"], r["grad_norm"]) for r in losses]


@pytest.mark.parametrize("event", ["on_substep_end", "on_step_begin"])
def test_a_stop_before_the_update_is_none_of_it(event, tmp_path):
    """The loss of a part that a plain Trainer has computed by then is not in the mean of all."""

    def stops(model, state, seen, given):
        given["control"].should_training_stop = state.global_step >= 2

    def does(cls):
        weights, logs, steps = trained(
            tmp_path, train=rows(22), callbacks=[Calls([], **{event: stops})],
            options={"gradient_accumulation_steps": 2}, pipeline={"micro_batches": 2},
        )(cls)  # fmt: skip
        return weights, logs[:-1], steps

    _, logs, steps = as_plain(does)
    assert steps == 2
    assert logs


class Stream(torch.utils.data.IterableDataset):
    """Rows that come one after another; some streams know how many, or begin once."""

    def __init__(self, count, once=False):
        self.count, self._once = count, iter(rows(count)) if once else None

    def __iter__(self):
        return iter(rows(self.count)) if self._once is None else self._once


class Sized(Stream):
    """A stream that knows its length."""

    def __len__(self):
        return self.count


STREAMS = {
    "stream": (lambda: Stream(14), {"max_steps": 7}),
    "accumulated": (lambda: Stream(24), {"max_steps": 5, "gradient_accumulation_steps": 2}),
    "length": (lambda: Sized(14), {}),
    "length, accumulated": (lambda: Sized(14), {"gradient_accumulation_steps": 2}),
    "once": (lambda: Stream(14, once=True), {"max_steps": 3}),
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_loses_no_row(name, tmp_path):
    make, options = STREAMS[name]
    given = {"options": {"logging_steps": 1, **options}}
    given["pipeline"] = {"micro_batches": options.get("gradient_accumulation_steps", 1)}
    as_plain(lambda cls: trained(tmp_path, train=make(), **given)(cls))


def test_a_stream_that_is_shorter_after_a_resume(tmp_path):
    def does(cls):
        folder, options = tmp_path / cls.__name__, {"max_steps": 10}
        saved = {**options, "save_strategy": "steps", "save_steps": 4}
        with trainer_of(cls, folder, train=Stream(22), options=saved) as trainer:
            trainer.train()
        with trainer_of(cls, folder / "again", train=Stream(12), options=options) as trainer:
            trainer.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
            return weights_of(trainer), logs_of(trainer)

    as_plain(does)


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
@pytest.mark.parametrize("pipeline", [FLUSHED, ASYNCHRONOUS], ids=["flushed", "asynchronous"])
def test_a_resumed_run_masks_what_the_whole_run_masks(strategy, pipeline, tmp_path):
    def masks(items):
        found = padded(items)
        found["labels"][torch.rand(found["labels"].shape) < 0.3] = -100
        return found

    saved = {"save_strategy": strategy, "save_steps": 3}
    given = {"data_collator": masks, "pipeline": pipeline}

    def does(cls):
        folder = tmp_path / cls.__name__
        with trainer_of(cls, folder, options=saved, **given) as trainer:
            trainer.train()
            whole = weights_of(trainer)
        torch.manual_seed(99)
        with trainer_of(cls, folder / "again", model=llama(8), **given) as trainer:
            step = 4 if strategy == "epoch" else 3
            trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
            return whole, weights_of(trainer), logs_of(trainer)

    if pipeline is FLUSHED:
        whole, resumed, _ = as_plain(does)
    else:
        whole, resumed, _ = does(PipelineTrainer)
    if strategy == "epoch":  # within one, transformers draws the numbers of a batch again
        same(whole, resumed)
