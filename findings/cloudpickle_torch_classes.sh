#!/usr/bin/env bash
# cloudpickle 3.1.2 with torch 2.13: a class of a script cannot be sent to another process if one of its methods uses
# torch and an attribute named `classes`, such as `self.classes`. cloudpickle sends the loaded submodules that a function
# may mean, by their names alone, and torch.classes is no plain module. Any other name of the attribute works.

source "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
packages torch==2.13.0 cloudpickle==3.1.2 numpy==2.4.6
program <<'PY'
import cloudpickle
import torch


class Named:
    def __init__(self):
        self.images = torch.zeros(2)
        self.names = ["cat", "dog"]


class Classes:
    def __init__(self):
        self.images = torch.zeros(2)
        self.classes = ["cat", "dog"]


for kind in (Named, Classes):
    try:
        sent = cloudpickle.loads(cloudpickle.dumps(kind()))
        print(f"{kind.__name__}: {sorted(vars(sent))}")
    except TypeError as error:
        print(f"{kind.__name__}: TypeError: {error}")
PY
expected <<'OUT'
Named: ['images', 'names']
Classes: TypeError: cannot pickle '_Classes' object
OUT
