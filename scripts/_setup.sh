# shellcheck shell=bash
# Sourced by the scripts beside it. `prepare_python [extra]` sets $PYTHON to an interpreter with megasnn (installed or on
# PYTHONPATH) and its dependencies: the active one if it has them, otherwise that of .venv, which is made and filled.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf '%s\n' "$*" >&2; }

prepare_python() {
    local extra=${1-} venv=$ROOT/.venv
    if PYTHON=$(command -v python || command -v python3) && complete "$extra"; then
        return
    fi
    PYTHON=$venv/bin/python
    if ! "$PYTHON" -m pip --version >/dev/null 2>&1; then
        make_venv "$venv"
    fi
    if ! complete "$extra"; then
        install_project "$venv" "$extra"
    fi
}

# complete [EXTRA]: true if $PYTHON has everything. -P keeps the current folder off its path: a checkout there would be
# found, but not from other folders.
complete() {
    "$PYTHON" -P "$ROOT/scripts/_installed.py" ${1:+"$1"} 2>/dev/null
}

make_venv() {
    local candidate
    for candidate in python3 python python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            say "Making a virtual environment in $1 with $("$candidate" --version)."
            "$candidate" -m venv "$1"
            return
        fi
    done
    say "MegaSNN needs Python 3.11 or newer, and none was found on the PATH."
    return 1
}

# install_project VENV [EXTRA]: installs into VENV, with the versions of tested.txt where pyproject.toml allows several, and
# prints the large downloads; VENV/install.log has all output of pip.
install_project() {
    local log=$1/install.log target=$ROOT${2:+[$2]} word file size unit
    say "Installing MegaSNN and its dependencies into $1: PyTorch is large, this takes some minutes."
    if ! "$1/bin/python" -m pip install --disable-pip-version-check -c "$ROOT/scripts/tested.txt" -e "$target" 2>&1 | tee "$log" |
        while read -r word file size unit; do
            if [[ $word == Downloading && $unit == [MG]B\) ]]; then say "  $file $size $unit"; fi
        done; then
        tail -n 20 "$log" >&2
        say "The installation failed; $log has all output of pip."
        return 1
    fi
    say "Installed."
}
