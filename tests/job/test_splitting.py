"""The split of a model into stages: a sequence by its layers, any other by its forward."""

import logging

import pytest
import torch
from torch import nn

from pipedream_rt import ConfigError
from pipedream_rt.job.splitting import ForwardOptions, items_of, split_model, units_of
from pipedream_rt.job.unsplit_model import UnsplitModel

X = torch.ones(2, 4)


class Skips(nn.Module):
    """Layers that are called in another order than they stand, and what lies beside them."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.spare = nn.Linear(4, 4)
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x):
        first = self.layers[0](x)
        x = self.layers[1](first.relu()) * self.scale
        return self.head(self.layers[2](x) + first + self.shift)


def split(model, stages, example=(X, X), **options):
    whole = UnsplitModel(model)
    return split_model(whole, stages, example, ForwardOptions(**options), items_of(whole, None))


def sequence(count=4):
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


def test_a_sequence_is_a_chain_of_its_layers_and_needs_no_example():
    found = split(sequence(), [1, 3], example=None)
    assert found.layers == (("0",), ("1", "2"), ("3",))
    assert found.links is None
    assert found.entries == ()
    assert found.programs(1) == ()


def test_any_other_model_is_split_in_the_order_of_its_forward():
    """What nothing uses goes where its neighbour is; the value of stage 0 goes straight to 2."""
    found = split(Skips(), ["layers.1", "layers.2"])
    assert found.layers == (
        ("layers.0",),
        ("scale", "layers.1"),
        ("shift", "head", "layers.2", "spare"),
    )
    assert set(found.links) == {(0, 1), (0, 2), (1, 2)}
    assert found.entries in ((), (0,))


def test_points_are_names_or_numbers_of_layers_in_the_order_of_their_calls():
    assert split(Skips(), [1, "head"]).layers == split(Skips(), ["layers.1", "head"]).layers


def test_stages_of_a_number_have_about_as_many_parameters():
    called = [[n for n in names if n[:4] in ("laye", "head")] for names in split(Skips(), 2).layers]
    assert list(map(len, called)) == [2, 2]


class Convolutions(nn.Module):
    """Few weights that work much, and many that work little."""

    def __init__(self):
        super().__init__()
        self.layers = self.made()

    @staticmethod
    def made():
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1),
            nn.Conv2d(8, 8, 3, padding=1), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
            nn.Linear(128, 128), nn.Linear(128, 64),
        )  # fmt: skip

    def forward(self, x):
        return self.layers(x)


IMAGES = (torch.zeros(64, 3, 32, 32), torch.zeros(64))
BY_WORK = ["0", "1"], ["2", "3", "4", "5", "6"]


def test_stages_of_a_number_have_about_as_much_work():
    by_work = split(Convolutions(), 2, example=IMAGES, trains=True)
    assert by_work.layers == tuple(tuple(f"layers.{n}" for n in names) for names in BY_WORK)
    assert "balanced by work, as counted in the forward of the example: " in by_work.how
    given = split(Convolutions(), ["layers.1"], example=IMAGES, trains=True)
    assert given.how == ""


def test_a_sequence_is_balanced_by_work_where_there_is_an_example():
    """And by parameters without one, or with one of which the forward cannot be recorded."""
    layers = Convolutions.made()
    found = split(layers, 2, example=IMAGES, trains=True)
    assert found.layers == tuple(map(tuple, BY_WORK))
    assert sum(found.work.values()) > 0
    for example in (None, ((IMAGES[0], IMAGES[0]), {}, IMAGES[1]), (torch.zeros(3), IMAGES[1])):
        by_weights = split(layers, 2, example=example, trains=True)
        assert by_weights.layers == (("0", "1", "2", "3", "4", "5"), ("6",))
        assert by_weights.how == ""


def test_no_code_of_the_user_is_called_to_count_the_work_of_a_sequence():
    calls = []

    class Counts(nn.Linear):
        def forward(self, x):
            calls.append(1)
            return super().forward(x)

    hooked = nn.Linear(4, 4)
    hooked.register_forward_hook(lambda *_: calls.append(1))
    for layer in (Counts(4, 4), hooked):
        assert split(nn.Sequential(layer, nn.Linear(4, 4)), 2, trains=True).how == ""
    assert calls == []


def test_a_layer_that_stands_twice_works_in_each_place():
    twice = nn.Conv2d(8, 8, 3, padding=1)
    model = nn.Sequential(twice, nn.ReLU(), nn.ReLU(), twice)
    found = split(model, 2, example=(torch.zeros(64, 8, 32, 32), None), trains=False)
    assert found.work["0"] == found.work["3"] > found.work["1"]
    assert found.layers == (("0", "1"), ("2", "3"))


def test_weights_weigh_where_an_example_is_small():
    """As their update then takes the time."""
    small = torch.zeros(1, 3, 8, 8), torch.zeros(1)
    model = nn.Sequential(
        nn.Conv2d(3, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(3, 9000), nn.Linear(9000, 9),
    )  # fmt: skip
    assert split(model, 2, example=small, trains=True).layers[1] == ("4",)


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        (0, "from 1 to the number of layers that the forward calls, 4, not 0; the layers are lay"),
        (5, "calls, 4, not 5"),
        (True, "calls, 4, not True"),
        ([0], "split points lie between 1 and 3, found 0"),
        ([4], "split points lie between 1 and 3, found 4"),
        (["layers.2", "layers.1"], "must rise in the order in which the forward calls"),
        (["layers.0"], "must rise"),
        (["spare"], "no stage can begin at 'spare'"),
        (["lairs.1"], "no module 'lairs.1'; did you mean"),
    ],
)
def test_points_that_make_no_stages_are_refused(stages, words):
    with pytest.raises(ConfigError, match=words):
        split(Skips(), stages)


class Twins(nn.Module):
    """Layers with a norm, which the forward calls for each of two inputs."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4)
        )
        self.head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x, y):
        return self.head(self.encoder(x) - self.encoder(y))


PAIR = ((X, X), {}, X)


def test_stages_begin_where_no_norm_of_twins_would_be_on_two_of_them():
    assert split(Twins(), 2, PAIR, trains=True).layers[1][0] == "head.0"
    found = split(Twins(), 4, PAIR, trains=True)
    assert [names[-1] for names in found.layers] == ["encoder.0", "encoder.4", "head.0", "head.1"]
    with pytest.raises(
        ConfigError,
        match=r"into 4 stages, not 5: the buffer encoder.1.running_mean is changed by calls before "
        r"encoder.2 and after .* stages=\['encoder.1', 'head.0', 'head.1'\]",
    ):
        split(Twins(), 5, PAIR, trains=True)
    with pytest.raises(ConfigError, match=r"no stage can begin at 'encoder.3': the buffer"):
        split(Twins(), ["encoder.3"], PAIR, trains=True)


def test_a_norm_of_twins_that_does_not_change_stands_on_several_stages():
    assert len(split(Twins(), 5, PAIR).layers) == 5
    model = Twins()
    model.encoder[1].eval()
    assert len(split(model, 5, PAIR, trains=True).layers) == 5


def test_layers_of_a_sequence_that_share_a_norm_stay_together():
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(norm, nn.Linear(4, 4), norm, nn.Linear(4, 4))
    assert split(model, 2, None, trains=True).layers == (("0", "1", "2"), ("3",))
    with pytest.raises(ConfigError, match=r"no stage can begin at '2': the buffer 0.running_mean"):
        split(model, [2], None, trains=True)
    assert split(model, [2], None).layers == (("0", "1"), ("2", "3"))


def test_without_an_example_a_forward_is_not_known():
    with pytest.raises(ConfigError, match=r"the forward of Skips must be run once .* example="):
        split(Skips(), 2, example=None)


class Reads(nn.Module):
    """Reads values between its layers, so that it cannot be cut there."""

    def __init__(self):
        super().__init__()
        self.layers = sequence(3)

    def forward(self, x):
        x = self.layers[0](x)
        return self.layers[1](x) if x.sum() > 0 else self.layers[2](x)


def test_a_layer_that_cannot_be_recorded_inside_is_kept_whole_and_told(caplog):
    caplog.set_level(logging.INFO, logger="pipedream_rt")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([Reads(), nn.Linear(4, 2)])

        def forward(self, x):
            return self.parts[1](self.parts[0](x))

    assert split(Model(), 2).layers == (("parts.0",), ("parts.1",))
    assert "a layer that holds most of the model is not cut inside" in caplog.text
    with pytest.raises(ConfigError, match="the model cannot be cut into stages"):
        split(Model(), ["parts.0.layers.1"])


def test_a_forward_is_recorded_in_the_modes_that_will_be_used():
    """And once more in the first of them, to find a forward that changes from call to call."""
    calls = []

    class Counted(Skips):
        def forward(self, x):
            calls.append(self.training)
            return super().forward(x)

    split(Counted(), 2, trains=True)
    assert calls == [True, False, True]
    calls.clear()
    split(Counted(), 2, trains=False)
    assert calls == [False, False]


def test_units_are_named_once_in_the_order_of_the_model():
    model = Skips()
    model.again = model.layers[1]
    layers = {"head": model.head, **{f"layers.{i}": each for i, each in enumerate(model.layers)}}
    assert units_of(model, layers) == [
        "scale", "shift", "head", "layers.0", "layers.1", "layers.2", "spare.weight", "spare.bias",
    ]  # fmt: skip
