"""Cutting a program into stages: its layers, the steps of each stage, and what passes."""

import pytest
import torch
from support.between import Base, Forward, X, recorded
from support.skips import unet
from torch import nn

from pipedream_rt.errors import ConfigError
from pipedream_rt.models.cut import Routes, cut, find_layers, first_layer


def test_elements_of_lists_stay_whole():
    model = nn.Module()
    model.embed = nn.Embedding(3, 4)
    model.blocks = nn.ModuleList(
        [nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.TransformerEncoderLayer(4, 2)]
    )
    model.head = nn.Linear(4, 3)
    assert list(find_layers(model)) == ["embed", "blocks.0.0", "blocks.0.1", "blocks.1", "head"]
    assert "blocks.1.linear1" in find_layers(model, ["blocks.1.linear1"])


def test_modules_that_hand_on_skips_are_taken_apart():
    """So that what they stash goes straight to the stage that pops it."""
    model = unet()
    x = torch.randn(2, 1, 8, 8)
    found = find_layers(model)
    assert [*found] == ["0", "1.module.conv", "2.module.conv", "3", *UP, "6", "7"]
    first, *_ = stages(model, x, at=["2.module.conv", *UP])
    assert set(first.gives) == {1, 2}


UP = ["4.module.conv", "5.module.conv"]


def test_split_points():
    program = recorded(Base(), X)
    modules = dict(Base().named_modules())
    assert first_layer("b", program, modules) == "b"
    with pytest.raises(ConfigError, match="no module 'bb'; did you mean 'b'"):
        first_layer("bb", program, modules)
    with pytest.raises(ConfigError, match=r"no stage can begin at 'c': the forward does not call"):
        first_layer("c", program, {**modules, "c": nn.ReLU()})


def cut_at(model, *args, at, ways=None):
    homes = {name: stage for stage, name in enumerate(at, 1)}
    return cut(recorded(model, *args), homes, len(at) + 1, ways), homes


def stages(model, *args, at):
    found, _ = cut_at(model, *args, at=at)
    return found.stages


def test_what_comes_of_inputs_alone_is_computed_where_it_is_needed():
    """The mask is not sent; its input goes to both stages."""

    class Masked(Base):
        def forward(self, x, keep):
            mask = keep.unsqueeze(-1) & (torch.arange(4) < 3)
            x = self.a(x).masked_fill(mask, 0)
            return self.b(x).masked_fill(mask, 0)

    first, last = stages(Masked(), X, torch.ones(3, dtype=torch.bool), at=["b"])
    assert first.takes == {-1: (0, 1)}
    assert last.takes == {-1: (1,), 0: (7,)}
    assert [s.name for s in last.steps if s.free] == [s.name for s in first.steps if s.free]


def test_a_value_of_several_stages_goes_from_one_to_the_next():
    """0 makes it, 1 and 2 use it; 1 sends it on."""

    def forward(self, x):
        x = self.a(x)
        return self.c(self.b(x)) + x

    found = stages(Forward(forward), X, at=["b", "c"])
    assert [s.gives for s in found] == [{1: (1,)}, {2: (1, 2)}, {}]


def changes_input(self, x):
    y = self.b(self.a(x))
    x[0] = y[0].detach()
    return self.c(y) + x


def changes_view(self, x):
    y = self.a(x)
    view = y[:, :2]
    z = self.b(y)
    y.mul_(2)
    return self.c(z) + view.sum(1, keepdim=True)


def changes_own(self, x):
    y = self.a(x)
    y += 1
    z = self.b(y)
    z.relu_()
    return self.c(z) + y


@pytest.mark.parametrize("forward", [changes_input, changes_view])
def test_a_change_in_place_that_another_stage_would_not_see_is_refused(forward):
    with pytest.raises(ConfigError, match=r"changes in place on stage 1 what .*\(\w+ \d+\)"):
        stages(Forward(forward), X, at=["b", "c"])
    stages(Forward(forward), X, at=[])


def fills_input(self, x):
    y = self.b(self.a(x))
    x[0] = 1
    return self.c(y) + x


@pytest.mark.parametrize("forward", [changes_own, fills_input])
def test_other_changes_in_place_are_fine(forward):
    """Of what the stage has made; or of an input by what every stage can compute."""
    stages(Forward(forward), X, at=["b", "c"])


def test_only_a_heavy_element_of_a_list_is_opened():
    """And none that is called as a whole, as one with hooks, or that the model names itself."""
    model = nn.Module()
    model.parts = nn.ModuleList(
        [nn.ModuleDict({"in": nn.Linear(9, 9)}), nn.Sequential(nn.Linear(2, 2), nn.ReLU())]
    )
    block = nn.Module()
    block.inner = nn.ModuleList([nn.Linear(999, 9), nn.Linear(9, 9)])
    model.parts.append(block)
    opened = ["parts.0.in", "parts.1.0", "parts.1.1", "parts.2.inner.0", "parts.2.inner.1"]
    assert list(find_layers(model)) == opened
    kept = ["parts.0.in", "parts.1.0", "parts.1.1", "parts.2"]
    assert list(find_layers(model, opens=False)) == kept
    assert list(find_layers(model, ["parts.2.inner.1"], opens=False)) == opened
    handle = block.register_forward_hook(lambda *_: None)
    assert list(find_layers(model)) == kept
    handle.remove()
    model._no_split_modules = ["Module"]
    assert list(find_layers(model)) == kept
    del model._no_split_modules
    model.parts.append(nn.Linear(999, 99))
    assert list(find_layers(model)) == [*kept, "parts.3"]


def test_a_module_that_stands_twice_is_one_layer():
    model = nn.Module()
    model.one = nn.Linear(2, 2)
    model.blocks = nn.ModuleList([model.one, nn.Linear(2, 2)])
    assert list(find_layers(model)) == ["one", "blocks.1"]


def skips(at, ways=None):
    def forward(self, x):
        first = self.a(x)
        return self.c(self.b(first.relu())) + first + self.shift + x

    model = Forward(forward)
    model.shift = nn.Parameter(torch.zeros(4))
    return cut_at(model, X, at=at, ways=ways)


def test_a_cut_knows_its_links_its_entries_and_who_uses_what():
    found, homes = skips(["b", "c"])
    assert found.links == {(0, 1), (0, 2), (1, 2)}
    assert found.entries == {0, 2}
    assert found.used == [{"a"}, {"b"}, {"c", "shift"}]
    assert homes == {"a": 0, "b": 1, "c": 2}
    assert [program.output is None for program in found.stages] == [True, True, False]


def test_a_value_takes_the_edges_that_there_are():
    """Once the stages have started: each hands on what has no way of its own, inputs too."""
    found, _ = skips(["b", "c"], Routes({(0, 1), (1, 2)}, {0}))
    assert found.links == {(0, 1), (1, 2)}
    assert found.entries == {0}
    assert [len(to) for program in found.stages for to in program.gives.values()] == [3, 3]


def test_a_stage_without_steps_sends_an_empty_message_on():
    found, _ = skips(["b", "c", "nothing"])
    assert found.stages[3].takes[2]
    program = recorded(Base(), X)
    empty = cut(program, {"a": 1, "b": 1}, 2).stages[0]
    assert (empty.steps, empty.gives) == ((), {1: ()})
    assert list(empty.takes) == [-1]
