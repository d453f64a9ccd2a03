"""A worker's stages on the calling thread: from their start messages to their end."""

import os
import threading
from datetime import timedelta

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from support import messages
from support.stages import a_spec, pickled
from torch import nn

from pipedream_rt.errors import MessageTimeout, PeerLost, PipelineClosed, TransportError
from pipedream_rt.messages.message import (
    Activation,
    Command,
    CommandName,
    Failed,
    Ready,
    Start,
    Target,
    digest_of,
)
from pipedream_rt.messages.tree import flat_copy, flatten, unflatten
from pipedream_rt.models.settings import apply_settings, settings_now
from pipedream_rt.schedules import COORDINATOR, plan_for
from pipedream_rt.stage.host import StageHost

GENERATION = 6

ONE = plan_for("async-1f1b", num_stages=1)


@pytest.fixture(autouse=True)
def as_it_was():
    """A host names its thread and sets what is torch's for the whole process."""
    settings, threads, thread = settings_now(), torch.get_num_threads(), threading.current_thread()
    name = thread.name
    yield
    apply_settings(settings)
    torch.set_num_threads(threads)
    thread.name = name


class Host:
    """A host with a list of what its stages have sent.

    Attributes:
        sent: Sender, receiver, number and payload of every message.
        before: What is done before the message of a number is sent.
    """

    def __init__(self, stages=(0,), **options):
        self.sent, self.tensors, self.before = [], [], {}
        defaults = {"generation": GENERATION, "timeout": timedelta(0), "threads": 1}
        self.host = StageHost(
            worker=0,
            name=f"stage {stages[0]}" if len(stages) == 1 else "worker 0",
            stages=stages,
            send=self._send,
            **{**defaults, **options},
        )

    def _send(self, key, payload, tensors):
        self.before.get(len(self.sent), lambda: None)()
        self.sent.append((key.edge.source, key.edge.target, key.number, payload))
        self.tensors.append(tensors)

    def put(self, *messages):
        for message in messages:
            assert self.host.inbox.put(message)
        return self

    def serve(self, end=None):
        """Serve until what has arrived is done; return the payloads that were sent."""
        self.host.inbox.close(end or PipelineClosed("the end"))
        self.host.serve()
        return [payload for _, _, _, payload in self.sent]

    def failure(self):
        """Serve, and return the one failure that was sent."""
        (failed,) = [p for p in self.serve() if isinstance(p, Failed)]
        return failed


def start(layer=None, stage=0, plan=ONE, settings=None, trace_spans=0, recompute=False, **changes):
    """What a stage is made of, as the coordinator sends it."""
    spec = a_spec(
        {str(stage): layer or nn.Linear(2, 2)}, plan, stage,
        loss_fn=F.mse_loss if stage in plan.exits else None,
        trace_spans=trace_spans, settings=settings or settings_now(), recompute=recompute,
    )  # fmt: skip
    tensor = torch.frombuffer(bytearray(cloudpickle.dumps(spec)), dtype=torch.uint8)
    optimizer = pickled(torch.optim.SGD, {"lr": 0.5}, dict(spec.layers.named_parameters()))
    defaults = {"digest": digest_of([tensor]), "optimizer": optimizer}
    return message(Start(**{**defaults, **changes}), stage, 0, (tensor,))


def message(payload, to, position, tensors=()):
    options = {"number": position, "generation": GENERATION, "tensors": tensors}
    return messages.message(payload, to=to, sender=COORDINATOR, **options)


def micro_batch(number=0, position=0):
    structure, tensors = flatten(torch.ones(1, 2))
    head = messages.head(number, position=position)
    payload = Activation(head=head, turns=[position], structure=structure, requires_grad=[False])
    of_target = Target(structure=structure)
    return message(payload, 0, position, tensors), message(of_target, 0, position, tensors)


def command(name, position=0, argument=None, to=0):
    structure, tensors, _ = flat_copy(argument)
    payload = Command(position=position, name=name, structure=structure)
    return message(payload, to, position, tensors)


# -- start ------------------------------------------------------------------------------------


def test_a_stage_says_that_it_is_ready_in_its_generation():
    host = Host().put(start())
    host.serve()
    assert host.sent == [(0, COORDINATOR, GENERATION, Ready())]


def test_a_worker_starts_all_its_stages_in_their_order():
    plan = plan_for("interleaved-1f1b", num_stages=4, per_update=2)
    host = Host((0, 2)).put(start(stage=2, plan=plan), start(stage=0, plan=plan))
    host.serve()
    assert [(stage, payload) for stage, _, _, payload in host.sent] == [(0, Ready()), (2, Ready())]


@pytest.mark.parametrize(("stages", "name"), [((2,), "stage 2"), ((0, 2), "worker 0")])
def test_a_worker_is_called_by_its_only_stage_or_by_its_number(stages, name):
    """So is its thread."""
    host = Host(stages)
    assert host.host.name == name
    host.serve()
    assert threading.current_thread().name == name.replace(" ", "-")


def test_a_stage_begins_as_its_start_message_says(monkeypatch):
    """Optimizer and mode; the number of torch's threads is the host's."""
    set_to = []
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    host = Host(threads=3).put(
        start(training=False),
        command(CommandName.STATISTICS),
        command(CommandName.OPTIMIZER_STATE, 1),
    )
    seen = []
    host.before[1] = lambda: seen.append(host.host.part(0, "module").training)
    host.serve()
    assert seen == [False]
    assert set_to == [3]


def test_without_an_optimizer_and_a_mode_a_stage_is_as_it_is():
    host = Host().put(start(nn.Linear(2, 2).eval(), optimizer=b""), *micro_batch())
    failed = host.failure()
    assert (failed.type_name, failed.action) == ("ConfigError", "S0")


@pytest.mark.parametrize("own_process", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_memory_goes_back_at_once_where_a_stage_that_computes_again_has_a_process_of_its_own(
    monkeypatch, recompute, own_process
):
    """It holds for a whole process, which a stage beside the script has not for itself."""
    calls = []
    name = "pipedream_rt.stage.host.give_memory_back_at_once"
    monkeypatch.setattr(name, lambda: calls.append(1))
    Host(own_process=own_process).put(start(recompute=recompute)).serve()
    assert len(calls) == (recompute and own_process)


def saved_in(folder):
    files = os.listdir(folder)
    return {"folder": str(folder), "files": files, "step": 1, "plain": {}, "floor": 0}


@pytest.mark.threads
def test_a_stage_begins_with_the_state_of_a_checkpoint(tmp_path):
    save = command(CommandName.SAVE, 1, {"folder": str(tmp_path), "step": 1})
    first = Host().put(start(), *micro_batch(), save, command(CommandName.STATE, 2))
    first.serve()
    again = Host().put(start(restore=saved_in(tmp_path)), command(CommandName.STATE))
    again.serve()
    (state,), (restored,) = replies(first), replies(again)
    assert all(torch.equal(restored[key], tensor) for key, tensor in state.items())


def test_a_checkpoint_without_a_version_that_the_stage_read_is_refused(tmp_path):
    """It was made by a schedule that keeps none; a recovery would compute other bits."""
    save = command(CommandName.SAVE, 1, {"folder": str(tmp_path), "step": 1})
    Host().put(start(), *micro_batch(), save).serve()
    two = plan_for("async-1f1b", num_stages=2)
    failed = Host().put(start(plan=two, restore=saved_in(tmp_path))).failure()
    assert failed.type_name == "CheckpointError"
    assert "lacks older weight versions that stage 0 read" in failed.text


def replies(host):
    return [
        unflatten(payload.structure, tensors)
        for (_, _, _, payload), tensors in zip(host.sent, host.tensors, strict=True)
        if type(payload).__name__ == "Reply"
    ]


def test_the_settings_of_the_users_process_are_applied():
    changed = {
        "torch.get_default_dtype()": torch.float64,
        "torch.are_deterministic_algorithms_enabled()": [True, True],
        "torch.get_float32_matmul_precision()": "high",
    }
    Host().put(start(settings={**settings_now(), **changed})).serve()
    assert changed.items() <= settings_now().items()


def test_what_a_stage_is_made_of_must_be_what_was_sent():
    """Nothing of it is unpickled before: a transport need not authenticate tensors."""
    host = Host().put(start(digest=b"another"))
    failed = host.failure()
    assert (failed.type_name, failed.action) == ("TransportError", "start")
    assert isinstance(cloudpickle.loads(failed.pickled), TransportError)
    assert "address 0" in failed.text
    assert Ready() not in [payload for _, _, _, payload in host.sent]


def test_a_start_message_that_does_not_come_is_a_failure():
    host = Host((1,))
    host.host.serve()
    ((stage, to, index, failed),) = host.sent
    assert (stage, to, index) == (1, COORDINATOR, 0)
    assert (failed.type_name, failed.action) == ("MessageTimeout", "start")
    assert isinstance(host.host.inbox.reason, MessageTimeout)


# -- the end ----------------------------------------------------------------------------------


def test_a_pipeline_that_is_closed_ends_without_a_word():
    assert Host().put(start(), *micro_batch()).serve()[0] == Ready()
    assert Host().serve() == []  # before it has begun


def test_actions_are_done_and_announced_as_the_start_message_asks():
    told = []
    host = Host(announce=told.append)
    host.put(start(announced=1), *micro_batch(0, 0), *micro_batch(1, 1)).serve()
    assert told == ["0:F0", "", "0:B0", "", "0:S0", ""]


@pytest.mark.parametrize("spans", [0, 5])
def test_spans_are_recorded_if_the_stage_is_told_to(spans):
    host = Host().put(start(trace_spans=spans), *micro_batch(), command(CommandName.TRACE, 1))
    host.serve()
    (reply,) = replies(host)
    assert bool(reply) is bool(spans)


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        return self.linear(x)


def test_the_parts_of_a_stage_can_be_had_while_it_lives():
    """For references; without an optimizer there is none to have."""
    for optimizer in ({}, {"optimizer": b""}):
        host = Host().put(start(Parts(), **optimizer), command(CommandName.STATE))
        part, seen = host.host.part, []
        host.before[1] = lambda part=part, seen=seen: seen.extend(
            (part(0, "module"), part(0, "optimizer"))
        )
        with pytest.raises(PipelineClosed, match="stage 0"):
            part(0, "module")  # not yet
        host.serve()
        module, torch_optimizer = seen
        assert type(module[0]) is Parts
        if optimizer:
            assert torch_optimizer is None
        else:
            assert torch_optimizer.param_groups[0]["params"][0] is module[0].linear.weight
        with pytest.raises(PipelineClosed, match="stage 0"):
            part(0, "module")  # not any more


# -- errors -----------------------------------------------------------------------------------


class Raises(nn.Module):
    """Raises what it is told to make, in a forward."""

    def __init__(self, make):
        super().__init__()
        self.linear, self.make = nn.Linear(2, 2), make

    def forward(self, x):
        raise self.make()


def raised(make):
    """The failure that an error of a layer becomes, and the host."""
    host = Host().put(start(Raises(make)), *micro_batch())
    return host.failure(), host


def test_an_error_of_a_layer_becomes_data():
    """With its type, text, traceback, and itself as far as it can be pickled."""
    failed, host = raised(lambda: ZeroDivisionError("the layer's own words"))
    assert (failed.action, failed.type_name, failed.text) == (
        "F0",
        "ZeroDivisionError",
        "the layer's own words, in layer '0' (Raises), whose input was a float32 tensor (1, 2)",
    )
    assert "in forward\n    raise self.make()" in failed.trace
    assert failed.trace.endswith("ZeroDivisionError: the layer's own words\n")
    cause = cloudpickle.loads(failed.pickled)
    assert type(cause) is ZeroDivisionError
    assert cause.args == ("the layer's own words",)
    assert host.sent[-1][:3] == (0, COORDINATOR, 0)


def test_it_closes_the_inbox_so_that_nobody_waits_for_this_worker():
    host = Host().put(start(Raises(ZeroDivisionError)), *micro_batch())
    host.host.serve()
    assert isinstance(host.host.inbox.reason, ZeroDivisionError)


class HoldsALock(Exception):
    """Does not pickle."""

    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()


class NeedsTwo(Exception):
    """Pickles, and does not unpickle."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


@pytest.mark.parametrize("make", [lambda: HoldsALock("words"), lambda: NeedsTwo("words", 2)])
def test_of_an_error_that_cannot_be_pickled_type_text_and_traceback_are_left(make):
    failed, _ = raised(make)
    assert failed.pickled == b""
    assert failed.type_name in ("HoldsALock", "NeedsTwo")
    assert failed.text.startswith("words")
    assert "words" in failed.trace


class Wordless(Exception):
    def __str__(self):
        raise LookupError


def test_an_error_whose_text_cannot_be_had_still_arrives():
    failed, _ = raised(Wordless)
    assert failed.type_name == "Wordless"
    assert "LookupError" in failed.text
    assert failed.trace == failed.text


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_so_does_what_is_no_exception(error):
    """Nothing may leave the thread without a word."""
    failed, _ = raised(error)
    assert failed.type_name == error.__name__


def test_a_lost_peer_is_a_failure_too():
    """The transport closes the inbox with it."""
    host = Host().put(start())
    ready, failed = host.serve(PeerLost("worker-1 is gone", peer="worker-1"))
    assert ready == Ready()
    assert (failed.type_name, failed.text) == ("PeerLost", "worker-1 is gone")
    assert cloudpickle.loads(failed.pickled).peer == "worker-1"


class Unbuildable(nn.Module):
    """Raises when it is unpickled."""

    def __reduce__(self):
        return (int, ("no number",))


def test_a_stage_that_cannot_be_built_is_named():
    plan = plan_for("interleaved-1f1b", num_stages=4, per_update=2)
    host = Host((0, 2)).put(start(plan=plan), start(Unbuildable(), stage=2, plan=plan))
    failed = host.failure()
    assert (failed.type_name, failed.action) == ("ValueError", "start")
    assert [(each[0], type(each[-1])) for each in host.sent] == [(0, Ready), (2, Failed)]
