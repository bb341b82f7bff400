#!/usr/bin/env bash
# Draws the schedules of docs/schedules.md.
set -euo pipefail
cd "$(dirname "$0")/.."
draw() { python tools/draw_schedule.py "${@:2}" --output "docs/schedule_$1.png" >/dev/null; }
draw 1f1b 1f1b --stages 4 --micro-batches 8
draw zb1p zb1p --stages 4 --micro-batches 8
draw zbv zbv --stages 4 --micro-batches 8
