#!/usr/bin/env bash
# Checks style and types and runs the tests, on the CPU; arguments go to pytest: bash scripts/test.sh tests/schedule -x
# Without arguments two processes run the whole suite side by side.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"

prepare_python test
cd "$ROOT"
"$PYTHON" -m ruff check .
"$PYTHON" -m mypy
if (($# == 0)); then set -- -n 2 --dist worksteal; fi
exec "$PYTHON" -m pytest -q "$@"
