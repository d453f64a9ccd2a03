"""Every wrong input is a clear error, before anything is lost; every failure ends everything."""

import dataclasses
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support import forked
from support.deadlines import LATEST_S
from support.models import Of, Raises, mlp, regression
from support.pinned import Pipeline
from support.small import small
from torch import nn

from pipedream_rt import (
    CheckpointError,
    Checkpoints,
    ConfigError,
    Layout,
    MessageTimeout,
    NonFiniteLoss,
    PipelineClosed,
    Recovery,
    RendezvousTimeout,
    StageFailed,
)
from pipedream_rt.serial.cluster import SerialCluster

pytestmark = [pytest.mark.threads, pytest.mark.usefixtures("environment")]

NO_CUDA = "accelerator of kind 'cuda'; this process has cpu"


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"stages": 0}, "stages must be from 1 to the number of layers, 6, not 0"),
        ({"stages": 7}, "stages must be from 1 to the number of layers, 6, not 7"),
        ({"stages": [2, 1]}, "split points must rise"),
        ({"schedule": "zigzag"}, r"unknown schedule 'zigzag'(?s:.*)async-1f1b"),
        ({"micro_batches": 0}, "micro_batches must be an integer of at least 1"),
        ({"threads": 0}, "threads must be an integer of at least 1"),
        ({"layout": lambda: Layout(credits=-1)}, "credits must be an integer of at least 1"),
        ({"layout": 3}, r"layout must be Layout\(...\), not 3"),
        (
            {"recovery": lambda: Recovery(answer=30)},
            "answer must be a positive .*timedelta, not 30",
        ),
        ({"recovery": 30}, r"recovery must be Recovery\(...\), not 30"),
        ({"recovery": lambda: Recovery(start=timedelta(0))}, "start must be a positive"),
        (
            {"clipp": 1},
            r"no option 'clipp'; clip belongs to Training: give training=Training\(clip",
        ),
        ({"stagse": 3}, "no option 'stagse'; did you mean stages?"),
        ({"timeouts": 3}, "no option 'timeouts'"),
        ({"on_nan": "panic"}, "on_nan must be 'raise' or 'ignore'"),
        ({"loss_fn": 3}, "loss_fn must be callable"),
        (
            {"loss_fn": lambda: nn.MSELoss},
            r"loss_fn is the class MSELoss; give an instance, MSELoss\(\)",
        ),
        ({"seed": None}, "seed must be an integer, not None"),
        ({"seed": "7"}, "seed must be an integer, not '7'"),
        ({"fingerprint_every": 0}, "fingerprint_every must be an integer of at least 1"),
        (
            {"checkpoint": lambda: Checkpoints("run", attempts=0)},
            "attempts, .* integer of at least",
        ),
        ({"checkpoint": lambda: Checkpoints("run", accept=["all"])}, "accept is a list of what"),
        ({"optimizer": "adam"}, r"optimizer must be \(class, dict"),
        ({"workers": "somewhere"}, "write HOST:PORT"),
        ({"workers": 4}, 'workers must be "local", "serial", "ray", "HOST:PORT" or an engine'),
        ({"workers": "192.0.2.1:29500"}, "cannot listen at 192.0.2.1:29500"),
        ({"checkpoint": 5}, "folder of the checkpoints must be a path, not 5"),
        ({"checkpoint": lambda: Checkpoints("run", every=0)}, "every, .* must be an integer of at"),
        ({"checkpoint": lambda: Checkpoints("run", keep=0)}, "keep, .* integer of at least 1"),
        ({"max_restarts": -1}, "max_restarts must be an integer of at least 0"),
        ({"recovery": lambda: Recovery(heartbeat=10)}, "heartbeat must be a positive"),
        ({"slack": -1}, "slack must be integers of at least 0, not -1"),
        ({"slack": 1.5}, "slack must be integers of at least 0, not 1.5"),
        ({"slack": None}, "slack must be integers of at least 0, not None"),
        ({"slack": "1"}, "slack must be integers of at least 0, not '1'"),
        ({"slack": [1]}, "slack has 1 numbers, but 3 stages have 2 hops"),
        ({"slack": [1, True]}, "slack must be integers of at least 0, not True"),
        ({"slack": 1, "schedule": "gpipe"}, "gpipe has no warm-up that slack could lengthen"),
        ({"slack": 1, "schedule": "zero-bubble"}, "zero-bubble has no warm-up that slack"),
        ({"slack": 1, "schedule": "2bw", "micro_batches": 4}, "2bw needs at least as many"),
        ({"devices": "cuda:0"}, NO_CUDA),
        ({"devices": "cuda"}, NO_CUDA),
        ({"devices": ["cpu", "cpu", "cuda:1"]}, NO_CUDA),
        ({"devices": "gpu"}, "device"),
        ({"devices": "cpu:x"}, "device"),
        ({"devices": "meta"}, "device"),
        ({"devices": ["cpu", "cpu"]}, "devices has 2 names, and the plan has 3 stages"),
        ({"devices": 1}, "devices must be the name of a device"),
    ],
)
def test_wrong_arguments(kwargs, words):
    before = threading.active_count()
    with pytest.raises(ConfigError, match=words):
        small(**{name: value() if callable(value) else value for name, value in kwargs.items()})
    assert threading.active_count() == before


@pytest.mark.parametrize("model", [None, 3, torch.ones(2)])
def test_what_is_no_model(model):
    with pytest.raises(ConfigError, match=r"is a Tensor|give an nn.Sequential or a list"):
        Pipeline(model, stages=1, workers="serial")


def test_training_without_loss_or_optimizer():
    with (
        small(loss_fn=None) as pipe,
        pytest.raises(ConfigError, match="needs loss_fn and optimizer"),
    ):
        pipe.submit(*regression(1)[0])
    with small(optimizer=None) as pipe:
        with pytest.raises(ConfigError, match="needs loss_fn and optimizer"):
            pipe.submit(*regression(1)[0])
        with pytest.raises(ConfigError, match="made without an optimizer"):
            _ = pipe.optimizer
        assert pipe(torch.ones(1, 8)).shape == (1, 8)  # inference is possible
        with pytest.raises(ConfigError, match="assign a DistributedOptimizer"):
            pipe.optimizer = torch.optim.SGD(mlp().parameters())
    with small(loss_fn=None) as pipe, pytest.raises(ConfigError, match="evaluate needs a loss"):
        pipe.evaluate(regression(1))


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (torch.ones(4, 8), r"must yield pairs \(x, y\), .* this item is a Tensor"),
        (None, "this item is a NoneType"),
        ((1, 2, 3), "this item is a tuple of 3"),
        ((torch.ones(0, 8), torch.ones(0, 8)), "without samples cannot be trained on"),
        ((torch.ones(4, 8), torch.ones(3, 8)), "has 3 samples where 4 are expected"),
        (
            ({"x": {1, 2}}, torch.ones(4, 8)),
            "without samples cannot be trained on|cannot cross stages",
        ),
    ],
)
def test_a_wrong_item_of_the_loader_loses_nothing(item, words):
    """The pipeline goes on after it."""
    with small(micro_batches=2) as pipe:
        list(pipe.train_epoch(regression(2)))
        with pytest.raises(ConfigError, match=words):
            list(pipe.train_epoch([item]))
        assert [r.step for r in pipe.train_epoch(regression(2))] == [2, 3]


def test_an_empty_loader():
    with small() as pipe:
        assert list(pipe.train_epoch([])) == []
        with pytest.raises(ConfigError, match="yielded nothing"):
            pipe.evaluate([])


def test_an_error_of_the_loader_arrives_as_it_is_and_loses_nothing():
    def loader():
        yield from regression(3)
        raise OSError("the loader's own words")

    with small() as pipe:
        steps = []
        with pytest.raises(OSError, match="own words"):
            steps.extend(r.step for r in pipe.train_epoch(loader()))
        assert steps == [0, 1, 2]
        assert len(list(pipe.train_epoch(regression(2)))) == 2


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_error_of_a_layer_names_stage_and_action(stage, where):
    layers = list(mlp())
    layers.insert(2 * stage + 1, Raises(at=3, where=where))
    points = [p + (p > 2 * stage) for p in (2, 4)]
    pipe = small(nn.Sequential(*layers), stages=points)
    with pytest.raises(
        StageFailed, match=f"stage {stage}, {where[0].upper()}3: ZeroDivisionError: the layer's own"
    ) as e:
        list(pipe.train_epoch(regression(20)))
    assert e.value.stage == stage
    assert e.value.action == f"{where[0].upper()}3"
    assert isinstance(e.value.__cause__, ZeroDivisionError)
    assert "in _raise" in e.value.trace or "in forward" in e.value.trace
    with pytest.raises(PipelineClosed, match="the pipeline has failed: stage"):
        pipe.flush()


class Odd(Exception):
    """One that does not pickle."""

    def __init__(self, words):
        super().__init__(words)
        self.lock = threading.Lock()


class Worse(Exception):
    """One whose text cannot be written."""

    def __str__(self):
        raise ValueError("no text")


class Stubborn(torch.optim.SGD):
    def step(self, closure=None):
        raise ArithmeticError("will not step")


def raising(make_error):
    def function(*given):
        raise make_error()

    return function


def of(function):
    """A model whose second stage is a function."""
    return {"model": nn.Sequential(nn.Linear(8, 8), Of(function), nn.Linear(8, 8))}


FAILURES = {
    "it does not pickle": (of(raising(lambda: Odd("odd words"))), "Odd: odd words", Exception),
    "it has no text": (of(raising(Worse)), "Worse: ", Exception),
    "its text is not valid": (
        of(raising(lambda: OSError("bad name \udcff"))), "OSError: bad name", Exception
    ),
    "of the loss": (
        {"loss_fn": raising(lambda: KeyError("no such class"))},
        "stage 2, F0: KeyError: 'no such class'", KeyError,
    ),
    "of the optimizer": (
        {"optimizer": (Stubborn, {"lr": 0.1})}, "S0: ArithmeticError: will not step",
        ArithmeticError,
    ),
    "a loss that is no scalar": (
        {"loss_fn": lambda o, t: o - t}, r"one element, it returned \(4, 8\)", ConfigError
    ),
    "an output that cannot cross": (
        of(lambda x: {"x": x, "lock": {1}}),
        r"value\['lock'\] is a builtins.set, which cannot cross", ConfigError,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("options", "words", "cause"), FAILURES.values(), ids=FAILURES)
def test_every_error_arrives(options, words, cause):
    with pytest.raises(StageFailed, match=words) as e:
        list(small(**options).train_epoch(regression(9)))
    assert isinstance(e.value.__cause__, cause)
    if "odd words" in words:
        assert "odd words" in str(e.value.__cause__)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_names_stage_and_micro_batch(value):
    def loss(output, target):
        return F.mse_loss(output, target) * (value if target[0, 0] > 100 else 1)

    data = regression(6)
    data[4][1][0, 0] = 1000
    results = []
    with pytest.raises(
        NonFiniteLoss, match=r"stage 2: the loss of micro-batch 4 is (nan|inf)"
    ) as e:
        results.extend(r.step for r in small(loss_fn=loss).train_epoch(data))
    assert (e.value.stage, e.value.action) == (2, "F4")
    assert results == list(range(len(results)))


@pytest.mark.parametrize("wrong", [{1, 2}, [2**70], object()])
def test_a_failed_submit_sends_nothing(wrong):
    """The target is looked at before the input is sent: the run goes on as if it had not been."""
    losses = []
    for fails in (False, True):
        with small() as pipe:
            if fails:
                with pytest.raises(ConfigError, match=r"value.* is a"):
                    pipe.submit(torch.ones(4, 8), wrong)
            losses.append([r.loss for r in pipe.train_epoch(regression(4))])
    assert losses[0] == losses[1]


class LosingCluster(SerialCluster):
    """Loses what stage 0 sends on of the second mini-batch; its stages are patient."""

    def __init__(self, spec):
        super().__init__(dataclasses.replace(spec, timeout=timedelta(seconds=60)))
        send = self.transport.send

        def losing(message):
            if (message.sender, message.to, message.number) != (0, 1, 3):
                send(message)

        self.transport.send = losing


def test_a_stall_is_an_error_that_tells_who_waits_for_what():
    pipe = small(stages=2, answer=timedelta(seconds=0.3), workers=LosingCluster)
    with pytest.raises(MessageTimeout) as e:
        list(pipe.train_epoch(regression(3)))
    assert str(e.value) == (
        "the coordinator waited 0.3 s for loss 3 from stage 1, which did not come; "
        "the inbox holds nothing; "
        "waiting for loss 3 from stage 1; last actions: none\n"
        "stage 0: waiting for gradient 3 from stage 1; last actions: optimizer F0 F1 B0 S0 F2 B1\n"
        "stage 1: waiting for activation 3 from stage 0 or command 3 from the coordinator; "
        "last actions: optimizer F0 B0 S0"
    )


def test_workers_that_never_join_are_counted():
    with pytest.raises(
        RendezvousTimeout, match=r"3 of 3 workers did not join within 0.2 s.*none"
    ) as e:
        small(workers="127.0.0.1:0", start=timedelta(seconds=0.2))
    assert e.value.missing == 3


def test_a_batch_on_another_device_is_refused_and_the_run_goes_on():
    x, y = regression(1)[0]
    with small() as pipe:
        with pytest.raises(ConfigError, match=r"a tensor on the device meta, which has no values"):
            pipe.submit(x.to("meta"), y)
        with pytest.raises(ConfigError, match=r"a tensor on the device meta, which has no values"):
            pipe.submit(x, y.to("meta"))
        pending = pipe.submit(x, y)
        pipe.flush()
        assert pending.result().step == 0


def test_a_sparse_state_is_refused_where_it_is_asked_for_and_the_run_goes_on(tmp_path):
    """SGD keeps the gradients of a sparse embedding in its momentum as they are."""
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    batch = torch.randint(10, (4,)), torch.randint(2, (4,))
    optimizer = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
    with small(model, stages=2, loss_fn=F.cross_entropy, optimizer=optimizer) as pipe:
        pipe.submit(*batch)
        with pytest.raises(
            ConfigError, match=r"stage 0: .*'momentum_buffer'.* layout torch.sparse"
        ):
            pipe.optimizer.state_dict()
        with pytest.raises(CheckpointError, match=r"'momentum_buffer'.* cannot be saved"):
            pipe.save(tmp_path)
        pending = pipe.submit(*batch)
        pipe.flush()
        assert pending.result().step == 1


@pytest.mark.parametrize("state", [3, None, {}, {"state": {}}, []])
def test_what_is_no_state_dict_is_refused(state):
    with small() as pipe:
        with pytest.raises(ConfigError, match=r"the state dict of an optimizer is a dict with"):
            pipe.optimizer.load_state_dict(state)
        with pytest.raises(ConfigError, match=r"a state dict is a dict of|missing keys: \['"):
            pipe.load_state_dict(state)
        pending = pipe.submit(*regression(1)[0])
        pipe.flush()
        assert pending.result().step == 0


@pytest.mark.parametrize(
    "wait",
    [
        lambda pipe: pipe.flush(),
        lambda pipe: pipe.state_dict(),
        lambda pipe: pipe.fingerprint(),
        lambda pipe: pipe.optimizer.state_dict(),
        lambda pipe: pipe.evaluate(regression(1)),
    ],
    ids=["flush", "state", "fingerprint", "optimizer", "evaluate"],
)
def test_a_setting_that_would_reach_stages_is_refused_and_ends_nothing(wait):
    x, y = regression(1)[0]
    words = r"get_default_dtype\(\) was torch.float32"

    def losses(disturb):
        torch.manual_seed(1)
        with small() as pipe:
            pending = [pipe.submit(x, y) for _ in range(3)]
            if disturb:
                torch.set_default_dtype(torch.float64)
                try:
                    for refused in (lambda: wait(pipe), pending[0].result):
                        with pytest.raises(ConfigError, match=words):
                            refused()
                finally:
                    torch.set_default_dtype(torch.float32)
            pending += [pipe.submit(x, y) for _ in range(3)]
            pipe.flush()
            return [each.result().loss for each in pending]

    assert losses(disturb=True) == losses(disturb=False)


def test_a_model_that_is_spread_over_processes_is_refused(tmp_path):
    """In a process of its own, which has a group of one."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "from torch import nn\n"
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module\n"
        "from pipedream_rt import ConfigError, Pipeline\n"
        f"dist.init_process_group('gloo', init_method='file://{tmp_path}/group',\n"
        "                        rank=0, world_size=1)\n"
        "model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))\n"
        "parallelize_module(model, init_device_mesh('cpu', (1,)), {'0': ColwiseParallel()})\n"
        "try:\n"
        "    Pipeline(model, stages=2)\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
        "dist.destroy_process_group()\n"
    )
    done = forked.run(
        [sys.executable, "-W", "ignore", script], capture_output=True, text=True, timeout=LATEST_S
    )
    assert "0.weight is a DTensor" in done.stdout, done.stdout + done.stderr
    assert "before parallelize_module" in done.stdout


def test_an_optimizer_that_accelerate_prepared_is_refused():
    accelerate = pytest.importorskip("accelerate")
    model = mlp()
    accelerator = accelerate.Accelerator(cpu=True)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match=r"prepare\(\) returned.*or optimizer\.optimizer"):
        small(model, optimizer=optimizer)


def test_what_pipeline_refuses_has_a_short_traceback():
    with pytest.raises(ConfigError) as caught:
        small(stages=99)
    names = [Path(str(entry.path)).name for entry in caught.traceback]
    assert len(names) <= 7
    assert not {"job.py", "split.py", "splitting.py"} & set(names)
