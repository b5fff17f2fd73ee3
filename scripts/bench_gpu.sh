#!/bin/sh
# What the benchmarks of one GPU consist of, with random weights at real sizes; rows and rooflines go to results/bench/.
# The first argument is the command (default: .venv/bin/specbench), the second the folder, the third the engines. Fails
# when a line fails.
set -eu
specbench=${1:-.venv/bin/specbench}
folder=${2:-results/bench}
engines=${3:-eager graph compiled triton}
mkdir -p "$folder"

bench() { # file of rows, then the arguments of one line
    out=$folder/$1.csv
    shift
    "$specbench" bench weights=random device=cuda bench.steps=50 "$@" "out=$out"
}

for engine in $engines; do
    # LlamaGen-XL: vanilla, Cool-SD on a chain of 5 and EAGLE's tree of 26 nodes, at the published accepted length
    bench llamagen_xl model=llamagen_xl engine=$engine method=vanilla bench.images=3
    bench llamagen_xl model=llamagen_xl engine=$engine method=cool_sd drafter=eagle window=5 forced_accept=2.73 bench.images=3
    bench llamagen_xl model=llamagen_xl engine=$engine method=cool_sd forced_accept=2.73 bench.images=3
    bench llamagen_xl model=llamagen_xl engine=$engine method=eagle1 forced_accept=2.73 bench.nodes=1,26
    bench llamagen_xl model=llamagen_xl engine=$engine method=vanilla batch=8
    # 7B at 2,400 positions: vanilla, EAGLE, SJD and SJD-PAC at the published accepted lengths
    bench lumina_mgpt model=lumina_mgpt engine=$engine method=vanilla bench.context=2400 bench.nodes=1,33,65
    bench lumina_mgpt model=lumina_mgpt engine=$engine method=eagle1 forced_accept=2.76 bench.context=2400 bench.nodes=1,26
    bench lumina_mgpt model=lumina_mgpt engine=$engine method=sjd window=64 forced_accept=2.22 bench.context=2400 bench.nodes=1,33,65
    bench lumina_mgpt model=lumina_mgpt engine=$engine method=sjd_pac window=64 forced_accept=4.51 bench.context=2400 bench.nodes=1,33,65
    # Emu3 at 4,100 positions
    bench emu3 model=emu3 engine=$engine method=vanilla bench.context=4100 bench.images=0
done
# MAR-L in both number formats: the diffusion head at batch 8, and a batch of CSpD (of the criteria that let a pass go on
# without the host)
for engine in $engines; do
    case $engine in eager | graph) ;; *) continue ;; esac
    for dtype in float32 bfloat16; do
        bench mar_l model=mar_l engine=$engine dtype=$dtype method=vanilla batch=8
        bench mar_l model=mar_l engine=$engine dtype=$dtype method=cspd criterion=exact gamma=8 batch=8
    done
done
