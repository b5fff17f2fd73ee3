#!/bin/sh
# Makes wheels, under 1 MB in all, of what the command line needs and a GPU machine without network may lack, in .whl/
# (or in the folder that is named). docs/gpu.md says how they travel. PYTHON names the interpreter.
set -eu
cd "$(dirname "$0")/.."
"${PYTHON:-.venv/bin/python}" -m pip wheel --quiet --no-deps --constraint constraints.txt --wheel-dir "${1:-.whl}" \
  hydra-core omegaconf antlr4-python3-runtime
