#!/usr/bin/env bash
# pydantic 2.14: use_attribute_docstrings finds no text of an inherited field of a dataclass. Texts of the class's own
# fields are there, and a BaseModel has those of its parents as well. The parent may be a pydantic dataclass with the
# same setting. The help of a command line that is built from such classes lacks them without a word.

source "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
packages pydantic==2.14.4
program <<'PY'
from pydantic import BaseModel, ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass

CONFIG = ConfigDict(use_attribute_docstrings=True)


@dataclass(config=CONFIG)
class Neuron:
    tau: float = 2.0
    """Time constant in steps."""


@dataclass(config=CONFIG)
class Adaptive(Neuron):
    beta: float = 0.1
    """Strength of the adaptation."""


class NeuronModel(BaseModel):
    model_config = CONFIG
    tau: float = 2.0
    """Time constant in steps."""


class AdaptiveModel(NeuronModel):
    beta: float = 0.1
    """Strength of the adaptation."""


for kind in (Neuron, Adaptive, NeuronModel, AdaptiveModel):
    fields = TypeAdapter(kind).json_schema()["properties"]
    print(f"{kind.__name__}:", {name: each.get("description") for name, each in fields.items()})
PY
expected <<'OUT'
Neuron: {'tau': 'Time constant in steps.'}
Adaptive: {'tau': None, 'beta': 'Strength of the adaptation.'}
NeuronModel: {'tau': 'Time constant in steps.'}
AdaptiveModel: {'tau': 'Time constant in steps.', 'beta': 'Strength of the adaptation.'}
OUT
