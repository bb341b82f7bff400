"""What each layer and each boundary between stages costs, as numbers; measuring them is in measured.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megasnn.models.description import ModelDescription
from megasnn.pipeline.link import LinkCost
from megasnn.schedule import ChunkCost, Kind, Transfer
from megasnn.schedule.memory import stage_shares


@dataclass(frozen=True)
class LayerCost:
    """One micro-batch through one layer, seconds and bytes.

    Attributes:
        forward, input_gradient, weight_gradient: to compute.
        held: bytes kept from the forward until the weight gradient is done.
        working: bytes that forward, input gradient and weight gradient need at most, above what was there before each;
            0 where the system does not tell.
        message, gradient: bytes of the output and of its gradient on the way to another stage, and in PipelineCosts of
            all that crosses a boundary behind the layer.
        pack, unpack: seconds to make those messages, and to restore what they hold.
        parameters: bytes of this rank's part of them.
        collectives, exchanged: calls between tensor parallel ranks, forward and backward, and the bytes that this rank
            hands to them.
        found: bytes that are kept beside its input where the forward is computed again (megasnn/again.py).
        again: seconds of a forward that is computed again; None: those of the forward.
        working_again: bytes that it needs, as in `working`; None: those of the forward.
    """

    forward: float
    input_gradient: float
    weight_gradient: float
    held: int = 0
    working: tuple[int, int, int] = (0, 0, 0)
    message: int = 0
    gradient: int = 0
    pack: float = 0.0
    unpack: float = 0.0
    parameters: int = 0
    collectives: int = 0
    exchanged: int = 0
    found: int = 0
    again: float | None = None
    working_again: int | None = None

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward + self.input_gradient + self.weight_gradient


@dataclass(frozen=True)
class PipelineCosts:
    """Of every layer of a model for one micro-batch, and of the way between two stages."""

    layers: tuple[LayerCost, ...]
    link: LinkCost

    def of_chunks(self, bounds: Sequence[range], placement: Sequence[int]) -> list[ChunkCost]:
        """For the simulator, in seconds; activations in whole stages' micro-batches.

        Args:
            bounds: the layers of each chunk. placement: its rank.
        """
        shares = stage_shares(placement)
        return [self._of_chunk(span, share) for span, share in zip(bounds, shares, strict=True)]

    def held_bytes(self, bounds: Sequence[range]) -> list[int]:
        """What each chunk keeps of a micro-batch from forward to backward."""
        return [sum(self.layers[i].held for i in span) for span in bounds]

    def entering_bytes(self, bounds: Sequence[range]) -> list[int]:
        """What each chunk keeps of a micro-batch where its forward is computed again; images stay in the batch."""
        return [
            (self.layers[span.start - 1].message if span.start else 0) + sum(self.layers[i].found for i in span)
            for span in bounds
        ]

    def working_bytes(self, bounds: Sequence[range]) -> list[dict[Kind, int]]:
        """What each chunk's computations need at most, above what is there before them."""
        return [self._working_of(span) for span in bounds]

    def _working_of(self, span: range) -> dict[Kind, int]:
        """A forward keeps its layers' activations one after another, and its input until its end. One that is computed
        again may have the gradient of its output waiting."""
        forward, held = 0, 0
        for i in span:
            entering = self.layers[i - 1].gradient if i > span.start else 0
            forward = max(forward, held + entering + self.layers[i].working[0])
            held += self.layers[i].held
        given = self.layers[span.start - 1].gradient if span.start > 0 else 0
        given_back = self.layers[span.stop - 1].gradient if span else 0
        inputs, weights = (max((self.layers[i].working[part] for i in span), default=0) for part in (1, 2))
        again = self.layers[span.start].working_again if len(span) == 1 else None
        return {
            Kind.FORWARD: given + forward,
            Kind.RECOMPUTE: given + given_back + (forward if again is None else again),
            Kind.BACKWARD: given_back + max(inputs, weights),
            Kind.INPUT_GRADIENT: given_back + inputs,
            Kind.WEIGHT_GRADIENT: weights,
        }

    def _of_chunk(self, span: range, share: float) -> ChunkCost:
        layers = [self.layers[i] for i in span]
        # What a chunk without layers hands on is what it was given.
        last = self.layers[span.stop - 1] if span.stop > 0 else LayerCost(0, 0, 0)
        inputs, weights = (sum(getattr(each, f"{part}_gradient") for each in layers) for part in ("input", "weight"))
        return ChunkCost(
            forward=sum(each.forward for each in layers),
            backward=inputs + weights,
            activation=share,
            input_gradient=inputs,
            weight_gradient=weights,
            output=self._transfer(last.message, last.pack, last.unpack),
            gradient=self._transfer(last.gradient, 0.0, 0.0),
            again=sum(each.forward if each.again is None else each.again for each in layers),
        )

    def _transfer(self, size: int, pack: float, unpack: float) -> Transfer:
        link = self.link
        sender, receiver = size * link.sender_per_byte, size * link.receiver_per_byte
        on_the_way = link.latency + size * link.per_byte - sender - receiver
        return Transfer(on_the_way, pack + sender, unpack + receiver)


def crossing(model: ModelDescription, costs: Sequence[LayerCost]) -> list[LayerCost]:
    """The costs of layers with messages of all that crosses a boundary behind each, in place of its own output's."""
    found = []
    for number, cost in enumerate(costs):
        carried = [costs[other] for other in model.needed_from(number + 1)]
        sizes = {name: sum(getattr(each, name) for each in carried) for name in ("message", "gradient")}
        times = {name: sum(getattr(each, name) for each in carried) for name in ("pack", "unpack")}
        found.append(replace(cost, **sizes, **times))
    return found


def layers_per_chunk(bounds: Sequence[range]) -> str:
    """Layers of each chunk, as `--pipeline-model-parallel-layout` takes them."""
    return "|".join(str(len(span)) for span in bounds)
