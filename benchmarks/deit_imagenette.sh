#!/usr/bin/env bash
# The DeiT-Tiny rows of the paper's Table 9: 10% of the heads, batch 8, five methods, five seeds.
#   benchmarks/deit_imagenette.sh MODEL IMAGENETTE OUT      then      python benchmarks/summary.py OUT
# Two runs at a time, one thread each. Killed and started again, it goes on.
set -euo pipefail
export MODEL=$1 DATA=$2 OUT=$3 OMP_NUM_THREADS=1
run() {
    local method=$1 seed=$2 pulls=64 # 256 pulls for four units; greedy takes 128
    [ "$method" = greedy ] && pulls=32
    .venv/bin/secateur prune "$MODEL" --calibration "$DATA" --ratio 0.10 --method "$method" --seed "$seed" \
        --pulls-per-step $pulls --batches-per-pull 1 --batch-size 8 -o "$OUT/$method-$seed" >"$OUT/$method-$seed.log" 2>&1
}
export -f run
mkdir -p "$OUT"
for seed in 1 2 3 42 123; do
    for method in ucb ts greedy magnitude random; do echo "$method $seed"; done
done | xargs -P 2 -L 1 bash -c 'run $0 $1'
