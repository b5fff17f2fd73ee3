#!/bin/sh
# One call on a GPU machine without network, from the checkout's root (docs/gpu.md says when): what is not timed side by
# side, then what is timed, alone. Results are files in $OUT. COMMIT names the commit; .gpu/ may hold gpu_tiles.json and
# cache.tar.xz, Triton's compile cache, of an earlier call; .whl/ holds what scripts/gpu_wheels.sh made.
# Usage: scripts/gpu_call.sh first|last
set -u
part=$1
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1
export TRITON_CACHE_DIR=/tmp/triton_cache
export SPECBENCH_STORE=none
began=$(date +%s)
at() { echo "== $(($(date +%s) - began)) s: $*"; }

nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.max.sm --format=csv,noheader
python3 -m pip install -q --no-index --no-deps --no-compile --target /tmp/site .whl/*.whl
export PYTHONPATH="/tmp/site:$PWD"
mkdir -p "$TRITON_CACHE_DIR"
[ -f .gpu/cache.tar.xz ] && tar -xJf .gpu/cache.tar.xz -C "$TRITON_CACHE_DIR"
[ -f .gpu/gpu_tiles.json ] && cp .gpu/gpu_tiles.json "$OUT/"
at "ready, $(ls "$TRITON_CACHE_DIR" | wc -l) kernels in the cache"

audit() { # the arguments of one
    timeout 100 python3 -m specbench.cli audit audit.device=cuda "$@"
}

correctness() {
    timeout "$1" python3 scripts/check_gpu.py --stages 2 --patience 3 --out "$OUT/parity.jsonl" > /tmp/parity.log 2>&1 &
    timeout "$1" python3 scripts/check_gpu.py --stages 3 --patience 3 --out "$OUT/recording.jsonl" > /tmp/recording.log 2>&1 &
    timeout "$1" python3 -m pytest -m gpu -q -p no:cacheprovider -n 6 --timeout 90 --tb=short \
        -k "not make_gpu_pass" tests/test_gpu.py tests/test_kernel*.py > "$OUT/tests.log" 2>&1 &
    (
        audit method=sjd_pac audit.model=m4t24
        audit method=cool_sd delta=1.1 audit.model=v8t4
        audit method=eagle1 verification=traversal audit.model=v8t4
    ) > "$OUT/audits.log" 2>&1 &
    (
        audit method=cspd audit.model=d1t5
        audit method=eagle1 verification=traversal audit.model=llamagen_tiny cfg_scale=3
    ) > /tmp/audits2.log 2>&1 &
    wait
    cat /tmp/audits2.log >> "$OUT/audits.log"
    at "correctness"
    sed -n '/-- summary/,$p' /tmp/parity.log /tmp/recording.log
    tail -40 "$OUT/tests.log" | cut -c1-200
    grep -E "lossless|undecided|specbench:|Error" "$OUT/audits.log" | cut -c1-200 | tail -30
}

keep_cache() { # for a later call; without what only a developer reads
    (cd "$TRITON_CACHE_DIR" && find . \( -name "*.cubin" -o -name "*.json" -o -name "*.so" \) | tar -cf - -T - | xz -1 -T4 > "$OUT/cache.tar.xz")
}

timed() { # stages and seconds
    python3 scripts/check_gpu.py --stages "$1" --seconds "$2" --out "$OUT/gpu_check.jsonl" 2>&1 | grep -v "^PASS  stage 1 " | cut -c1-220
    at "stages $1"
}

bench() { # the arguments of one line
    timeout 60 python3 -m specbench.cli bench weights=random device=cuda bench.steps=30 "$@" "out=$OUT/bench.csv" 2>&1 | tail -22
    at "bench $1 $2"
}

case $part in
first)
    correctness 120
    keep_cache
    timed 4,5 130
    timed 6 110
    ;;
last)
    correctness 110
    timed 4,7 170
    bench model=llamagen_xl method=vanilla engine=triton bench.images=1
    bench model=llamagen_xl method=eagle1 engine=triton forced_accept=2.76 bench.images=1 bench.nodes=1,26
    bench model=mar_l method=cspd criterion=exact gamma=8 engine=graph dtype=bfloat16 batch=8
    ;;
esac
at "end"
