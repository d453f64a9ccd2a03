"""Programs for any sizes of the inputs: a forward is recorded once more, with sizes as symbols.

torch's symbolic shapes follow the sizes through the forward. A number that it computes from sizes
becomes a `Number` of the program. A decision by sizes becomes a condition. A size that becomes a
plain integer, as in ``range(x.size(1))``, is a condition too: it must be as recorded. The program
is then compared with the forwards that were recorded as usual and that fulfil its conditions: with
the sizes of each, it must be the very program of that forward.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from pipedream_rt.containers import is_sparse, opened, parts_of_sparse
from pipedream_rt.models.program import STAND_INS, Guard, Number, Program, replaced
from pipedream_rt.telling import log_of
from pipedream_rt.torch_private import SymbolicShapes

_log = log_of(__name__)

Shapes = Sequence[Sequence[int]]
"""The shape of each input."""

_SMALLEST = 2
"""The smallest size that may stand for others: torch treats 0 and 1 apart."""

_LARGEST = 2**63 - 1
"""The largest number that torch takes, and that travels to the stages."""


class NotSymbolic(Exception):
    """A forward does with a size what cannot be followed, such as to make a fraction of it."""


class Symbols:
    """The sizes of the inputs of one forward, and what it makes of them while it is recorded."""

    def __init__(
        self, torchs: SymbolicShapes, changing: Sequence[Sequence[bool]], reads: Sequence[Guard]
    ) -> None:
        self._torchs = torchs
        self._changing = changing  # by input and dimension, whether the size is a symbol
        self._reads = deque(reads)
        self._environment = torchs.ShapeEnv()
        self._places: dict[Any, tuple[int, int]] = {}  # by symbol, the input and the dimension
        self._numbers: dict[Any, Number] = {}  # by expression
        self._inputs = 0
        self._mode = torchs.FakeTensorMode(shape_env=self._environment, allow_non_fake_inputs=True)

    def entered(self) -> AbstractContextManager[None]:
        """Return the context in which tensors have no values."""
        return self._torchs.entered(self._mode)

    def input(self, tensor: Tensor) -> Tensor:
        """Return the next input, without values."""
        number, self._inputs = self._inputs, self._inputs + 1
        dynamic, static = self._torchs.DimDynamic.DYNAMIC, self._torchs.DimDynamic.STATIC
        made: Tensor = self._mode.from_tensor(
            tensor,
            symbolic_context=self._torchs.StatelessSymbolicContext(
                dynamic_sizes=[dynamic if each else static for each in self._changing[number]]
            ),
        )
        sizes: Sequence[Any] = made.shape
        for dimension, size in enumerate(sizes):
            if isinstance(size, torch.SymInt):
                self._places[size.node.expr] = number, dimension
        return made

    def number(self, value: Any) -> Any:
        """Return the stand-in for a size, or for a number that was computed from sizes."""
        if not isinstance(value, torch.SymInt):
            raise NotSymbolic(f"a {type(value).__name__} is computed of sizes")
        expression = value.node.expr
        if expression.is_number:
            return int(expression)
        return self._numbers.setdefault(expression, Number(len(self._numbers)))

    def read(self, function: Callable[..., Any]) -> Any:
        """Return the value that a function had read of inputs in the forward with values."""
        if not self._reads or self._reads[0].read != function:
            raise NotSymbolic("other values are read than before")
        return self._reads.popleft().value

    def finish(self, program: Program) -> AnySizes:
        """Return the recorded program with its conditions."""
        if self._reads:
            raise NotSymbolic("fewer values are read than before")
        symbols = list(self._places)
        conditions = [guard.expr for guard in self._environment.guards]
        if any(each.free_symbols - set(symbols) for each in (*self._numbers, *conditions)):
            raise NotSymbolic("sizes of what depends on values play a part")
        if any(leaf.is_Float for each in (*self._numbers, *conditions) for leaf in each.atoms()):
            raise NotSymbolic("a fraction plays a part, which is rounded in another order")
        printed = self._torchs.PythonPrinter().doprint
        head = "lambda " + ", ".join(map(str, symbols))
        # The text is torch's, of integers and names of symbols alone.
        holds = eval(f"{head}: {' and '.join(f'({printed(c)})' for c in conditions) or True}")
        numbers = eval(f"{head}: ({''.join(f'{printed(n)}, ' for n in self._numbers)})")
        return AnySizes(program, list(self._places.values()), holds, numbers)


@dataclasses.dataclass(slots=True)
class AnySizes:
    """A program for any sizes that fulfil its conditions.

    Attributes:
        places: The input and the dimension of each symbol.
        holds: Whether sizes, in the order of ``places``, fulfil the conditions.
        of_sizes: The numbers of the program, from such sizes.
        fixed: The other sizes, by input and dimension.
    """

    program: Program
    places: list[tuple[int, int]]
    holds: Callable[..., bool]
    of_sizes: Callable[..., tuple[int, ...]]
    fixed: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict)

    def numbers(self, shapes: Shapes) -> tuple[int, ...] | None:
        """Return the numbers for inputs of some shapes; None if it is no program for these."""
        if any(shapes[i][dimension] != size for (i, dimension), size in self.fixed.items()):
            return None
        sizes = [shapes[number][dimension] for number, dimension in self.places]
        try:
            if min(sizes) < _SMALLEST or not self.holds(*sizes):
                return None
            numbers = tuple(map(int, self.of_sizes(*sizes)))
        except ArithmeticError:  # as when it divides by zero: the forward says where
            return None
        return numbers if all(-_LARGEST <= each <= _LARGEST for each in numbers) else None

    def agrees_with(self, shapes: Shapes, recorded: Program) -> bool | None:
        """Whether it is the program recorded for some inputs; None if it does not apply to them.

        It does not apply to other shapes, nor where other values were read.
        """
        if (numbers := self.numbers(shapes)) is None:
            return None
        mine = replaced(self.program, (Number,), lambda each: numbers[each.index])
        if _is_same(mine, recorded):
            return True
        for one, other in zip(mine.guards, recorded.guards):
            if not _is_same(one, other):
                reads_same = _is_same(dataclasses.replace(one, value=other.value), other)
                return None if reads_same and _leads_same(mine, recorded, one) else False
        return False


def any_sizes(
    record: Callable[[Symbols], Program], examples: Sequence[tuple[Shapes, Program]]
) -> AnySizes | None:
    """Make of recorded forwards of one kind a program for any sizes; None if there is none.

    ``record`` records the forward of the last example once more. The sizes that differ between the
    examples are those that may change.
    """
    shapes, recorded = examples[-1]
    changing = [
        [len({each[number][dimension] for each, _ in examples}) > 1 for dimension in range(len(of))]
        for number, of in enumerate(shapes)
    ]
    if not any(map(any, changing)):
        return None
    torchs = SymbolicShapes.of_torch()
    if torchs is None:
        return None
    try:
        symbols = Symbols(torchs, changing, recorded.guards)
        found = symbols.finish(record(symbols))
        found.fixed = {
            (number, dimension): size
            for number, sizes in enumerate(shapes)
            for dimension, size in enumerate(sizes)
            if (number, dimension) not in found.places
        }
        if not found.places:
            return None
        agree = [found.agrees_with(*each) for each in examples]
        # One that holds for the sizes of this example alone is no program for any sizes.
        return found if agree[-1] and False not in agree and agree.count(True) > 1 else None
    except Exception as error:  # of torch or of the user's code, which meets no symbols otherwise
        _log.debug("a forward cannot be recorded for any sizes: %r", error)
        return None


def _leads_same(one: Program, other: Program, guard: Guard) -> bool:
    """Whether two programs compute in the same way the value that a guard of both reads."""
    return all(_is_same(one.steps[number], other.steps[number]) for number in guard.steps)


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values of programs are the same, tensors by their content."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and _has_same(one, other)
    held, others = (None if isinstance(v, STAND_INS) else opened(v) for v in (one, other))
    if held is None or others is None:
        return bool(one == other)
    alike = isinstance(one, tuple) and isinstance(other, tuple)  # a torch.Size has become a tuple
    return (
        (alike or type(one) is type(other))
        and list(held[0]) == list(others[0])
        and all(map(_is_same, held[1], others[1]))
    )


def _has_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of programs are of one kind, with the same bytes."""
    if is_sparse(one) or is_sparse(other):
        return one.layout is other.layout and _is_same(parts_of_sparse(one), parts_of_sparse(other))
    if (one.dtype, one.shape, one.stride()) != (other.dtype, other.shape, other.stride()):
        return False
    if type(one) is not type(other):
        return False
    pair = (each.detach().contiguous().flatten().view(torch.uint8) for each in (one, other))
    return torch.equal(*pair)
