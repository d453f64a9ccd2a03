"""Sequences in a sequence, and layers of a sequence that are cut inside."""

import pytest
import torch
from support.both import assert_same as both_same
from support.both import opened, plain
from support.oracle import assert_same
from support.whole import ResNet
from torch import nn
from torch.nn import functional as F

from pipedream_rt import CheckpointError, ConfigError

ADAMW = (torch.optim.AdamW, {"lr": 0.01})


def nested():
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Dropout(0.2))
    return nn.Sequential(
        nn.Sequential(block, nn.BatchNorm1d(6), nn.Sequential(nn.Linear(6, 6), nn.Tanh())),
        nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 3),
    )  # fmt: skip


def data(count=4):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator))
        for _ in range(count)
    ]


def open_pipe(model, stages, micro_batches=2, **options):
    options = {"stages": stages, "micro_batches": micro_batches, "optimizer": ADAMW, **options}
    return opened(model, F.cross_entropy, **options)


def trained(model, stages, batches=None, **options):
    with open_pipe(model, stages, **options) as pipe:
        losses = [result.loss for result in pipe.train_epoch(batches or data())]
        return losses, pipe.state_dict(), list(pipe.plan.layers)


def plainly(model, batches):
    return plain(
        model, F.cross_entropy, lambda m: torch.optim.AdamW(m.parameters(), lr=0.01), data=batches
    )


def test_it_trains_as_one_stage_wherever_it_is_cut():
    losses, state, (names,) = trained(nested(), 1)
    assert list(state) == list(nested().state_dict())
    assert names[:4] == ("0.0.0", "0.0.1", "0.0.2", "0.1")
    for stages in (2, 5, ["0.0.2", "0.2", 1], ["0.1", 3]):
        again, found, layers = trained(nested(), stages)
        assert again == losses
        assert_same(found, state)
        assert tuple(name for of_stage in layers for name in of_stage) == names


def test_without_dropout_it_is_plain_pytorch_that_trains():
    model = nested()
    model[0][0][2].p = 0.0
    expected = plainly(model, data())
    both_same(trained(model, 4, micro_batches=1), expected)


def test_a_checkpoint_goes_on_at_another_number_of_stages(tmp_path):
    with open_pipe(nested(), 2) as pipe:
        list(pipe.train_epoch(data()))
        pipe.save(tmp_path)
        list(pipe.train_epoch(data()))
        expected = pipe.state_dict()
    with open_pipe(nested(), ["0.0.1", "0.2", "3"]) as pipe:
        pipe.load(tmp_path)
        list(pipe.train_epoch(data()))
        assert_same(pipe.state_dict(), expected)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: model[0][2].register_forward_hook(lambda *_: None), "a hook of the model"),
        (lambda model: model[0][2].__setitem__(1, nn.ReLU()), r"'0\.2\.1' was replaced"),
    ],
)
@pytest.mark.parametrize("stages", [1, 3])
def test_a_change_of_an_inner_sequence_is_refused(change, words, stages):
    model = nested()
    with open_pipe(model, stages) as pipe:
        epoch = pipe.train_epoch(data())
        next(epoch)
        change(model)
        with pytest.raises(ConfigError, match=words):
            list(epoch)


@pytest.mark.parametrize("given", [False, True])
def test_an_inner_sequence_with_hooks_is_called_as_a_whole(given):
    def hooked():
        model = nested()
        model[0][2].register_forward_hook(lambda module, args, output: 2 * output)
        return model

    example = {"example": data()[0]} if given else {}
    losses, state, (names,) = trained(hooked(), 1, **example)
    assert "0.2" in names
    again, found, _ = trained(hooked(), 3, **example)
    assert again == losses != trained(nested(), 1)[0]
    assert_same(found, state)


# -- cut inside by a recorded forward -------------------------------------------------------------


class Backbone(nn.Module):
    """A module with a list, which may read its values."""

    def __init__(self, reads=False):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2)) for _ in range(3)
        )
        self.reads = reads
        self.seen = 0

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        if self.reads:
            self.seen += 1
            x = x + x.detach().sum().item()
        return x


def with_head(reads=False):
    torch.manual_seed(0)
    return nn.Sequential(Backbone(reads), nn.Dropout(0.1), nn.Linear(6, 3))


def test_a_backbone_is_cut_inside_and_the_bits_depend_on_no_split():
    losses, state, (names,) = trained(with_head(), 1, example=data()[0])
    assert "0.blocks.0.0" in names
    for stages in (3, [1], ["1"], ["0.blocks.1.0", 1]):
        again, found, layers = trained(with_head(), stages, example=data()[0])
        assert again == losses
        assert_same(found, state)
    assert layers[1][0] == "0.blocks.1.0"
    assert layers[2][0] == "1"  # the number is the place in the model
    with pytest.raises(ConfigError, match="lie between 1 and 2, found 3"):
        trained(with_head(), [3], example=data()[0])


class Outer(nn.Module):
    """No sequence, with a list of which one element is most of it."""

    def __init__(self, reads):
        super().__init__()
        self.layers = nn.ModuleList([Backbone(reads), nn.Linear(6, 3)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("made", [with_head, Outer])
def test_what_cannot_be_recorded_inside_stays_whole(made, caplog):
    def model():
        torch.manual_seed(0)
        return made(reads=True)

    with caplog.at_level("INFO"):
        losses, state, _ = trained(model(), 1, example=data()[0])
    assert "a layer that holds most of the model is not cut inside" in caplog.text
    again, found, layers = trained(model(), 2, example=data()[0])
    assert again == losses
    assert_same(found, state)
    assert len(layers) == 2


def test_a_resnet_in_front_of_a_head_trains_as_plain_pytorch():
    torch.manual_seed(0)
    model = nn.Sequential(ResNet(classes=8), nn.ReLU(inplace=True), nn.Linear(8, 5))
    batches = [(torch.randn(4, 3, 16, 16), torch.randint(5, (4,))) for _ in range(2)]
    expected = plainly(model, batches)
    both_same(trained(model, 4, batches, example=batches[0], micro_batches=1), expected)


class Remembers(nn.Linear):
    def get_extra_state(self):
        return {"calls": 1}

    def set_extra_state(self, state):
        pass


def test_extra_state_is_not_lost_without_a_word(tmp_path):
    with open_pipe(nn.Sequential(Remembers(6, 6), nn.Linear(6, 3)), 2) as pipe:
        with pytest.raises(CheckpointError, match=r"0\._extra_state is no tensor"):
            pipe.keep_best(tmp_path / "best", 1.0)
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(CheckpointError):
            pipe.keep_best(tmp_path, 1.0)
