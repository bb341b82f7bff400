#!/usr/bin/env bash
# Builds one site from the README and the pages of docs/, without a network. A dead link is an error. Open
# build/docs/index.html in a browser.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"

prepare_python docs
cd "$ROOT"
"$PYTHON" -m sphinx --quiet --fail-on-warning --keep-going --fresh-env --conf-dir docs . build/docs
say "The site: $ROOT/build/docs/index.html"
