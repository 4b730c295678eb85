#!/usr/bin/env bash
# Make .venv with the pinned packages and minitrain itself. Every way this can fail
# ends in one line that says what to do.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3.11}
venv=.venv
log=$venv/setup.log

give_up() { printf '\nset-up stopped: %s\n' "$*" >&2; exit 1; }

command -v "$python" >/dev/null ||
    give_up "there is no '$python' here; install Python 3.11, or name one: make PYTHON=/path/to/python3.11"
"$python" -c 'import sys; raise SystemExit(sys.version_info[:2] != (3, 11))' ||
    give_up "$("$python" --version 2>&1) is not Python 3.11, which the pinned packages need; name one: make PYTHON=/path/to/python3.11"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    give_up "this Python cannot make virtual environments; on Debian and Ubuntu: apt-get install python3.11-venv"
free_mib=$(df -Pm . | awk 'NR == 2 { print $4 }')
[ -x $venv/bin/python ] || [ "$free_mib" -ge 3000 ] ||
    give_up "$free_mib MiB are free here and the environment needs about 3000 (8000 with torch's CUDA libraries); free some space"

if ! $venv/bin/python -c 'import sys; raise SystemExit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
    "$python" -m venv --clear $venv 2>/dev/null ||
        give_up "could not write $venv in $(pwd); check the permissions and the free space of this folder"
fi

pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@" >>"$log" 2>&1 || explain; }

explain() {
    if grep -q 'No space left on device' "$log"; then
        give_up "the disk is full; free about 3000 MiB (8000 with torch's CUDA libraries) and run make again"
    elif grep -qE 'NewConnectionError|NameResolutionError|ConnectTimeout|ProxyError|Connection (refused|reset)|Temporary failure|Network is unreachable|Read timed out' "$log"; then
        give_up "the package index cannot be reached; check the network or the proxy and run make again"
    elif grep -q 'No matching distribution found' "$log"; then
        give_up "$(grep -m1 'No matching distribution found' "$log" | sed 's/^ERROR: //'); this platform may lack a wheel (Linux x86_64 and aarch64 are supported)"
    fi
    give_up "pip failed: $(grep -m1 '^ERROR' "$log" || tail -n 1 "$log") (all of it: $log)"
}

echo "Setting up .venv: the pinned packages of requirements.txt (a few minutes, once)."
: >"$log"
pip install --requirement requirements.txt
pip install --no-deps --no-build-isolation --editable .
