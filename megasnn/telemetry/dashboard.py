"""How TensorBoard's cards are named and laid out: what is looked at most stands first.

TensorBoard sorts cards by name and unfolds the first two groups. So groups have a number, and so have the cards of
those that have an order of their own. What stands against consumed samples is one folded group at the end.
"""

from __future__ import annotations

from collections.abc import Iterable

# Group -> its cards in the order they are looked at; cards that are not named here come after them by name.
GROUPS: dict[str, tuple[str, ...]] = {
    "training": ("loss", "accuracy", "samples_per_second", "grad_norm", "learning_rate"),
    "validation": ("loss", "accuracy_top1", "accuracy_top5"),
    "spikes": ("firing_rate", "silent", "saturated"),
    "time": ("iteration_ms",),
    "memory": (),
    "pipeline": (),
    "communication": (),
    "data": (),
}
BY_SAMPLES = "vs_samples/"
EARLIER_BY_SAMPLES = " vs samples"  # the end of such a tag in event files of earlier versions


def card(name: str) -> str:
    """The tag of a scalar: "training/loss" -> "1_training/1_loss". Raises ValueError for a group that is not known."""
    group, _, rest = name.partition("/")
    if group not in GROUPS or not rest:
        raise ValueError(f"scalar {name!r} belongs to none of the groups {', '.join(GROUPS)}")
    known = GROUPS[group]
    place = f"{known.index(rest) + 1}_" if rest in known else ""
    return f"{list(GROUPS).index(group) + 1}_{group}/{place}{rest}"


def layout() -> dict[str, dict[str, list[object]]]:
    """Charts of several lines for the tab "Custom Scalars", as `SummaryWriter.add_custom_scalars` takes them."""

    def chart(*names: str) -> list[object]:
        return ["Multiline", [_pattern(names)]]

    return {
        "Training and validation": {
            "loss": chart("training/loss", "validation/loss"),
            "accuracy": chart("training/accuracy", "validation/accuracy_top1", "validation/accuracy_top5"),
            "samples per second": chart("training/samples_per_second"),
            "gradient norm": chart("training/grad_norm"),
            "learning rate": chart("training/learning_rate"),
        },
        "Spikes, mean over the layers": {
            "firing rate, silent and saturated neurons": ["Multiline", [r"^\d_spikes/"]],
        },
        "Resources": {
            "time of an iteration and its phases, ms": ["Multiline", [r"^\d_time/"]],
            "peak memory of each rank, MB": ["Multiline", [r"^\d_memory/"]],
            "traffic of all ranks per iteration, MB": ["Multiline", [r"^\d_communication/.*_mb"]],
        },
    }


def _pattern(names: Iterable[str]) -> str:
    return f"^({'|'.join(card(name) for name in names)})$"
