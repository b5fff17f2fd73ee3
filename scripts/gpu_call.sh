#!/bin/sh
# One call on a GPU machine without network, from the checkout's root (docs/gpu.md says when). Results are files in $OUT.
# SPECBENCH_COMMIT names the commit. .whl/ holds what scripts/gpu_wheels.sh made; .gpu/cache.tar.xz may hold Triton's
# compile cache of an earlier call of the same commit.
# Usage: scripts/gpu_call.sh PART...
#
# compile, gates, speed  see scripts/check_gpu.py
# tests    the tests for a device
# audits   audits on the device
# images   whole images of the embedded model
# bench    a benchmark of LlamaGen-XL with the parts of a step; where it was, if it did not end
# cache    Triton's compile cache, for a later call
set -u
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1
work=${TMPDIR:-/tmp}
export TRITON_CACHE_DIR=$work/triton_cache SPECBENCH_HOME=$OUT/home
export GIT_DIR=/nonexistent # the copy may have the repository of another commit
began=$(date +%s)
at() { echo "== $(($(date +%s) - began)) s: $*"; }
specbench() { timeout "$seconds" python3 -m specbench.cli "$@"; }

nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.max.sm --format=csv,noheader
python3 -m pip install -q --no-index --no-deps --no-compile --target "$work/site" .whl/*.whl
export PYTHONPATH="$work/site:$PWD"
mkdir -p "$TRITON_CACHE_DIR" "$SPECBENCH_HOME/tiles"
[ -f .gpu/cache.tar.xz ] && tar -xJf .gpu/cache.tar.xz -C "$TRITON_CACHE_DIR"
# the tiles that an earlier call tuned; on another device they are not used
tiles=$(python3 -c "import torch; from specbench.storage import home; print(home.tiles_file(torch.cuda.get_device_name()))")
cp results/gpu/gpu_tiles.json "$tiles"
at ready

rows() { # file, then the files whose rows it gets
    file=$1
    shift
    for row in "$@"; do
        [ -f "$row" ] || continue
        if [ -s "$file" ]; then tail -n +2 "$row"; else cat "$row"; fi >> "$file"
    done
}

tests() {
    timeout "$seconds" python3 -m pytest -m gpu -q -p no:cacheprovider -n 8 --timeout 90 --tb=short tests/engine/test_gpu.py \
        tests/engine/test_kernel*.py > "$OUT/tests.log" 2>&1
    tail -12 "$OUT/tests.log" | cut -c1-150
}

audits() {
    n=0
    mkdir -p "$work/audits"
    while read -r words; do
        n=$((n + 1))
        specbench audit audit.device=cuda $words "out=$work/audits/$n.csv" < /dev/null > "$OUT/audit$n.log" 2>&1 &
    done << 'LINES'
method=sjd_pac audit.model=m4t24
method=cool_sd delta=1.1 audit.model=v8t4
method=eagle1 verification=traversal audit.model=v8t4
method=eagle1 verification=traversal audit.model=llamagen_tiny cfg_scale=3
method=cspd audit.model=d1t5
LINES
    wait
    rows "$OUT/audits.csv" "$work"/audits/*.csv
}

images() {
    specbench run --multirun method=vanilla,sjd,sjd_pac,scd,eagle1,cool_sd engine=triton device=cuda n=64 metrics=none \
        "out=$work/images" > "$OUT/images.log" 2>&1
    rows "$OUT/images.csv" "$work"/images/method=*/row.csv
}

bench() {
    PYTHONFAULTHANDLER=1 timeout -s ABRT "$seconds" python3 -m specbench.cli bench weights=random device=cuda engine=triton \
        model=llamagen_xl method=eagle1 forced_accept=2.76 bench.steps=30 bench.images=1 bench.nodes=1,26 \
        "out=$OUT/bench.csv" > "$OUT/bench.log" 2>&1
}

check() {
    timeout "$seconds" python3 scripts/check_gpu.py "$1" "--out=$OUT/checks.csv" 2>&1 | cut -c1-200
}

for part in "$@"; do
    case $part in
    compile | gates | speed) seconds=120 && check "$part" ;;
    tests) seconds=150 && tests ;;
    audits) seconds=90 && audits ;;
    images | bench) seconds=110 && $part ;;
    cache) tar -cJf "$OUT/cache.tar.xz" -C "$TRITON_CACHE_DIR" . ;;
    *) echo "no such part: $part" >&2 && exit 2 ;;
    esac
    at "$part"
done
