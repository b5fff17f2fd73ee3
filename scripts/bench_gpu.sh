#!/bin/sh
# What the benchmarks of one GPU consist of, with random weights at real sizes, at the published accepted lengths; rows and
# rooflines go to results/bench/. The first argument is the command (default: .venv/bin/specbench), the second the folder,
# the third the engines. Fails when a line fails.
set -eu
specbench=${1:-.venv/bin/specbench}
folder=${2:-results/bench}
mkdir -p "$folder"

bench() { # engine; the lines are of the input
    while read -r model words; do
        "$specbench" bench weights=random device=cuda bench.steps=50 engine="$1" model="$model" $words "out=$folder/$model.csv" < /dev/null
    done
}

for engine in ${3:-eager graph triton}; do
    bench "$engine" << 'LINES'
llamagen_xl method=vanilla bench.images=3
llamagen_xl method=cool_sd drafter=eagle window=5 forced_accept=2.73 bench.images=3
llamagen_xl method=cool_sd forced_accept=2.73 bench.images=3
llamagen_xl method=eagle1 forced_accept=2.73 bench.nodes=1,26
llamagen_xl method=vanilla batch=8
lumina_mgpt method=vanilla bench.context=2400 bench.nodes=1,33,65
lumina_mgpt method=eagle1 forced_accept=2.76 bench.context=2400 bench.nodes=1,26
lumina_mgpt method=sjd window=64 forced_accept=2.22 bench.context=2400 bench.nodes=1,33,65
lumina_mgpt method=sjd_pac window=64 forced_accept=4.51 bench.context=2400 bench.nodes=1,33,65
emu3 method=vanilla bench.context=4100 bench.images=0
LINES
    # a batch of CSpD with a criterion that lets a pass go on without the host
    case $engine in eager | graph) bench "$engine" << 'LINES' ;; esac
mar_l dtype=float32 method=vanilla batch=8
mar_l dtype=float32 method=cspd criterion=exact gamma=8 batch=8
mar_l dtype=bfloat16 method=vanilla batch=8
mar_l dtype=bfloat16 method=cspd criterion=exact gamma=8 batch=8
LINES
done
