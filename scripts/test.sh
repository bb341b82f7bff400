#!/usr/bin/env bash
# Checks style and types and runs the tests, on the CPU; arguments go to pytest: bash scripts/test.sh tests/schedule -x
# Without arguments two processes run the whole suite side by side, and what looks at the clock runs alone behind it.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"

prepare_python test
cd "$ROOT"
"$PYTHON" -m ruff check .
"$PYTHON" -m mypy
if (($#)); then
    exec "$PYTHON" -m pytest -q "$@"
fi
"$PYTHON" -m pytest -q -n 2 --dist worksteal -m "not matrix and not alone"
mapfile -t alone < <(grep -rl --include="test_*.py" "mark\.alone" tests)
if ((${#alone[@]})); then "$PYTHON" -m pytest -q -m "alone and not matrix" "${alone[@]}"; fi
