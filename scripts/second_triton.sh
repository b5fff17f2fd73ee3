#!/bin/sh
# What depends on the version of Triton, with another version than the pinned one: budgets of compiled kernels, the
# compile cache, launches. A GPU machine without network has the version that it has. Not part of `make test`, since it
# fetches about 200 MB (to build/, once). Triton 3.6 interprets nothing with the pinned NumPy, so no kernel is executed.
# Usage: scripts/second_triton.sh [VERSION [FOLDER]]; PYTHON names the interpreter.
set -eu
cd "$(dirname "$0")/.."
version=${1:-3.6.0}
site=${2:-$PWD/build/triton-$version}
python=${PYTHON:-.venv/bin/python}
[ -d "$site/triton" ] || "$python" -m pip install --quiet --no-deps --target "$site" "triton==$version"
export PYTHONPATH="$site" OMP_NUM_THREADS=1
"$python" -c "import triton; assert triton.__version__ == '$version', triton.__version__"
exec "$python" -m pytest -q tests/engine/test_ptxas.py tests/engine/test_launches.py
