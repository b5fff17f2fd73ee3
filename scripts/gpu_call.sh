#!/bin/sh
# One call on a GPU machine without network, from the checkout's root (docs/gpu.md says when). Results are files in $OUT.
# SPECBENCH_COMMIT names the commit. .gpu/ may hold gpu_tiles.json of an earlier call, and cache.tar.xz, Triton's compile
# cache, of an earlier call or of scripts/gpu_cache.py; .whl/ holds what scripts/gpu_wheels.sh made.
# Usage: scripts/gpu_call.sh PART...
#
# correct  what is not timed, side by side: kernels, recordings, audits, the tests for a device
# gates    the gates and the most expensive kernels
# speed    a step of each method at the real sizes
# images   whole images of the embedded model
# bench    a benchmark of LlamaGen-XL with the parts of a step; where it was, if it did not end
set -u
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1
work=${TMPDIR:-/tmp}
export TRITON_CACHE_DIR=$work/triton_cache
export GIT_DIR=/nonexistent # the copy may have the repository of another commit
began=$(date +%s)
at() { echo "== $(($(date +%s) - began)) s: $*"; }

nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.max.sm --format=csv,noheader
python3 -m pip install -q --no-index --no-deps --no-compile --target "$work/site" .whl/*.whl
export PYTHONPATH="$work/site:$PWD"
mkdir -p "$TRITON_CACHE_DIR"
[ -f .gpu/cache.tar.xz ] && tar -xJf .gpu/cache.tar.xz -C "$TRITON_CACHE_DIR"
for known in .gpu/gpu_tiles.json results/gpu/gpu_tiles.json; do # tiles that an earlier call tuned
    [ -f "$known" ] || continue
    cp "$known" "$OUT/"
    tiles=$(python3 -c "import torch; from specbench.storage import home; print(home.tiles_file(torch.cuda.get_device_name()))")
    mkdir -p "$(dirname "$tiles")" && cp "$known" "$tiles"
    break
done
at "ready, $(ls "$TRITON_CACHE_DIR" | wc -l) kernels in the cache"

check() { # file, stages, seconds
    python3 scripts/check_gpu.py --out "$OUT/$1" --stages "$2" --seconds "$3"
}

audit() { # name of the file, then the arguments
    file=$1
    shift
    timeout "$seconds" python3 -m specbench.cli audit audit.device=cuda "$@" "out=$work/audits/$file.csv"
}

correct() { # seconds
    seconds=$1
    mkdir -p "$work/audits"
    check recording.jsonl 3 "$seconds" > $work/recording.log 2>&1 &
    check parity.jsonl 2 "$seconds" > $work/parity.log 2>&1 &
    timeout "$seconds" python3 -m pytest -m gpu -q -p no:cacheprovider -n 8 --timeout 90 --tb=short \
        -k "not make_gpu_pass" tests/test_gpu.py tests/test_kernel*.py > "$OUT/tests.log" 2>&1 &
    audit 1 method=sjd_pac audit.model=m4t24 > $work/audit1.log 2>&1 &
    audit 2 method=cool_sd delta=1.1 audit.model=v8t4 > $work/audit2.log 2>&1 &
    audit 3 method=eagle1 verification=traversal audit.model=v8t4 > $work/audit3.log 2>&1 &
    audit 4 method=eagle1 verification=traversal audit.model=llamagen_tiny cfg_scale=3 > $work/audit4.log 2>&1 &
    audit 5 method=cspd audit.model=d1t5 > $work/audit5.log 2>&1 &
    wait
    at "correct"
    tail -12 "$OUT/tests.log" | cut -c1-150
    sed -n '/-- summary/,$p' $work/parity.log $work/recording.log
    for n in 1 2 3 4 5; do
        tail -n +$((1 + (n > 1))) "$work/audits/$n.csv" >> "$OUT/audits.csv"
        tail -3 "$work/audit$n.log" | tr '\r' '\n' | tail -3 | cut -c1-200
    done
}

images() { # seconds
    timeout "$1" python3 -m specbench.cli run --multirun method=vanilla,sjd,sjd_pac,scd,eagle1,cool_sd engine=triton \
        device=cuda n=64 metrics=none out=$work/images > $work/images.log 2>&1
    for method in vanilla sjd sjd_pac scd eagle1 cool_sd; do
        row=$work/images/method=$method/row.csv
        [ -f "$row" ] || continue
        if [ -s "$OUT/images.csv" ]; then tail -n +2 "$row"; else cat "$row"; fi >> "$OUT/images.csv"
    done
    grep -E "latency  |speed-up  |specbench:" $work/images.log | cut -c1-120
    at "images"
}

bench() { # seconds
    PYTHONFAULTHANDLER=1 timeout -s ABRT "$1" python3 -m specbench.cli bench weights=random device=cuda engine=triton \
        model=llamagen_xl method=eagle1 forced_accept=2.76 bench.steps=30 bench.images=1 bench.nodes=1,26 \
        "out=$OUT/bench.csv" > "$OUT/bench.log" 2>&1
    grep -v "^Extension" "$OUT/bench.log" | tr '\r' '\n' | tail -24 | cut -c1-150
    at "bench"
}

timed() { # stages and seconds
    check gpu_check.jsonl "$1" "$2" 2>&1 | grep -E "^(PASS|FAIL|SKIP|stage|--)" | grep -v "^PASS  stage 1 " | cut -c1-200
    at "stages $1"
}

for part in "$@"; do
    case $part in
    correct) correct 150 ;;
    gates) timed 4,5 80 ;;
    speed) timed 6 100 ;;
    images) images 110 ;;
    bench) bench 100 ;;
    cache) # for a later call, without what only a developer reads
        (cd "$TRITON_CACHE_DIR" && find . \( -name "*.cubin" -o -name "*.json" -o -name "*.so" \) | tar -cf - -T -) |
            xz -6 -T8 > "$OUT/cache.tar.xz"
        ;;
    *) echo "no such part: $part" >&2 && exit 2 ;;
    esac
done
at "end"
