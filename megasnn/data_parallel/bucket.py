"""Some parameters' gradients in one tensor: all the time, or while a backward adds to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from weakref import WeakMethod

from torch import Tensor

from megasnn.comm.group import Group
from megasnn.data_parallel.gathered_weights import ALIGNMENT, GatheredWeights
from megasnn.data_parallel.owned_rows import OwnedRows


def _never() -> bool:
    return False


class Bucket:
    """Some parameters' gradients side by side in one tensor; `param.grad` are views of it.

    Args:
        parts: the parameters; those of each part lie in one piece of memory.
        partial: whether they are summed over the tensor parallel group, too.
        owners: the replicas that own rows, of those that hold the same of the weights; None where rows have no owners.
        weights: where parameters are kept by rows.

    Attributes:
        flats: the memory of each part.
        due: how many gradients are still to be added to each parameter that is not complete.
        finish: waits for the sum over the replicas; None where none is on its way.
        is_complete: whether that would end at once.
        kept: the rows that this rank keeps, where it keeps no others. sum: of this rank's gradients, and then of those
            of all ranks that it is reduced over.
        owned: the rows that this rank owns; None where every replica is to have the whole sum.
    """

    def __init__(
        self,
        chunk: int,
        parts: Sequence[list[Tensor]],
        partial: bool,
        owners: Group | None,
        weights: GatheredWeights | None,
    ) -> None:
        self.chunk, self.parameters, self.partial = chunk, [*chain(*parts)], partial
        placed = [_side_by_side(part) for part in parts]
        self.flats = [flat for flat, _ in placed]
        self.views = [view for _, views in placed for view in views]
        self.due: dict[Tensor, int] = {}
        self.finish: Callable[[], object] | None = None
        self.is_complete: Callable[[], bool] = _never
        self.kept, self.sum = None, self.flats[0]
        held, gradients = self.parameters, self.views
        if weights is not None:
            rows = [weights.rows(each) for each in self.parameters]
            self.kept = OwnedRows(self.parameters, self.views, weights.scatter, rows)
            held, gradients, self.sum = [*rows], self.kept.sums, self.kept.sum
        self.owned = None if owners is None else OwnedRows(held, gradients, owners)

    def zero(self) -> None:
        """Before each step."""
        for flat in self.flats:
            flat.zero_()
        self.attach()

    def end(self) -> None:
        """Waits for the sum over the replicas, where one is on its way."""
        if self.finish is not None:
            self.finish()
            self.finish, self.is_complete = None, _never  # which hold what has been sent and received

    def attach(self) -> None:
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view
        for rows in (self.kept, self.owned):
            if rows is not None:
                rows.attach()

    def final(self) -> dict[Tensor, Tensor]:
        """By parameter, and by what is kept of it, the rows that this rank owns, with the reduced gradient."""
        owned = self.owned or self.kept
        if owned is None:
            return {}
        final: dict[Tensor, Tensor] = dict(zip(self.parameters, owned.rows, strict=True))
        if self.kept is not None:
            final.update(zip(self.kept.rows, owned.rows, strict=True))
        return final


class ScatteredBucket(Bucket):
    """A bucket that there is memory for while a backward adds to it: behind it, gradients go to those who keep the
    rows, and are added up there.

    Where backwards are split, the weights of convolutions and linear layers get their gradients in the second part. All
    other parameters get them in the first, and are a part of the bucket, which has memory from then on: few bytes.

    Attributes:
        early_bytes, late_bytes: of the gradients that the first and the second part of a backward give.
    """

    def __init__(
        self, chunk: int, parameters: list[Tensor], partial: bool, owners: Group | None, weights: GatheredWeights
    ) -> None:
        early = [each for each in parameters if each not in weights.multiplied]
        late = [each for each in parameters if each in weights.multiplied]
        super().__init__(chunk, [part for part in (early, late) if part], partial, owners, weights)
        self._early = self.flats[: 1 if early else 0]
        self.early_bytes = sum(flat.nbytes for flat in self._early)
        self.late_bytes = sum(flat.nbytes for flat in self.flats) - self.early_bytes
        for flat in self.flats:
            flat.untyped_storage().resize_(0)
        # A module of one's own may use such a weight by itself: then autograd adds to it in the first part.
        begin = WeakMethod(self.begin)

        def before_adding(_: Tensor) -> None:
            if (begin_here := begin()) is not None:
                begin_here()

        for parameter in late:
            parameter.register_hook(before_adding)

    def zero(self) -> None:
        self.sum.zero_()
        self.attach()

    def begin(self, first_part: bool = False) -> None:
        """Before a backward adds to it, or only its first part: zeros, where there is nothing that is not scattered."""
        for flat in self._early if first_part else self.flats:
            storage = flat.untyped_storage()
            if not storage.nbytes():
                storage.resize_(flat.nbytes)
                flat.zero_()

    def scatter(self) -> None:
        """Starts sending what there is to those who keep the rows. Collective over them."""
        assert self.kept is not None
        self.end()
        self.finish = self.kept.start_adding("backward")
        for flat in self.flats:
            flat.untyped_storage().resize_(0)


def _side_by_side(parameters: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Zeros, and the place of each parameter in them, in its memory order, as the optimizer wants it.

    A product of matrices may sum in another order at another alignment, and a parameter's neighbours depend on the
    layout: each begins at a multiple of ALIGNMENT.
    """
    steps = [ALIGNMENT // each.itemsize for each in parameters]
    sizes = [-(-each.numel() // step) * step for each, step in zip(parameters, steps, strict=True)]
    flat = parameters[0].new_zeros(sum(sizes))
    starts = accumulate(sizes, initial=0)
    views = [flat.as_strided(each.shape, each.stride(), start) for each, start in zip(parameters, starts, strict=False)]
    return flat, views
