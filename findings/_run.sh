# What every finding shares; sourced by it, not run. A finding says its behaviour in its first comment and then calls
#   packages NAME==VERSION ...   once for each environment; replace_package NAME==VERSION adds to the last one
#   module_shd                   module `shd` for the last environment: SpikingJelly's reader of SHD
#   program <<'PY'               Python without MegaSNN, in the last environment
#   expected <<'OUT'             the recorded output; any other one ends the script with status 1
set -euo pipefail

# One thread, no GPU and no caches of the user's: only the pinned versions may decide.
unset PYTHONPATH PYTHONHOME TRITON_INTERPRET TRITON_DEFAULT_FP_FUSION
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= PYTHONNOUSERSITE=1
FOLDER=$(mktemp -d)
trap 'rm -rf "$FOLDER"' EXIT
export TRITON_CACHE_DIR=$FOLDER/triton NUMBA_CACHE_DIR=$FOLDER/numba XDG_CACHE_HOME=$FOLDER/cache

ENVIRONMENTS=0
PROGRAMS=0
sed -n '2,/^$/ s/^# \{0,1\}//p' "$0"

# Makes a new virtual environment in the temporary folder and prints the versions in it.
packages() {
    ENVIRONMENTS=$((ENVIRONMENTS + 1))
    ENVIRONMENT=$FOLDER/env$ENVIRONMENTS
    "${PYTHON:-python3}" -m venv "$ENVIRONMENT"
    install "$@"
    versions "${@%%==*}"
}

# Puts one package into the last environment, whatever version of it another package asks for.
replace_package() {
    install --no-deps "$1"
    versions "${1%%==*}"
}

install() {
    if ! "$ENVIRONMENT/bin/python" -m pip install -qq --no-compile --disable-pip-version-check "$@"; then
        echo "$0: packages could not be installed" >&2
        exit 2
    fi
}

versions() {
    "$ENVIRONMENT/bin/python" - "$@" <<'PY'
import platform
import sys
from importlib.metadata import version

print(f"Python {platform.python_version()}, {platform.machine()}")
for name in sys.argv[1:]:
    print(name, version(name))
PY
}

# The reader imports torchaudio and torchvision and uses neither. Both fit only one build of torch: the first is replaced
# by an empty module, and the second may not describe operators that its own library would bring.
module_shd() {
    local folder
    folder=$("$ENVIRONMENT/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    cat > "$folder/shd.py" <<'PY'
import sys
import types
from importlib.machinery import ModuleSpec

import torch

torchaudio = types.ModuleType("torchaudio")
torchaudio.__spec__ = ModuleSpec("torchaudio", None)
sys.modules["torchaudio"] = torchaudio
register = torch.library.register_fake
torch.library.register_fake = lambda name, *args, **kwargs: (
    (lambda function: function) if str(name).startswith("torchvision::") else register(name, *args, **kwargs)
)

from spikingjelly.datasets.shd import SpikingHeidelbergDigits
PY
}

# Runs Python from standard input in the last environment, prints its output and keeps it.
program() {
    PROGRAMS=$((PROGRAMS + 1))
    mkdir "$FOLDER/work$PROGRAMS"
    cat > "$FOLDER/work$PROGRAMS/program.py"
    cd "$FOLDER/work$PROGRAMS"
    if ! timeout 300 "$ENVIRONMENT/bin/python" program.py 2> errors | tee -a "$FOLDER/output"; then
        cat errors >&2
        echo "$0: the program did not run" >&2
        exit 2
    fi
}

# Compares all output with the recorded one, which it reads from standard input.
expected() {
    if ! diff -u --label recorded --label seen - "$FOLDER/output" > "$FOLDER/difference"; then
        cat "$FOLDER/difference"
        echo "$0: the behaviour changed" >&2
        exit 1
    fi
    echo "as recorded"
}
