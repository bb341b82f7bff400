#!/usr/bin/env bash
# Checks style and types and runs the tests, on the CPU; arguments go to pytest: bash scripts/test.sh tests/schedule -x
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"

prepare_python test
cd "$ROOT"
"$PYTHON" -m ruff check .
"$PYTHON" -m mypy
"$PYTHON" -m pytest -q "$@"
