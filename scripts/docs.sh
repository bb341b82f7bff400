#!/usr/bin/env bash
# Makes one site of the README and the pages of docs/, without a network. A link that leads nowhere is an error. A browser
# opens build/docs/index.html as a file.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"

prepare_python docs
cd "$ROOT"
"$PYTHON" -m sphinx --quiet --fail-on-warning --keep-going --fresh-env --conf-dir docs . build/docs
say "The site: $ROOT/build/docs/index.html"
