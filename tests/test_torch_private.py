"""Private names of torch: a missing one is told of, and what stands in for it does the same."""

import pickle

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from pipedream_rt import torch_private


@pytest.mark.parametrize("missing", ["torch._C._is_view_replay_enabled", "torch.no_such.thing"])
def test_a_torch_that_lacks_a_name_is_told_of_in_a_sentence(missing, monkeypatch):
    if hasattr(torch._C, missing.rpartition(".")[2]):
        monkeypatch.delattr(torch._C, missing.rpartition(".")[2])
    with pytest.raises(ImportError, match=f"and this is torch .*, which lacks {missing}; install"):
        torch_private.needed(missing)
    assert torch_private.optional(missing, 3) == 3


def test_a_name_may_lead_through_a_module_that_is_not_imported_yet():
    assert torch_private.needed("torch.utils.collect_env.get_pip_packages")
    assert torch_private.optional("torch.nn.no_such.thing", None) is None


def tensors():
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(size, generator=draw) for size in ((3, 5), (7,), ())]


@pytest.mark.parametrize("power", [1.0, 2.0, float("inf")])
def test_norms_one_by_one_are_those_of_all_at_once(power):
    one_by_one = torch_private._norm_each(tensors(), power)
    for mine, theirs in zip(one_by_one, torch_private.norms_of(tensors(), power), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_copies_one_by_one_are_those_of_all_at_once():
    for copy in (torch_private._copy_each, torch_private.copy_all):
        targets = [torch.zeros_like(each) for each in tensors()]
        copy(targets, tensors())
        assert all(map(torch.equal, targets, tensors()))
    with pytest.raises(ValueError, match="zip"):
        torch_private._copy_each(tensors(), tensors()[:1])


@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "without"])
def test_each_dtype_comes_once_in_the_order_of_its_first_tensor(grouped, monkeypatch):
    if not grouped:
        monkeypatch.setattr(torch_private, "_grouped", None)
    half, whole = torch.ones(2, dtype=torch.bfloat16), torch.ones(2)
    found = torch_private.order_of_dtypes([half, whole, half, whole])
    assert sorted(found, key=str) == [torch.bfloat16, torch.float32]
    if not grouped:
        assert found == [torch.bfloat16, torch.float32]


def test_hooks_of_an_optimizer_and_of_all_are_seen():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    assert not torch_private.has_hooks(optimizer)
    for register in (
        optimizer.register_step_pre_hook,
        optimizer.register_step_post_hook,
        register_optimizer_step_post_hook,
    ):
        handle = register(lambda *_: None)
        assert torch_private.has_hooks(optimizer)
        handle.remove()
        assert not torch_private.has_hooks(optimizer)


def test_an_optimizer_of_which_nothing_is_known_counts_as_one_with_hooks():
    assert torch_private.has_hooks(object())


def test_contexts_of_this_thread_are_counted():
    ad, cached = torch.autograd.forward_ad, torch.nn.utils.parametrize.cached
    before = torch_private.level_of_forward_ad()
    with ad.dual_level(), cached():
        assert torch_private.level_of_forward_ad() == before + 1
        assert torch_private.parametrizations_are_cached() == 1
    assert torch_private.level_of_forward_ad() == before
    assert torch_private.parametrizations_are_cached() == 0
    assert torch_private.saved_tensors_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(abs, abs):
        assert torch_private.saved_tensors_hooks() is not None


def test_a_context_that_raises_is_left_and_counted_so():
    class Context:
        """A context that cannot be entered at times."""

        fails = False

        def __enter__(self):
            if self.fails:
                raise KeyError("enter")
            return self

        def __exit__(self, *error):
            raise KeyError("exit")

    found = torch_private._Entered()
    found.watch(Context)
    with pytest.raises(KeyError, match="exit"), Context():
        assert found.depth == 1
    assert found.depth == 0
    Context.fails = True
    with pytest.raises(KeyError, match="enter"), Context():
        pass
    assert found.depth == 0


def operator(**parts):
    """What `torch.library.custom_op` makes, with some parts."""
    made = torch.library.custom_op("mirror::twice", mutates_args=())(_twice)
    for name, value in parts.items():
        setattr(made, name, value)
    return made


def _twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def test_an_operator_is_taken_apart_for_another_process():
    made = operator()
    made.register_fake(torch.empty_like)
    name, schema, *functions = torch_private.parts_of_operator(made)
    assert (name, "Tensor x" in schema) == ("mirror::twice", True)
    assert functions == [torch.empty_like, None, _twice, None]


def test_an_operator_with_parts_that_nobody_knows_is_refused_by_name():
    with pytest.raises(pickle.PicklingError, match=r"mirror::twice has vmap_fn of its own; define"):
        torch_private.parts_of_operator(operator(_vmap_fn=print))


def test_torch_rpc_uses_a_pickler_in_all_its_modules_and_its_own_again():
    from torch.distributed.rpc import api, internal

    def places():
        return internal._internal_rpc_pickler, api._internal_rpc_pickler, api._default_pickler

    own = places()
    torch_private.use_pickler("ours")
    assert places() == ("ours",) * 3
    torch_private.use_pickler(None)
    assert places() == own
