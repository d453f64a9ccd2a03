"""Models given whole: cut into stages, they train to the bits of the unsplit model."""

import copy
import functools
import itertools
import math
import threading

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from support import both, whole
from support.both import learned, losses_of
from support.device.references import computed_on_the_device
from support.faults import losses_through_death
from support.inside import kill
from support.models import regression
from support.oracle import assert_same
from support.pinned import Pipeline
from support.skips import unet
from support.small import SGD as PLAIN_SGD
from support.small import small
from support.written import RisingSteps
from torch import nn

from pipedream_rt import Checkpoints, Clip, LayerSpec, LossScale
from pipedream_rt.errors import ConfigError, ScheduleError

SGD = (torch.optim.SGD, {"lr": 1e-4, "momentum": 0.9})
ADAMW = (torch.optim.AdamW, {"lr": 0.01})


class Case:
    """A model, its data and its loss."""

    def __init__(self, model, data, loss, optimizer=SGD):
        self.make, self.data, self.loss = model, data, loss
        self.optimizer = optimizer

    def model(self, dropout=True):
        torch.manual_seed(7)
        return self.make() if dropout else whole.without_dropout(self.make())

    def make_optimizer(self, parameters):
        cls, kwargs = self.optimizer
        return cls(parameters, **kwargs)

    def pipeline(self, model=None, **options):
        options = {"example": self.data(1)[0], "workers": "serial", **options}
        model = self.model() if model is None else model
        return Pipeline(model, loss_fn=self.loss, optimizer=self.optimizer, **options)

    def plainly(self, data, **options):
        """The losses and the weights of the plain loop, without dropout."""
        weights, losses = whole.plainly(
            self.model(), data, self.loss, self.make_optimizer, **options
        )
        return losses, weights


CASES = {
    "resnet": Case(whole.ResNet, whole.images, F.cross_entropy),
    "unet": Case(whole.UNet, whole.maps, F.cross_entropy, ADAMW),
    "lstm": Case(whole.LanguageModel, whole.masked_sentences, whole.masked_loss, ADAMW),
    "head first": Case(whole.HeadFirst, whole.masked_sentences, whole.masked_loss, ADAMW),
    "deep": Case(
        whole.Deep, whole.points, F.mse_loss, (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9})
    ),
    "decoder": Case(
        whole.Decoder, lambda count: whole.sentences(count, words=17), whole.words_loss, ADAMW
    ),
    "three uses": Case(
        whole.ThreeUses, lambda count: whole.sentences(count, words=11), whole.words_loss, ADAMW
    ),
}


@pytest.fixture(params=[name for name in CASES if name != "deep"])
def case(request):
    return CASES[request.param]


def stages_of(pipe, model):
    """The stage of each parameter, by every name that it has."""
    first, found = {tie.name: tie.stages[0] for tie in pipe.plan.ties}, {}
    whole_name = {id(p): name for name, p in model.named_parameters()}
    assert set(first) <= set(whole_name.values())
    for name, parameter in model.named_parameters(remove_duplicate=False):
        mine = [
            stage
            for stage, names in enumerate(pipe.plan.layers)
            if any(name == each or name.startswith(f"{each}.") for each in names)
        ]
        found[name] = mine or [0]
        if (of_whole := whole_name[id(parameter)]) in first:
            assert mine[0] >= first[of_whole]
    return found


@pytest.mark.thinned(7)
@pytest.mark.threads
@pytest.mark.parametrize(("schedule", "k"), [("1f1b", 1), ("1f1b", 2), ("gpipe", 2)])
def test_a_schedule_that_flushes_gives_the_bits_of_any_other_number_of_stages(case, schedule, k):
    """With dropout, statistics of BatchNorm, shapes that vary, and keyword arguments."""
    if k > 1 and case is CASES["three uses"]:
        pytest.skip("the shares of a tied weight are summed by stage: see the oracle")
    data, expected = case.data(4), None
    for stages in (1, 2, 4):  # without dropout, on three below
        with case.pipeline(stages=stages, schedule=schedule, micro_batches=k) as pipe:
            found = (*learned(pipe, data), pipe.evaluate(data))
        if expected is None:
            expected = found
        if k > 1 and case in (CASES["lstm"], CASES["head first"]) and stages > 1:
            continue  # tied, as above
        both.assert_same(found, expected)
        assert found[2] == expected[2], stages


def of_oracle(case, pipe, data, **options):
    """The losses and the weights of the oracle."""
    model = case.model()
    modules = dict(model.named_modules())
    layers = {name: None for names in pipe.plan.layers for name in names if name in modules}
    weights, losses = whole.oracle(
        model, stages_of(pipe, model), list(layers), data, case.loss, case.make_optimizer, **options
    )
    return losses, weights


@pytest.mark.thinned(3)
@pytest.mark.threads
@pytest.mark.parametrize(
    ("schedule", "k", "reads"),
    [
        ("async-1f1b", 2, "async-1f1b"),  # with one micro-batch below
        ("2bw", 4, "2bw"),
        ("1f1b", 2, "flushed"),
    ],
)
def test_asynchronous_training_equals_the_oracle(case, schedule, k, reads):
    if k > 2 and case is CASES["resnet"]:
        pytest.skip("BatchNorm needs more than one sample")
    if k > 1 and case is CASES["three uses"]:
        pytest.skip("the oracle knows the stage of a use by its name, which here is on three")
    data = case.data(6)
    with case.pipeline(stages=4, schedule=schedule, micro_batches=k) as pipe:
        expected = of_oracle(case, pipe, data, k=k, reads=reads)
        both.assert_same(learned(pipe, data), expected)


@computed_on_the_device
def applied(model, args, kwargs):
    with torch.no_grad():
        return model(*args, **kwargs)


@pytest.mark.threads
def test_a_flush_an_evaluation_and_a_checkpoint_on_the_way_change_nothing(case, tmp_path):
    """With another number of stages at the end, in the loading of which tied weights are found.

    Its predictions come in order, and are those of single calls and of the unsplit model.
    """
    data = case.data(6)
    with case.pipeline(stages=4) as pipe:
        losses, weights = of_oracle(case, pipe, data)
        found = losses_of(pipe, data[:3])
        pipe.evaluate(data[:2])
        pipe.save(tmp_path)
        args, kwargs, _ = whole.parts_of(data[0])
        pipe(*args, **kwargs)
    with case.pipeline(stages=4) as pipe:
        pipe.load(tmp_path)
        found += losses_of(pipe, data[3:])
        assert found == losses
        assert_same(pipe.state_dict(), weights)
        assert_same(pipe.module().state_dict(), weights)
        step = pipe.save(tmp_path / "other")
    plain = case.model().eval()
    plain.load_state_dict(weights)
    with case.pipeline(stages=3) as pipe:
        pipe.load(step)
        assert_same(pipe.state_dict(), weights)
        made = list(pipe.predict(data))
        for item, predicted in zip(data, made, strict=True):
            args, kwargs, _ = whole.parts_of(item)
            outputs = [applied(plain, args, kwargs), pipe(*args, **kwargs), predicted]
            if isinstance(predicted, dict):
                outputs = [output["scores"] for output in outputs]
            assert torch.equal(outputs[1], outputs[0])
            assert torch.equal(outputs[2], outputs[0])
        first = next(pipe.predict(data))  # the rest is dropped
        assert type(first) is type(made[0])
        assert [r.step for r in pipe.train_epoch(data[:2])] == [6, 7]


@pytest.mark.threads
def test_predictions_of_a_decoder_come_in_order():
    """On a device the test above is not for it: plain PyTorch has another kernel there."""
    case = CASES["decoder"]
    data = case.data(6)
    with case.pipeline(stages=3) as pipe:
        for item, predicted in zip(data, pipe.predict(data), strict=True):
            args, kwargs, _ = whole.parts_of(item)
            assert torch.equal(predicted, pipe(*args, **kwargs))


@pytest.mark.processes
def test_processes_give_the_same_bits_through_the_death_of_a_worker(case, tmp_path):
    data = case.data(12)
    with case.pipeline(
        stages=3, workers="local", checkpoint=Checkpoints(tmp_path, every=3), max_restarts=1
    ) as pipe:
        expected = of_oracle(case, pipe, data)
        found = losses_through_death(pipe, data, "worker-1", step=4)
        both.assert_same((found, pipe.state_dict()), expected)
        assert len(pipe.restarts) == 1


# -- what passes between stages -----------------------------------------------------------------


def test_a_value_goes_straight_to_the_stages_that_need_it():
    """On seven stages, three on the way down and three up: each skip is one hop.

    What is done before a layer is done on the stage before it, so the skip of ``up.0`` ends there.
    """
    case = CASES["unet"]
    with case.pipeline(stages=["down.1", "down.2", "mid", "up.0", "up.1", "up.2"]) as pipe:
        links = set(pipe.plan.links)
        assert links == {*((s, s + 1) for s in range(6)), (1, 4), (0, 5)}
        assert pipe.plan.entries == (0,)


def test_inputs_go_to_the_stages_that_need_them_and_what_is_made_of_them_is_not_sent():
    case = CASES["lstm"]
    with case.pipeline(stages=["lower", "upper", "project"]) as pipe:
        assert pipe.plan.entries == (0, 1, 3)  # the words; the mask, there and in the output
        tie = pipe.plan.ties[0]
        assert (tie.name, tie.stages) == ("embed.weight", (0, 3))


def test_a_mini_batch_of_another_kind_is_another_program():
    """With and without a mask: what Python decides, it decides anew."""
    case = CASES["lstm"]
    words, target = whole.sentences(1)[0]
    with case.pipeline(stages=3, schedule="1f1b") as pipe:
        pipe.submit((words,), {"keep": torch.ones_like(words, dtype=torch.bool)}, target).result()
        pipe.submit(words, target).result()
        assert len(pipe._run.feeder.forwards.cuts) > 2
        with pytest.raises(Exception, match=r"does not take|Expected tensor for argument"):
            pipe.submit(words.float(), target).result()  # on torch 2.11 the stage finds it


# -- around training ----------------------------------------------------------------------------


def skip_without_kernel_of(case, dtype):
    """Not every processor has a kernel of oneDNN for an LSTM in bfloat16."""
    if not any(isinstance(module, nn.LSTM) for module in case.model().modules()):
        return
    try:
        with torch.autocast("cpu", dtype=dtype):
            nn.LSTM(6, 6, batch_first=True)(torch.zeros(2, 3, 6))
    except RuntimeError as error:
        pytest.skip(f"an LSTM in {dtype} is not to be had on this processor: {error}")


@pytest.mark.thinned(3)
@pytest.mark.threads
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("recompute", [True, [0, 2]])
def test_activations_that_are_computed_again_are_the_same(case, recompute, autocast):
    """With dropout, and statistics of BatchNorm that move once."""
    data = case.data(5)
    if autocast is not None:
        skip_without_kernel_of(case, autocast)
    found = []
    for options in ({}, {"recompute": recompute}):
        with case.pipeline(stages=3, autocast=autocast, **options) as pipe:
            losses = [*losses_of(pipe, data), pipe.evaluate(data)]
            found.append((losses, pipe.state_dict()))
    both.assert_same(*found)


CLIPS = {
    "norm": (Clip(norm=0.05), lambda p: nn.utils.clip_grad_norm_(p, 0.05)),
    "infinite norm": (
        Clip(norm=0.02, norm_type=math.inf), lambda p: nn.utils.clip_grad_norm_(p, 0.02, math.inf)
    ),
    "value": (Clip(value=0.003), lambda p: nn.utils.clip_grad_value_(p, 0.003)),
}  # fmt: skip


@pytest.mark.thinned(7)
@pytest.mark.threads
@pytest.mark.parametrize("how", CLIPS)
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_clipping_is_that_of_the_plain_loop(case, how, schedule):
    """With a flush on the way, and the last update applied before the weights are read."""
    clip, plainly = CLIPS[how]
    if schedule == "zero-bubble" and case is CASES["three uses"]:
        pytest.skip("halves of a backward sum the gradients of a weight with several uses apart")
    data = case.data(5)
    expected = case.plainly(data, clip=plainly)
    plain = case.plainly(data)[1]
    assert any(not torch.equal(plain[key], value) for key, value in expected[1].items()), (
        "nothing is clipped"
    )
    for stages in (1, 3):
        with case.pipeline(
            case.model(dropout=False), stages=stages, schedule=schedule, clip=clip
        ) as pipe:
            found = losses_of(pipe, data[:2])
            pipe.evaluate(data[:1])
            found += losses_of(pipe, data[2:])
            both.assert_same((found, pipe.state_dict()), expected)


@pytest.mark.threads
@pytest.mark.parametrize("scaled", [False, True])
def test_norms_pass_through_workers_with_several_stages(scaled):
    """Worker 0 has the stages 0 and 2; a total norm goes from the last stage to the first."""
    case = CASES["deep"]
    data = case.data(4)
    expected = case.plainly(data, k=2, clip=CLIPS["norm"][1])
    options = {"stages": 4, "micro_batches": 2, "clip": Clip(norm=0.05)}
    if scaled:  # without float16 it changes no bit, since the scale is a power of two
        options["loss_scale"] = LossScale(init_scale=1024.0)
    with case.pipeline(schedule="interleaved-1f1b", **options) as pipe:
        assert pipe.plan.workers == 2
        both.assert_same(learned(pipe, data), expected)
    options["stages_per_worker"] = 2
    rule = r"(?s)stage 0 waits in 0:S0 for norm 0 from stage 1.* from its last stage to its first"
    with pytest.raises(ScheduleError, match=rule):
        case.pipeline(schedule=RisingSteps(), **options)
    del options["clip"], options["stages"]
    if not scaled:
        with case.pipeline(schedule=RisingSteps(), stages=4, **options) as pipe:
            assert len(list(pipe.train_epoch(data))) == 4


@pytest.mark.threads
@pytest.mark.parametrize(
    ("schedule", "reads", "k", "delay"),
    [
        ("async-1f1b", "async-1f1b", 1, 4),
        ("async-1f1b", "async-1f1b", 2, 2),
        ("async-1f1b+vertical-sync", "vertical-sync", 1, 0),
        ("2bw", "2bw", 4, 0),
    ],
)
def test_asynchronous_clipping_equals_the_oracle(schedule, reads, k, delay, tmp_path):
    """Exact where an update is read late enough, else estimated from D mini-batches before.

    Through a flush, and a checkpoint from which another pipeline goes on.
    """
    case = CASES["lstm"] if k > 1 else CASES["unet"]
    data = case.data(12)
    options = {"stages": 4, "micro_batches": k, "clip": Clip(norm=0.05), "schedule": schedule}
    with case.pipeline(**options) as pipe:
        expected = of_oracle(case, pipe, data, k=k, reads=reads, clip=(0.05, delay or "exact"))
        losses = losses_of(pipe, data[:5])
        pipe.flush()
        losses += losses_of(pipe, data[5:7])
        pipe.save(tmp_path)
    with case.pipeline(**options) as pipe:
        pipe.load(tmp_path)
        losses += losses_of(pipe, data[7:])
        both.assert_same((losses, pipe.state_dict()), expected)


@pytest.mark.processes
@pytest.mark.parametrize("schedule", ["async-1f1b", "async-1f1b+vertical-sync"])
def test_clipping_survives_a_worker(schedule, tmp_path):
    case = CASES["unet"]
    data = case.data(14)
    exact = schedule != "async-1f1b"
    with case.pipeline(
        stages=3, workers="local", checkpoint=Checkpoints(tmp_path, every=3), max_restarts=1,
        clip=Clip(norm=0.05), schedule=schedule,
    ) as pipe:  # fmt: skip
        reads = "vertical-sync" if exact else "async-1f1b"
        clip = (0.05, "exact" if exact else 3)
        expected = of_oracle(case, pipe, data, reads=reads, clip=clip)
        found = losses_through_death(pipe, data, "worker-0", step=6)
        both.assert_same((found, pipe.state_dict()), expected)
        assert len(pipe.restarts) == 1


@functools.cache
def clipped_unet(schedule):
    """What it learns of ten mini-batches without a stop, and the options."""
    case, options = CASES["unet"], {"stages": 3, "clip": Clip(norm=0.05), "schedule": schedule}
    with case.pipeline(**options) as pipe:
        return options, *learned(pipe, case.data(10))


@pytest.mark.threads
@pytest.mark.parametrize("schedule", ["async-1f1b", "async-1f1b+vertical-sync"])
@pytest.mark.parametrize("stop", [4, 5, 7])
def test_clipping_goes_on_from_a_checkpoint_that_did_not_stop_the_pipe(schedule, stop, tmp_path):
    """Updates wait for their norm, while later micro-batches drop versions that come again."""
    case = CASES["unet"]
    data = case.data(10)
    options, losses, weights = clipped_unet(schedule)
    with case.pipeline(checkpoint=Checkpoints(tmp_path, every=2), **options) as pipe:
        for result in pipe.train_epoch(data):
            if result.step == stop:
                break
    resumed = Checkpoints(tmp_path, resume=True)
    with case.pipeline(checkpoint=resumed, **options) as pipe:
        assert pipe.resumed.step >= 2
        found = losses_of(pipe, data)
        assert found == losses[-len(found) :]
        assert_same(pipe.state_dict(), weights)


@pytest.mark.threads
def test_clipping_by_the_norm_of_each_stage():
    case = CASES["unet"]
    data = case.data(6)
    with case.pipeline(stages=3, clip=Clip(norm=0.03, over="stage")) as pipe:
        expected = of_oracle(case, pipe, data, clip=(0.03, "stage"))
        both.assert_same(learned(pipe, data), expected)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "needs norm= or value="),
        ({"norm": 1.0, "value": 1.0}, "not both"),
        ({"norm": 0}, "norm of Clip must be a positive number"),
        ({"norm": math.nan}, "positive number, not nan"),
        ({"norm": 1.0, "over": "all"}, 'must be "model" or "stage"'),
    ],
)
def test_a_clip_that_makes_no_sense_is_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        Clip(**given)


@pytest.mark.threads
def test_parameter_groups_by_pattern_and_by_function():
    """The first rule that fits counts; the rest has the defaults."""
    case = CASES["unet"]
    data, model = case.data(3), case.model()
    rules = [
        ("*.bias", {"weight_decay": 0.0}),
        (lambda name, parameter: parameter.dim() < 2, {"lr": 0.5}),
        ("up.*", {"lr": 0.001}),
    ]
    named = dict(model.named_parameters())
    biases = [p for n, p in named.items() if n.endswith(".bias")]
    up = [p for n, p in named.items() if n.startswith("up.") and n.endswith("weight")]
    rest = [p for n, p in named.items() if not n.endswith(".bias") and n[:3] not in ("up.", "gai")]
    groups = [
        {"params": biases, "weight_decay": 0.0}, {"params": [model.gain], "lr": 0.5},
        {"params": up, "lr": 0.001}, {"params": rest},
    ]  # fmt: skip
    own = torch.optim.AdamW(groups, lr=0.01)
    found = []
    for optimizer in ((torch.optim.AdamW, {"lr": 0.01}, rules), own):
        with Pipeline(
            model, example=data[0], loss_fn=case.loss, optimizer=optimizer, workers="serial",
            stages=3,
        ) as pipe:  # fmt: skip
            rates = [group["lr"] for group in pipe.optimizer.param_groups]
            assert rates == [0.01, 0.5, 0.001, 0.01]
            found.append(learned(pipe, data))
    both.assert_same(*found)


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # torch's own, in compile
@pytest.mark.parametrize("compiled", [torch.compile, lambda model: model.compile() or model])
def test_a_model_that_is_compiled_as_a_whole_is_refused(compiled):
    case = CASES["unet"]
    with pytest.raises(ConfigError, match=r"is compiled as a whole.* compiles its layers"):
        Pipeline(compiled(case.model()), stages=2, example=case.data(1)[0], loss_fn=case.loss)


compiled_graphs = []


def eagerly(graph, inputs):
    """A backend of torch.compile that changes nothing."""
    compiled_graphs.append(graph)
    return graph.forward


@pytest.mark.threads
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # torch's own, in compile
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("name", ["resnet", "unet"])
def test_layers_are_compiled_on_their_workers_once_for_all_versions(name):
    case = CASES[name]
    data, found = case.data(6), []
    for options in ({}, {"compile": {"backend": eagerly}}):
        compiled_graphs.clear()
        with case.pipeline(stages=3, **options) as pipe:
            found.append(learned(pipe, data))
        torch._dynamo.reset()
    assert 4 <= len(compiled_graphs) <= 40  # the whole blocks of the small ResNet are four
    both.assert_same(*found)


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # torch's own, in compile
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_layers_that_a_script_has_compiled_learn_the_same():
    compiled_graphs.clear()
    found = []
    for layers in (
        [torch.compile(each, backend=eagerly) for each in three_layers()],
        three_layers(),
    ):
        with small(layers, stages=2, optimizer=SGD) as pipe:
            found.append(losses_of(pipe, whole.points(4)))
    assert found[0] == found[1]
    assert compiled_graphs
    torch._dynamo.reset()


def three_layers():
    torch.manual_seed(0)
    return [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)]


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # torch's own, in compile
def test_a_layer_that_was_compiled_in_place_is_refused():
    layers = three_layers()
    layers[0].compile()
    with pytest.raises(ConfigError, match=r"(?s)was compiled in place, .*give the model as it was"):
        Pipeline(layers, stages=2)
    with pytest.raises(ConfigError, match="compile must be True, False or a dict"):
        Pipeline(three_layers(), stages=2, compile="max-autotune")


@pytest.mark.threads
@pytest.mark.parametrize("name", ["resnet", "unet"])
def test_autocast_is_that_of_the_plain_loop(name):
    """Without tied weights, whose gradients a cast that is cached sums in its own dtype."""
    case = CASES[name]
    data = case.data(4)
    expected = case.plainly(data, autocast=torch.bfloat16)
    for stages in (1, 3):
        with case.pipeline(
            case.model(dropout=False), stages=stages, schedule="1f1b", autocast=torch.bfloat16
        ) as pipe:
            both.assert_same(learned(pipe, data), expected)


# -- forwards with something odd in them ---------------------------------------------------------


class Odd(nn.Module):
    """Three layers, and a forward that is up to the test."""

    def __init__(self, forward):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))
        self.embed, self.flat = nn.Embedding(9, 6), nn.Flatten()
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.acts = nn.LeakyReLU(0.1, inplace=True)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(6))
        self.kept, self.generator = {"n": 0}, torch.Generator()
        self._forward = forward

    def forward(self, *args):
        return self._forward(self, *args)


def through(self, x):
    return self.c(self.b(self.a(x)))


def fills_its_input(self, x):
    x[:, 0] = 0.0
    return through(self, x)


def returns_what_it_has_filled(self, x):
    mask = torch.zeros_like(x)
    mask[:, 0] = 1.0
    return through(self, x) * mask


def halves_its_input_and_looks(self, x):
    x /= 2
    return through(self, x * 3 if (x > 100).any() else x)


def counts_in_a_buffer(self, x):
    self.count.add_(1)
    return through(self, x)


def asks_for_gradients(self, x):
    h = self.a(x)
    return self.c(self.b(h * 2 if h.requires_grad else h))


def trims(self, x):
    x = x[:, : (x != 0).sum(1).max()]
    return self.b(self.a(self.embed(x)).sum(1) / x.shape[1])


def experts_without_a_condition(self, x):
    x = self.a(x)
    values, chosen = self.b(x)[:, :3].softmax(-1).topk(2)
    out = torch.zeros_like(x)
    for i, expert in enumerate(self.experts):
        rows, columns = torch.where(chosen == i)
        out.index_add_(0, rows, expert(x[rows]) * values[rows, columns, None])
    return self.c(out)


def a_weight_in_the_result(self, x):
    return through(self, x), self.a.weight


def squares(output, target):
    if isinstance(output, tuple):
        return F.mse_loss(output[0], target) + 0.01 * output[1].square().sum()
    return F.mse_loss(output, target)


def vectors(count):
    torch.manual_seed(2)
    return [(torch.randn(8, 6), torch.randn(8, 6)) for _ in range(count)]


def padded(count):
    torch.manual_seed(4)
    lengths = [torch.randint(1, 8, (8, 1)) for _ in range(count)]
    words = [torch.randint(1, 9, (8, 7)) * (torch.arange(7) < n) for n in lengths]
    return [(each, torch.randn(8, 6)) for each in words]


def hooks_its_output(self, x):
    x = through(self, x)
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * 2)
    return x * 1.5


FOLLOWED = [
    fills_its_input, returns_what_it_has_filled, halves_its_input_and_looks, counts_in_a_buffer,
    asks_for_gradients, trims, experts_without_a_condition, a_weight_in_the_result,
]  # fmt: skip


def fills_by_a_layer(self, x):
    mask, h = x * 2, self.a(x)
    mask[:, 0] = h[:, 0]
    return self.c(self.b(h)) * mask


def experts_by_their_rows(self, x):
    x = self.a(x)
    out = torch.zeros_like(x)
    for i, expert in enumerate(self.experts):
        rows = torch.where(x[:, i] > 0)[0]
        if len(rows):
            out.index_add_(0, rows, expert(x[rows]))
    return self.c(self.b(out))


def changes_a_view_of_a_layer(self, x):
    x = self.a(x).unflatten(1, (2, 3)) * 2
    return self.c(self.b(self.acts(self.flat(x))) + x.flatten(1))


def counts_in_a_dict(self, x):
    self.kept["n"] += 1
    return through(self, x) * self.kept["n"]


def draws_by_itself(self, x):
    return through(self, x) + torch.rand(6, generator=self.generator)


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (fills_by_a_layer, "what it has filled|takes on stage 1"),
        (experts_by_their_rows, r"__len__|len\(\) reads values that layers have computed"),
        (changes_a_view_of_a_layer, "changes in place on stage"),
        (counts_in_a_dict, "changes the attribute 'kept' of the model"),
        (draws_by_itself, "draws from a torch.Generator"),
    ],
)
def test_an_odd_forward_is_refused_before_anything_starts(forward, words):
    case = Case(lambda: Odd(forward), vectors, squares)
    with pytest.raises(ConfigError, match=words):
        case.pipeline(stages=["acts"] if forward is changes_a_view_of_a_layer else 2)


class Borrows(nn.Module):
    """A head that is given the embedding as a module, as Perceiver's is."""

    def forward(self, x, embedding):
        return x @ embedding.weight.t()


class Lends(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(9, 4), nn.Linear(4, 4), Borrows()

    def forward(self, words):
        return self.head(self.inner(self.embed(words)), embedding=self.embed)


def test_a_module_that_is_passed_to_a_layer_is_shared_by_their_stages():
    """Its weights are tied."""
    case = Case(Lends, lambda count: whole.sentences(count, words=9), whole.words_loss, ADAMW)
    expected = case.plainly(case.data(4))
    for stages in (1, 2, 3):
        with case.pipeline(stages=stages, schedule="1f1b") as pipe:
            assert [tie.name for tie in pipe.plan.ties] == ["embed.weight"] * (stages > 1)
            both.assert_same(learned(pipe, case.data(4)), expected)


class PassesItself(Lends):
    def forward(self, words):
        return self.head(self.inner(self.embed(words)), embedding=self)


def test_a_module_that_is_taken_apart_cannot_be_passed_on():
    case = Case(PassesItself, lambda count: whole.sentences(count, words=9), whole.words_loss)
    with pytest.raises(ConfigError, match="the module 'of the whole model' is passed on"):
        case.pipeline(stages=2)


@pytest.mark.threads
def test_a_buffer_that_is_changed_behind_its_data_on_two_stages_is_refused():
    def average(self, x):
        h = self.a(x) + self.mean
        self.mean.data.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return self.c(self.b(h)) + self.mean

    case = Case(lambda: Odd(average), vectors, squares)
    with pytest.raises(ConfigError, match="changes mean in place on stage 0"):
        case.pipeline(stages=["b"])


@pytest.mark.threads
def test_activations_are_computed_again_where_the_first_layer_works_in_place():
    layers = [nn.Linear(6, 6), nn.Hardswish(inplace=True), nn.Linear(6, 6)]
    found = []
    for recompute in (False, True):
        with small(layers, stages=[1], optimizer=SGD, recompute=recompute) as pipe:
            found.append(learned(pipe, vectors(4)))
    both.assert_same(*found)


# -- layers that workers build ------------------------------------------------------------------


def specs():
    head = LayerSpec(nn.Linear, 8, 20, bias=False, tied={"weight": "0.weight"})
    return [
        LayerSpec(nn.Embedding, 20, 8),
        LayerSpec(nn.Linear, 8, 8),
        nn.Tanh(),
        LayerSpec(nn.Dropout, 0.1),
        LayerSpec(nn.Linear, 8, 8),
        head,
    ]


def built():
    """The whole model with the weights of seed 3."""
    torch.manual_seed(3)
    layers = [each.build() if isinstance(each, LayerSpec) else each for each in specs()]
    layers[-1].weight = layers[0].weight
    return nn.Sequential(*layers)


@pytest.mark.threads
@pytest.mark.parametrize("workers", ["serial", pytest.param("local", marks=pytest.mark.processes)])
def test_layers_that_workers_build_have_the_weights_of_the_whole(workers):
    data = whole.sentences(4, words=20)
    options = {
        "loss_fn": whole.words_loss, "optimizer": ADAMW, "schedule": "1f1b", "seed": 3,
        "workers": workers,
    }  # fmt: skip
    with Pipeline(built(), stages=1, **{**options, "workers": "serial"}) as pipe:
        expected = learned(pipe, data)
    for stages in (3,) if workers == "local" else (1, 3):
        with Pipeline(specs(), stages=stages, **options) as pipe:
            assert_same(pipe.state_dict(), built().state_dict())
            both.assert_same(learned(pipe, data), expected)
            copy = pipe.module()
            assert copy[5].weight is copy[0].weight
            assert_same(copy.state_dict(), expected[1])


# -- versions that are kept, and the average of the weights ---------------------------------------


def averaged(model, data, loss_fn, make_optimizer, decay):
    """The average of torch, over the plain loop."""
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(decay)
    )
    optimizer = make_optimizer(model.parameters())
    for args, kwargs, target in map(whole.parts_of, data):
        optimizer.zero_grad()
        loss_fn(model(*args, **kwargs), target).backward()
        optimizer.step()
        average.update_parameters(model)
    return average.module


@pytest.mark.threads
@pytest.mark.parametrize("name", ["resnet", "three uses", "head first"])
def test_the_average_of_the_weights_is_that_of_torch(name, tmp_path):
    """BatchNorm's buffers are those of now, and tied weights have one average."""
    case = CASES[name]
    data = case.data(6)
    expected = averaged(case.model(), data, case.loss, case.make_optimizer, 0.8)
    options = {"stages": 3, "schedule": "1f1b", "ema": 0.8}
    with case.pipeline(**options) as pipe:
        list(pipe.train_epoch(data[:4]))
        pipe.save(tmp_path)
    with case.pipeline(**{**options, "stages": 2}) as pipe:
        pipe.load(tmp_path)
        list(pipe.train_epoch(data[4:]))
        with pipe.keep_version(ema=True) as version:
            assert_same(pipe.state_dict(version=version), expected.state_dict())
            now = pipe.state_dict()
            loss = pipe.evaluate(data, version=version)
            list(pipe.train_epoch(data))
            assert pipe.evaluate(data, version=version) == loss
            outputs = list(pipe.predict([item[:1] for item in ()], version=version))
        assert outputs == []
        assert not all(torch.equal(now[k], v) for k, v in pipe.state_dict().items())
    assert loss == pytest.approx(whole.evaluated(expected, data, case.loss), rel=1e-6)


class Moving(nn.Module):
    """Keeps a mean in a buffer, which it changes in place or replaces; and a frozen weight."""

    def __init__(self, replaces):
        super().__init__()
        self.layer, self.replaces = nn.Linear(6, 6), replaces
        self.gain = nn.Parameter(torch.ones(6), requires_grad=False)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                if self.replaces:
                    self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
                else:
                    self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return torch.tanh(self.layer(x - self.mean.clone()) * self.gain)


def doubled(module):
    for parameter in module.parameters():
        if not parameter.requires_grad:
            parameter.mul_(2.0)


@pytest.mark.threads
@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize(("schedule", "k"), [("1f1b", 2), ("async-1f1b", 1)])
def test_a_kept_version_has_buffers_and_frozen_weights_of_its_own(schedule, k, replaces):
    torch.manual_seed(0)
    layers = [Moving(replaces) for _ in range(4)] + [nn.Linear(6, 3)]
    data = whole.points(6)
    with small(layers, stages=2, optimizer=SGD, schedule=schedule, micro_batches=k) as pipe:
        list(pipe.train_epoch(data[:3]))
        weights, loss = pipe.state_dict(), pipe.evaluate(data)
        with pipe.keep_version() as version:
            list(pipe.train_epoch(data[3:]))
            pipe.on_stages(doubled)
            assert_same(pipe.state_dict(version=version), weights)
            assert pipe.evaluate(data, version=version) == loss
        assert not torch.equal(pipe.state_dict()["0.mean"], weights["0.mean"])


# -- losses that are scaled -----------------------------------------------------------------------

# So large that the first updates are skipped, and raised again after two that were not.
SCALE = {"init_scale": 2.0**26, "growth_interval": 2, "growth_factor": 8.0, "backoff_factor": 0.125}


def scaled(model, data, loss_fn, make_optimizer, k, largest, reads=lambda update: update):
    """The plain loop with torch's scaler, where each update reads an older version.

    Returns the losses, the weights, and the numbers of the updates that were skipped.
    """
    optimizer = make_optimizer(model.parameters())
    scaler = torch.amp.GradScaler("cpu", **SCALE)
    scaler.scale(torch.ones(()))  # which makes its scale
    versions, scales, losses, skipped = [copy.deepcopy(model)], [scaler.get_scale()], [], []
    for update, item in enumerate(data):
        read, now = versions[reads(update)], scaler.get_scale()
        read.zero_grad()
        scale = scales[reads(update)]
        for args, kwargs, target in whole.chunks(item, k):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = loss_fn(read(*args, **kwargs), target)
            ((loss / k if k > 1 else loss) * torch.full((), scale)).backward()
            losses.append(loss.item())
        for mine, theirs in zip(model.parameters(), read.parameters(), strict=True):
            mine.grad = theirs.grad
        scaler.update(torch.full((), scale))  # the scale of the version that was read
        scaler.unscale_(optimizer)
        if largest is not None:
            nn.utils.clip_grad_norm_(model.parameters(), largest)
        before = [p.detach().clone() for p in model.parameters()]
        scaler.step(optimizer)
        if all(map(torch.equal, before, model.parameters())):
            skipped.append(update)
        scaler._scale.fill_(now)
        scaler.update()
        versions.append(copy.deepcopy(model))
        scales.append(scaler.get_scale())
    return losses, model.state_dict(), skipped


@pytest.mark.threads
@pytest.mark.parametrize(
    ("schedule", "k", "largest"), [("1f1b", 1, None), ("gpipe", 2, 0.05), ("2bw", 2, 0.05)]
)
def test_losses_are_scaled_as_by_torchs_scaler(schedule, k, largest, tmp_path):
    case = CASES["deep"]
    data, model = case.data(8), case.model()
    behind = 1 if schedule == "2bw" else 0
    *expected, skipped = scaled(
        model, data, case.loss, case.make_optimizer, k, largest, lambda u: max(0, u - behind)
    )
    assert 2 <= len(skipped) < 6
    assert skipped[-1] > 3  # also after the scale has risen
    options = {
        "schedule": schedule, "micro_batches": k, "clip": largest and Clip(norm=largest),
        "autocast": torch.float16, "loss_scale": LossScale(**SCALE),
    }  # fmt: skip
    for stages in (1, 3) if not behind else (2,):
        with case.pipeline(stages=stages, **options) as pipe:
            found = losses_of(pipe, data[:5])
            pipe.save(tmp_path / str(stages))
        with case.pipeline(stages=stages, **options) as pipe:
            pipe.load(tmp_path / str(stages))
            found += losses_of(pipe, data[5:])
            both.assert_same((found, pipe.state_dict()), expected)
            counts = [each["updates_skipped"] for each in pipe.statistics()]
            assert counts == [len(skipped)] * stages


@pytest.mark.processes
def test_scaled_losses_survive_a_worker_with_vertical_sync(tmp_path):
    case = CASES["deep"]
    data = case.data(10)
    *expected, skipped = scaled(
        case.model(), data, case.loss, case.make_optimizer, 1, None, lambda u: max(0, u - 2)
    )
    with case.pipeline(
        stages=3, workers="local", autocast=torch.float16, loss_scale=LossScale(**SCALE),
        schedule="async-1f1b+vertical-sync", max_restarts=1,
        checkpoint=Checkpoints(tmp_path, every=3),
    ) as pipe:  # fmt: skip
        losses = losses_through_death(pipe, data, "worker-1", step=4)
        assert pipe.statistics()[0]["updates_skipped"] == len(skipped)
        both.assert_same((losses, pipe.state_dict()), expected)
        assert len(pipe.restarts) == 1


def test_scales_that_make_no_sense_are_refused():
    case = CASES["deep"]
    with pytest.raises(ConfigError, match="reads updates before all stages know whether they are"):
        case.pipeline(stages=3, autocast=torch.float16)
    for wrong in ({"init_scale": 0}, {"growth_factor": 1.0}, {"backoff_factor": 2.0}):
        with pytest.raises(ConfigError, match=r"LossScale|growth_factor"):
            LossScale(**wrong)
    with pytest.raises(ConfigError, match=r"0\.weight is float16"):
        Pipeline([nn.Linear(2, 2).half()], loss_scale=LossScale(), schedule="1f1b")


# -- code of the user's on a stage ----------------------------------------------------------------


def scaled_by(module, factor, only=""):
    for name, parameter in module.named_parameters():
        if name.startswith(only):
            parameter.mul_(factor)
    return {name: parameter.norm() for name, parameter in module.named_parameters()}


@pytest.mark.processes
def test_a_function_is_called_on_every_stage(tmp_path):
    """With the names of the unsplit model; what it changes is changed again after a recovery."""
    case = CASES["deep"]
    data, found = case.data(6), []
    for victim in (None, "worker-1"):
        workers = "local" if victim else "serial"
        with case.pipeline(stages=2, schedule="1f1b", workers=workers, max_restarts=1) as pipe:
            losses = losses_of(pipe, data[:2])
            norms = pipe.on_stages(scaled_by, 0.5, only="layers.")
            named = {name: norm for of_stage in norms for name, norm in of_stage.items()}
            assert [*named] == [name for name, _ in case.model().named_parameters()]
            assert all(torch.equal(v.norm(), named[k]) for k, v in pipe.state_dict().items())
            if victim:
                kill(pipe, victim)
            losses += losses_of(pipe, data[2:])
            assert len(pipe.restarts) == (victim is not None)
            found.append((losses, pipe.state_dict()))
    both.assert_same(*found)


def another_weight(module):
    for each in module.modules():
        if isinstance(each, nn.Embedding):
            each.weight = nn.Parameter(torch.zeros_like(each.weight))


@pytest.mark.threads
def test_a_function_on_a_stage_that_goes_wrong_does_not_end_the_pipeline():
    case = CASES["lstm"]
    data = case.data(4)
    changed = "the function changed the parameter 'embed.weight'"
    with case.pipeline(stages=3) as pipe:
        before = pipe.state_dict()
        with pytest.raises(ConfigError, match="raised on stage 0: ZeroDivisionError"):
            pipe.on_stages(lambda module: 1 // 0)
        with pytest.raises(ConfigError, match=r"raised on stage 0: .*cannot"):
            pipe.on_stages(lambda module: module)
        with pytest.raises(ConfigError, match=changed):
            pipe.on_stages(scaled_by, 2.0)
        with pytest.raises(ConfigError, match="cannot be sent to the stages"):
            pipe.on_stages(print, threading.Lock())
        with pytest.raises(ConfigError, match="the function has replaced 'weight'"):
            pipe.on_stages(another_weight)
        assert_same(pipe.state_dict(), before)
        assert sum(pipe.on_stages(lambda module: len([*module.parameters()]))) == 12
        assert len(list(pipe.train_epoch(data))) == 4


# -- adapters -------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen layer with a trained addition of low rank."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def with_adapters():
    model = CASES["deep"].model()
    for i, layer in enumerate(model.layers):
        model.layers[i] = Adapted(layer)
    model.head.requires_grad_(False)
    return model


@pytest.mark.threads
def test_of_a_model_with_adapters_only_these_have_versions(tmp_path):
    """Versions, optimizer state and averages are those of the adapters; the bits are plain."""
    case = Case(with_adapters, whole.points, F.mse_loss, CASES["deep"].optimizer)
    data = case.data(6)
    options = {"stages": 3, "ema": 0.9}
    with case.pipeline(schedule="1f1b", **options) as pipe:
        both.assert_same(learned(pipe, data), case.plainly(data))
    with case.pipeline(**options) as pipe:
        list(pipe.train_epoch(data))
        folder = pipe.save(tmp_path)
    for kind in ("versions", "optimizer"):
        keys = [key for path in folder.glob(f"{kind}-*") for key in load_file(path)]
        assert keys
        assert all(".down." in key or ".up." in key for key in keys), kind


# -- accumulation ---------------------------------------------------------------------------------


@pytest.mark.threads
def test_gradients_are_accumulated_over_micro_batches_as_in_the_plain_loop():
    case = CASES["deep"]
    data = case.data(4)
    with case.pipeline(stages=3, schedule="1f1b", micro_batches=4) as pipe:
        both.assert_same(learned(pipe, data), case.plainly(data, k=4))


@pytest.mark.parametrize("more", [{"clip": Clip(norm=0.05)}, {"loss_scale": LossScale()}])
def test_a_fingerprint_does_not_depend_on_the_split_where_norms_are_taken(more):
    """What the stages have agreed on is kept by the first of them alone."""
    case, found = CASES["deep"], set()
    for stages in (1, 2, 3):
        with case.pipeline(schedule="1f1b", stages=stages, micro_batches=2, **more) as pipe:
            list(pipe.train_epoch(case.data(3)))
            found.add(pipe.fingerprint().digest)
    assert len(found) == 1


class Rotated(nn.Module):
    """Keeps a table of the longest text so far."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.table = None

    def forward(self, x):
        if self.table is None or len(self.table) < x.shape[1]:
            steps = torch.arange(x.shape[1], device=x.device)[:, None]
            self.table = (steps / torch.arange(1.0, 5.0, device=x.device)).cos()
        for layer in self.layers:
            x = layer(x) * self.table[: x.shape[1]]
        return x.mean(1)


def texts(count):
    torch.manual_seed(3)
    lengths = itertools.islice(itertools.cycle((5, 3, 7, 3, 6, 4)), count)
    return [(torch.randn(4, n, 4), torch.randint(4, (4,))) for n in lengths]


class Graph(nn.Module):
    """Each of its layers is followed by a product with the adjacency that the loader yields."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x, adjacency):
        for layer in self.layers:
            x = adjacency @ layer(x).relu()
        return x


def graphs(to_sparse, count):
    """Of another number of edges in each mini-batch."""
    torch.manual_seed(3)
    x, y = torch.randn(6, 4), torch.randint(4, (6,))
    made = [to_sparse((torch.rand(6, 6) < p).float()) for p in (0.2, 0.4, 0.6, 0.8)[:count]]
    return [((x, graph), {}, y) for graph in made]


class Flattens(whole.LanguageModel):
    """As scripts for one GPU are written; its upper layer is left to itself."""

    def forward(self, words, keep=None):
        self.lower.flatten_parameters()
        return super().forward(words, keep)


@pytest.mark.threads
@pytest.mark.parametrize("schedule", ["1f1b", "async-1f1b"])
def test_a_recurrent_layer_that_moves_its_weights_as_on_cuda(schedule, monkeypatch):
    """There its `flatten_parameters` assigns the .data of the weights that a forward finds."""
    case, ends, moved = Case(Flattens, whole.masked_sentences, whole.masked_loss, ADAMW), [], []

    def flatten(layer):
        moved.append(layer)
        for weight in layer._flat_weights:
            weight.data = weight.data.clone()

    for moves in (False, True):
        if moves:
            monkeypatch.setattr(nn.RNNBase, "flatten_parameters", flatten)
        with case.pipeline(stages=3, schedule=schedule, micro_batches=2) as pipe:
            ends.append(learned(pipe, case.data(5)))
            module = pipe.module()
    assert moved
    both.assert_same(*ends)
    assert "flatten_parameters" not in module.lower.__dict__


# -- all models against the plain loop ------------------------------------------------------------


def odd(forward):
    data = padded if forward is trims else vectors
    return Case(lambda: Odd(forward), data, squares, PLAIN_SGD)


def classified(make, data, *options, **more):
    return Case(make, functools.partial(data, *options, **more), F.cross_entropy, PLAIN_SGD)


EVERY = {
    **{name: (case, (1, 3)) for name, case in CASES.items() if name != "deep"},  # on others above
    **{forward.__name__: (odd(forward), (1, 3)) for forward in FOLLOWED},
    "hooks_its_output": (odd(hooks_its_output), (1, 2, ["b"], ["c"])),
    **{
        name: (Case(make, regression, F.mse_loss, PLAIN_SGD), (2,))
        for name, make in whole.AROUND.items()
    },
    "skips past the stages between": (
        classified(unet, whole.images, channels=1, classes=4, size=8),
        (2, 4),
    ),
    "a table that is kept": (classified(Rotated, texts), (3,)),
    "graph": (classified(Graph, graphs, torch.Tensor.to_sparse), (3,)),
    "graph, csr": (classified(Graph, graphs, torch.Tensor.to_sparse_csr), (3,)),
}


@pytest.mark.threads
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@pytest.mark.parametrize("name", EVERY)
def test_without_dropout_it_is_the_plain_loop(name):
    """And the user's model stays as it was, also where a new shape is recorded in the middle."""
    case, every = EVERY[name]
    model, plain = case.model(dropout=False), case.model()
    before = copy.deepcopy(model.state_dict())
    weights, losses = whole.plainly(plain, case.data(4), case.loss, case.make_optimizer)
    evaluated = whole.evaluated(plain, case.data(4), case.loss)
    forms = [model, list(model)] if case.make is unet else [model]
    for form, stages in itertools.product(forms, every):
        with case.pipeline(form, stages=stages, schedule="1f1b") as pipe:
            both.assert_same(learned(pipe, case.data(4)), (losses, weights))
            assert pipe.evaluate(case.data(4)) == pytest.approx(evaluated, rel=1e-6)
    assert_same(model.state_dict(), before)


@pytest.mark.processes
def test_skips_of_a_list_of_layers_go_between_processes():
    case, _ = EVERY["skips past the stages between"]
    layers = list(case.model(dropout=False))
    with case.pipeline(layers, stages=4, schedule="1f1b", workers="local") as pipe:
        both.assert_same(learned(pipe, case.data(4)), case.plainly(case.data(4)))
