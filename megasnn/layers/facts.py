"""Facts about modules, found while a model is built: MegaSNN's only attribute on a module."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from megasnn.layers.plain_call import PlainCall
from megasnn.parallel.sharding import Shard

# No base class: torch's and the user's modules have facts too. `copy.deepcopy` copies a plain attribute, so a copied
# layer's tensors keep their shards. Layers cannot be pickled, because shards hold functions for initial values;
# `TrainedModel` is pickled as its weights.
_ATTRIBUTE = "_layer_facts"


@dataclass
class LayerFacts:
    """Facts about one module, without its parts.

    Attributes:
        shards: by parameter or buffer name.
        owner_names: a tied tensor's owner, by its global name.
        constructor: arguments of a plain module's constructor by name, noted while the model is built; None if unknown.
        call: how to call a plain layer; None for MegaSNN's layers, which know the ranks.
        is_stepped: a SpikingJelly container calls the module at every time step.
        calls: in one forward; 1 until a dry run has counted them.
        counted: calls so far in the present dry run.
        image_height: of images whose rows the module exchanges.
        knows_input: True after a dry run's first call.
    """

    shards: dict[str, Shard] = field(default_factory=dict)
    owner_names: dict[str, str] = field(default_factory=dict)
    constructor: dict[str, Any] | None = None
    call: PlainCall | None = None
    is_stepped: bool = False
    calls: int = 1
    counted: int = 0
    image_height: int | None = None
    knows_input: bool = False

    def count_call(self) -> None:
        self.counted += 1
        self.calls = self.counted

    def begin_forward(self) -> None:
        """Forgets an earlier dry run's counts."""
        self.calls = 0
        self.counted = 0
        self.image_height = None


def facts(module: nn.Module) -> LayerFacts:
    found: LayerFacts | None = vars(module).get(_ATTRIBUTE)
    if found is None:
        found = vars(module)[_ATTRIBUTE] = LayerFacts()
    return found


def refuse_second_call(module: nn.Module, why: str) -> None:
    """Counts a call in the dry run. Raises ValueError for the second one in a forward."""
    found = facts(module)
    found.count_call()
    if found.counted > 1:
        raise ValueError(f"this {type(module).__name__} is called twice in one forward, and {why}")
