"""Facts about modules, found while a model is built: one object per module, and the only attribute MegaSNN adds to it.

Modules of torch, SpikingJelly and the user have facts too, so they do not stand in a base class. A plain attribute goes
with `copy.deepcopy`: a copied layer has facts of its own, and its tensors keep their shards. Layers cannot be pickled,
because shards hold functions for initial values; `TrainedModel` is pickled as its weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from megasnn.layers.plain.layer_call import LayerCall
from megasnn.parallel.sharding import Shard

_ATTRIBUTE = "_layer_facts"


@dataclass
class LayerFacts:
    """Facts about one module, without the modules in it.

    Attributes:
        shards: shard of each parameter and buffer, by its name in the module.
        owner_names: global name of the owner of each tied tensor, by its name in the module.
        call: how a layer that knows nothing of ranks is called; None for MegaSNN's layers.
        is_stepped: True inside a container of SpikingJelly that calls the module at every time step.
        calls: number of calls in one forward of the model; 1 until a dry run has counted them.
        counted: number of calls so far in the present dry run.
        image_height: height of the images whose rows the module exchanges; the dry run finds it.
        knows_input: True after the first call in a dry run.
    """

    shards: dict[str, Shard] = field(default_factory=dict)
    owner_names: dict[str, str] = field(default_factory=dict)
    call: LayerCall | None = None
    is_stepped: bool = False
    calls: int = 1
    counted: int = 0
    image_height: int | None = None
    knows_input: bool = False

    def count_call(self) -> None:
        """Counts a call on the meta device, as in a dry run."""
        self.counted += 1
        self.calls = self.counted

    def begin_forward(self) -> None:
        """Forgets the counts of an earlier dry run. A module that this one does not call has no calls."""
        self.calls = 0
        self.counted = 0
        self.image_height = None


def facts(module: nn.Module) -> LayerFacts:
    """The facts of a module, made when they are first asked for."""
    found: LayerFacts | None = vars(module).get(_ATTRIBUTE)
    if found is None:
        found = vars(module)[_ATTRIBUTE] = LayerFacts()
    return found


def refuse_second_call(module: nn.Module, why: str) -> None:
    """Counts a call in the dry run. Raises ValueError for the second call of a layer that a forward may call once."""
    found = facts(module)
    found.count_call()
    if found.counted > 1:
        raise ValueError(f"this {type(module).__name__} is called twice in one forward, and {why}")
