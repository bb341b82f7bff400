#!/usr/bin/env bash
# numba 0.68: with cache=True a function keeps the old code of functions that it calls from another file. A change of
# that file is not noticed, by its date or otherwise, nor is a change of a constant in it. Only a change of the caller's
# own file makes the cached code void. The uncompiled function shows the new result in the same process.

source "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
packages numba==0.68.1 numpy==2.4.6
export PYTHONPATH=$FOLDER/sources
mkdir "$FOLDER/sources"
cat > "$FOLDER/sources/layer.py" <<'PY'
import neuron
from numba import njit


@njit(cache=True)
def fired(v):
    return neuron.decayed(v) >= neuron.THRESHOLD
PY
cat > "$FOLDER/sources/neuron.py" <<'PY'
from numba import njit

THRESHOLD = 1.0


@njit
def decayed(v):
    return 0.5 * v
PY
program <<'PY'
import neuron
from layer import fired

print("decay 0.5, threshold 1:", "decayed(1.5) =", neuron.decayed(1.5), "fired(1.5) =", fired(1.5))
PY
sed -i 's/0\.5/0.9/' "$FOLDER/sources/neuron.py"
program <<'PY'
import neuron
from layer import fired

print("decay 0.9, threshold 1:", "decayed(1.5) =", neuron.decayed(1.5), "fired(1.5) =", fired(1.5))
print("  the same, uncompiled:", "fired(1.5) =", fired.py_func(1.5))
PY
sed -i 's/THRESHOLD = 1.0/THRESHOLD = 9.0/' "$FOLDER/sources/neuron.py"
program <<'PY'
from layer import fired

print("decay 0.9, threshold 9:", "fired(5.0) =", fired(5.0))
PY
echo "# a comment" >> "$FOLDER/sources/layer.py"
program <<'PY'
from layer import fired

print("  a comment added to the caller's file:", "fired(5.0) =", fired(5.0))
PY
expected <<'OUT'
decay 0.5, threshold 1: decayed(1.5) = 0.75 fired(1.5) = False
decay 0.9, threshold 1: decayed(1.5) = 1.35 fired(1.5) = False
  the same, uncompiled: fired(1.5) = True
decay 0.9, threshold 9: fired(5.0) = True
  a comment added to the caller's file: fired(5.0) = False
OUT
