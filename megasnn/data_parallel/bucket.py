"""Some parameters' gradients in one tensor: all the time, or while a backward adds to them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megasnn.comm.group import Group
from megasnn.data_parallel.gathered_weights import ALIGNMENT, GatheredWeights
from megasnn.data_parallel.owned_rows import OwnedRows


def _never() -> bool:
    return False


class Bucket:
    """Some parameters' gradients side by side in one tensor; `param.grad` are views of it.

    Args:
        partial: whether they are summed over the tensor parallel group, too.
        owners: the replicas that own rows, of those that hold the same of the weights; None where rows have no owners.
        weights: where parameters are kept by rows.

    Attributes:
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
        parameters: list[Tensor],
        partial: bool,
        owners: Group | None,
        weights: GatheredWeights | None,
    ) -> None:
        self.chunk, self.parameters, self.partial = chunk, parameters, partial
        first = parameters[0]
        # A product of matrices may sum in another order at another alignment, and a parameter's neighbours in a bucket
        # depend on the layout: each begins at a multiple of ALIGNMENT.
        step = ALIGNMENT // first.itemsize
        places = [-(-p.numel() // step) * step for p in parameters]
        self.flat = torch.zeros(sum(places), dtype=first.dtype, device=first.device)
        self.due: dict[Tensor, int] = {}
        self.finish: Callable[[], object] | None = None
        self.is_complete: Callable[[], bool] = _never
        offset = 0
        self.views = []
        for parameter, place in zip(parameters, places, strict=True):
            # In the memory order of the parameter, as the optimizer wants it.
            self.views.append(self.flat.as_strided(parameter.shape, parameter.stride(), offset))
            offset += place
        self.kept, self.sum = None, self.flat
        held, gradients = parameters, self.views
        if weights is not None:
            rows = [weights.rows(each) for each in parameters]
            self.kept = OwnedRows(parameters, self.views, weights.scatter, rows)
            held, gradients, self.sum = [*rows], self.kept.sums, self.kept.sum
        self.owned = None if owners is None else OwnedRows(held, gradients, owners)

    def zero(self) -> None:
        """Before each step."""
        self.flat.zero_()
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

    Attributes:
        flat_bytes: what the memory takes while there is some.
    """

    def __init__(
        self, chunk: int, parameters: list[Tensor], partial: bool, owners: Group | None, weights: GatheredWeights
    ) -> None:
        super().__init__(chunk, parameters, partial, owners, weights)
        self._storage, self.flat_bytes = self.flat.untyped_storage(), self.flat.nbytes
        self._storage.resize_(0)

    def zero(self) -> None:
        self.sum.zero_()
        self.attach()

    def begin(self) -> None:
        """Before a backward adds to it: zeros, unless another one has added to it that is not scattered yet."""
        if not self._storage.nbytes():
            self._storage.resize_(self.flat_bytes)
            self.flat.zero_()

    def scatter(self) -> None:
        """Starts sending what there is to those who keep the rows. Collective over them."""
        assert self.kept is not None
        self.end()
        self.finish = self.kept.start_adding("backward")
        self._storage.resize_(0)
