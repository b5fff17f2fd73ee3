#!/usr/bin/env bash
# Builds sdist and wheel (the wheel from the sdist), installs the wheel into a new environment, and uses it in an empty folder
# far from the checkout. Give a folder to keep the two files; PYTHON and UV name the interpreter and the installer.
#
#   scripts/smoke.sh [DIST]
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
dist=${1:-$work/dist}
uv=${UV:-$(command -v uv || echo "$root/.venv/bin/uv")}
command -v "$uv" > /dev/null || { echo "smoke.sh needs uv: make run sets it up in .venv, or give UV=" >&2; exit 1; }
unset PYTHONPATH

"$uv" build --quiet --out-dir "$dist" "$root"
"$uv" venv --quiet --python "${PYTHON:-python3}" "$work/env"
"$uv" pip install --quiet --python "$work/env/bin/python" --constraint "$root/constraints.txt" "$dist"/specbench_image-*.whl
mkdir "$work/empty"
cd "$work/empty"
specbench=$work/env/bin/specbench
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} SPECBENCH_HOME=$work/home

version=$("$specbench" --version)
[ "$version" = "specbench $("$work/env/bin/python" -c 'from importlib.metadata import version; print(version("specbench-image"))')" ]
"$work/env/bin/python" -c 'import pathlib, specbench, sys; sys.exit("site-packages" not in pathlib.Path(specbench.__file__).parts)'
"$specbench" list > list.txt
"$specbench" tables --list > state.txt
"$specbench" run n=1 device=cpu out=default
"$specbench" run method=sjd n=2 warmup=0 out=one metrics=[scenes_reward]
"$specbench" run method=sjd n=2 warmup=0 out=one metrics=[scenes_reward] | grep "nothing left to do"
"$specbench" evaluate one
"$specbench" audit method=sd audit.samples=2000 audit.model=v3t5 out=audit.csv
"$specbench" tables coolsd_table1 --no-run --format md,latex,csv > tables.txt
"$specbench" report one/row.csv audit.csv runs=one out=report.html
"$uv" pip install --quiet --python "$work/env/bin/python" --no-deps "$root/docs/plugin_example"
"$specbench" run method=copy_softened n=1 warmup=0 baseline=false metrics=contrast out=plugin
grep -q "specbench-example 0.1.0:" plugin/row.csv
"$work/env/bin/python" -c 'import specbench; print(specbench.result("plugin").images[0], specbench.load().decode("a red circle", "sjd").steps)'
! "$specbench" run method=nothing 2> mistake.txt
[ "$(wc -l < mistake.txt)" = 1 ]
for file in default/row.csv one/row.csv one/images/00001.png audit.csv report.html results/tables/coolsd_table1.tex; do [ -s "$file" ]; done
echo "$version: built, installed and used outside the checkout"
