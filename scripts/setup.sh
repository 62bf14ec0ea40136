#!/usr/bin/env bash
# Makes the project's own environment: scripts/setup.sh [VENV [EXTRAS]], by default .venv
# A torch that the interpreter already has (2.11 or newer) is used as it is, also that of a virtual environment; otherwise
# one is installed: on a machine without an NVIDIA GPU the pinned version, of which small CPU builds exist, and elsewhere
# pip's choice.
# LLMB_TORCH overrides what pip is asked for, for example LLMB_TORCH="torch==2.11.0".
set -euo pipefail
case ${1:-} in -*) echo "usage: scripts/setup.sh [VENV [EXTRAS]]" >&2; exit 2 ;; esac
venv=${1:-$(dirname "$0")/../.venv}
extras=${2:-}
python=${PYTHON:-python3}
case $venv in /*) ;; *) venv=$PWD/$venv ;; esac
case $python in /*) ;; */*) python=$PWD/$python ;; esac
cd "$(dirname "$0")/.."

if ! command -v "$python" >/dev/null; then
    echo "there is no '$python'. Try: make PYTHON=python3.12 ..." >&2
    exit 3
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "llmb needs Python 3.11 or newer; '$python' is $("$python" -V 2>&1). Try: make PYTHON=python3.12 ..." >&2
    exit 3
fi

has_torch() {
    "$1" - <<'PY' 2>/dev/null
import importlib.metadata, sys
version = importlib.metadata.version("torch").split("+")[0].split(".")
sys.exit(tuple(map(int, version[:2])) < (2, 11))
PY
}

# A constraint for pip: the triton that is installed, or the one that torch requires, or, as builds of torch for CPUs
# require none, the one that the build of this version for GPUs requires. Tests need it; runs get none from here.
triton_constraint() {
    "$1" - <<'PY'
from importlib.metadata import distribution, distributions
GPU_BUILDS_REQUIRE = {"2.11": "triton==3.6.0", "2.13": "triton==3.7.1"}
torch = distribution("torch")
required = [need.split(";")[0] for need in torch.requires or () if need.startswith("triton==")]
installed = [f"triton=={one.version}" for one in distributions(name="triton")]
print(*(installed or required or [GPU_BUILDS_REQUIRE.get(".".join(torch.version.split(".")[:2]), "")])[:1])
PY
}

say() {
    echo "setup: $*" >&2
}

if [ ! -x "$venv/bin/python" ]; then
    say "1/3 environment in $venv, with $("$python" -V)"
    if has_torch "$python"; then
        say "its torch is used: $("$python" -c 'import importlib.metadata as m; print(m.version("torch"))')"
        "$python" -m venv --system-site-packages "$venv"
        # An environment that is made with another one's interpreter sees what that one was made with, not its packages.
        packages='import sysconfig; print(sysconfig.get_path("purelib"))'
        "$python" -c "$packages" >"$("$venv/bin/python" -c "$packages")/outer.pth"
    else
        "$python" -m venv "$venv"
    fi
    "$venv/bin/pip" install -q --upgrade pip  # Python 3.11 brings one that takes twice as long to find what fits
fi
if ! has_torch "$venv/bin/python"; then
    if command -v nvidia-smi >/dev/null; then default="torch>=2.11"; else default="torch==2.13.0"; fi
    say "2/3 ${LLMB_TORCH:-$default}, which takes minutes on a slow network"
    torch=${LLMB_TORCH:-$default}
    if ! "$venv/bin/pip" install numpy "$torch" 2>&1 | tee "$venv/pip.log"; then
        # The latter line is below "have no matching distributions available", where pip has constraints.
        if ! grep -qE "No matching distribution found for torch|^    torch$" "$venv/pip.log"; then exit 1; fi
        say "there is no $torch for $("$venv/bin/python" -V) where pip looks; LLMB_TORCH asks for another"
        exit 4
    fi
fi
say "3/3 llmb and what it needs"
"$venv/bin/pip" install -q -c <(triton_constraint "$venv/bin/python") -e ".[prepare,report${extras:+,$extras}]"
if command -v nvidia-smi >/dev/null; then
    "$venv/bin/pip" install -q -e ".[resources]" || say "runs go without samples of the GPUs: no nvidia-ml-py"
fi
# pip compiles what it installs, but not a project that stays where it is; without this, each command would compile it
# where PYTHONDONTWRITEBYTECODE is set or the folder is read-only.
"$venv/bin/python" -m compileall -q src/llmb
say "done: $venv/bin/llmb"
