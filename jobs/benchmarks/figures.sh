#!/usr/bin/env bash
# Measures the tables of PERFORMANCE.md and NOTEBOOK.md (jobs/pages) on this machine's GPU, section by section.
#
#   jobs/benchmarks/figures.sh OUT SECTION...        OUT gets a file of JSON lines a section, profiles and jobs
#
# long short small   decode tok/s of dummy shapes            opt     each option of the engine turned off
# floor              the same at low acceptance rates (HEADS and DATA too, see below)
# lengths window     round time by K; by K and window        job     192 prompts of 8K with lognormal outputs, Parquet to Parquet
# moe                gpt-oss and Qwen3-30B-A3B (SHAPES)      fp8     Llama-8B in FP8, with K/V in bf16 and in FP8
# one_row            gpt-oss-120b, one row: round time by K in parallel and as a chain
# ranks              2 GPUs: gpt-oss-120b, 64, 256, 512 rows in all: a copy with half of them, one cut over both, what plan takes
# replicas           38,000 short rows of an 8B on one GPU and on all (ROWS), Parquet to Parquet
# Of SmolLM2-135M, with HEADS=folder (eagle3/, parallel/: jobs/examples/train_head.sh) and DATA=folder (gsm8k_test, gsm8k_train,
# specbench .parquet: one user turn per row in the column `prompt`; the last without the questions that are of GSM8K):
# gsm8k              the test questions, with and without a head    drafters  acceptance of every drafter
# rows               K = 3..8 at 1, 2, 4, 8 rows                    draws     by temperature, with and without coupled drafts
# quantised          SmolLM2 made a MoE, FP8 and MXFP4: KL divergence, acceptance of the head
set -euo pipefail
out=${1:?OUT SECTION..., such as out/figures long; the sections are listed at the top of this file}
shift
for section in "${@:?SECTION..., such as long short; they are listed at the top of this file}"; do
    grep -q "^figure_$section()" "$0" || { echo "$0: no section $section; they are listed at the top of this file" >&2; exit 2; }
done
mkdir -p "$out"
python=${PYTHON:-python} model=${MODEL:-smollm2-135m}
rates=.6,.28,.12 long_rates=.6,.28,.12,.05,.02

bench() { "$python" -m batchspec.cli bench "$out/$section.jsonl" "$@"; }
dummy() { bench "$1" --shape "$1" --accept "$rates" "${@:2}"; }
real() { # NAME FILE: prompts of DATA as chats, to the model's own ends
    bench "$1" --model "$model" --input "$DATA/$2.parquet" --chat --eos --gen 256 "${@:3}"
}
run() { "$python" -m batchspec.run output.dir="$out/$1" "${@:2}"; }

figure_long() {
    dummy llama8b --batch 64 --prompt 8192 --gen 512 --draft none eagle3 --k auto --runs 3 --profile "$out/long.txt"
    for window in 512 1024; do
        dummy llama8b --batch 64 --prompt 8192 --gen 512 --draft none eagle3 --k auto --window "$window" --sink 4 --runs 3
    done
    rates=$long_rates dummy llama8b --batch 64 --prompt 8192 --gen 512 --draft parallel --k 5 auto --window 512 --sink 4
    dummy llama8b --batch 64 --prompt 8192 --gen 512 --samples 8 --draft none --opt sharing=false
}
figure_short() {
    dummy llama8b --batch 256 --prompt 1024 --gen 512 --draft none eagle3 --k auto --runs 3
    dummy llama1b --batch 256 --prompt 1024 --gen 512 --draft none eagle3 --k auto --runs 3
}
figure_small() { dummy smol135m --batch 256 --prompt 512 --gen 512 --draft none eagle3 --k auto --runs 3 --profile "$out/small.txt"; }
figure_floor() { # low acceptance rates: no slower than without drafts
    local rates=.1,.02,.01
    dummy llama8b --batch 64 --prompt 8192 --gen 512 --draft none eagle3 --k auto --runs 3
    dummy llama8b --batch 256 --prompt 1024 --gen 512 --draft none eagle3 --k auto --runs 3
    dummy smol135m --batch 256 --prompt 512 --gen 512 --draft none eagle3 --k auto --runs 3
    real floor gsm8k_test --batch 256 --draft none eagle3 lookup tree hybrid --k auto --draft-path "$HEADS/eagle3" --nodes 16 \
        --topk 4 --runs 3
    real floor gsm8k_test --batch 256 --draft none window --k auto --window 128 --sink 4 --runs 3
}
figure_opt() {
    local general=(dead_positions=false uniform_slots=false argmax=false)
    dummy llama8b --batch 64 --prompt 8192 --gen 3072 --requests 96 --draft eagle3 --k 3 --opt "${general[@]}" dead_rows=false
    dummy llama8b --batch 64 --prompt 8448 --rounds 20 --draft eagle3 --k 3 --opt "${general[@]}" --profile "$out/opt.txt"
    dummy llama8b --batch 1 --prompt 8192 --gen 256 --draft eagle3 --k 3 --opt argmax=false --runs 3
}
figure_moe() {
    for shape in ${SHAPES:-gpt-oss-20b gpt-oss-120b qwen3-30b-a3b qwen3-30b-a3b-fp8}; do
        dummy "$shape" --batch 256 --prompt 1024 --gen 512 --draft none eagle3 --k auto --profile "$out/$shape.txt"
        dummy "$shape" --batch 64 --prompt 8192 --gen 512 --draft none eagle3 --k auto
    done
}
figure_fp8() {
    for kv in auto fp8; do
        dummy llama8b-fp8 --kv "$kv" --batch 256 --prompt 1024 --gen 512 --draft none eagle3 --k auto
        dummy llama8b-fp8 --kv "$kv" --batch 64 --prompt 8192 --gen 512 --draft none eagle3 --k auto
    done
    dummy llama8b --batch 64 --prompt 8192 --gen 1 --draft none # its prefill beside that of FP8
}
figure_one_row() {
    rates=.6,.5,.4,.3,.25,.2,.15,.1 dummy gpt-oss-120b --batch 1 --prompt 4096 --rounds 200 --draft none parallel eagle3 --k 3 4 5 6 7 8
}
figure_ranks() {
    local rows folder
    for rows in 64 256 512; do
        folder=$out/ranks-$rows
        dummy gpt-oss-120b --batch $((rows / 2)) --prompt 1024 --gen 256 --draft none
        dummy gpt-oss-120b --batch "$rows" --prompt 1024 --gen 256 --draft none --tensor-parallel 2
        [ -e "$folder" ] || bench --make-job "$folder" --shape gpt-oss-120b --requests "$rows" --prompt 1024 --gen 256 > /dev/null
        "$python" -m batchspec.cli plan model.path="$folder/model" model.load_format=dummy input.path="$folder/known.parquet" \
            draft=none decode=greedy decode.max_new_tokens=256 decode.ignore_eos=true | sed -n '/^GPUs/,$p'
    done
    "$python" - "$out/$section.jsonl" <<'PYTHON'
import json
import sys

lines = [json.loads(line) for line in open(sys.argv[1])]
for copy, cut in zip(lines[-6::2], lines[-5::2], strict=True):
    print(f"{cut['batch']} rows: two copies {2 * copy['decode_tok_s']:,.0f} tok/s, cut over two {cut['decode_tok_s']:,.0f}")
PYTHON
}
figure_replicas() { # prompts and outputs as long as those of GSM8K
    local folder=$out/replicas-input
    [ -e "$folder" ] || bench --make-job "$folder" --shape llama8b --requests 1 --prompt 1 --gen 32 > /dev/null
    "$python" - "$folder/short.parquet" "${ROWS:-38000}" <<'PYTHON'
import sys
import numpy as np
import polars as pl

chance, rows = np.random.default_rng(0), int(sys.argv[2])
prompts = [chance.integers(10, 30000, size).tolist() for size in chance.integers(60, 180, rows)]
outputs = chance.lognormal(4.8, 0.45, rows).clip(32, 384).astype(int)
pl.DataFrame({"id": [f"q{i}" for i in range(rows)], "prompt_ids": prompts, "max_new_tokens": outputs}).write_parquet(sys.argv[1])
PYTHON
    for workers in 1 auto; do
        rm -rf "$out/replicas-$workers"
        run "replicas-$workers" model.path="$folder/model" model.load_format=dummy model.max_len=1024 decode=greedy draft=none \
            decode.ignore_eos=true decode.max_new_tokens=384 input.path="$folder/short.parquet" output.messages=none \
            cluster.workers="$workers"
    done
    "$python" - "$out" <<'PYTHON'
import json
import sys
from pathlib import Path

longest = {}
for workers in ("1", "auto"):
    logs = [json.loads(log.read_text()) for log in Path(sys.argv[1], f"replicas-{workers}/_batchspec/logs").glob("run-*[0-9a-f].json")]
    longest[workers] = max(log["seconds"] for log in logs)
    print(f"{len(logs)} GPUs: {longest[workers]:.1f} s from the first row to the last commit, {sum(log['tokens'] for log in logs):,} tokens")
print(f"{longest['1'] / longest['auto']:.2f} times as fast")
PYTHON
}
upcycled() { # in a checkout: tests.heads.upcycle makes the models
    [ -e "$out/made" ] || "$python" -m tests.heads.upcycle make "$model" "$out/made"
}
figure_quantised() {
    local data=$DATA/gsm8k_test.parquet head=(--draft-path "$HEADS/eagle3") name other
    upcycled
    real dense gsm8k_test --batch 256 --draft none eagle3 --k 3 "${head[@]}" --runs 3
    for name in fp8_block fp8_channel moe moe_fp8_block moe_fp8_channel gpt_oss_mxfp4; do
        other=$model
        [ "$name" != gpt_oss_mxfp4 ] || other=$out/made/gpt_oss
        echo "$name: $("$python" -m tests.heads.upcycle compare "$other" "$out/made/$name" "$data" --rows 256 --tokens 128 --chat | tail -1)"
        model=$out/made/$name real "$name" gsm8k_test --batch 256 --draft none eagle3 --k 3 "${head[@]}" --runs 3
    done
}
figure_lengths() {
    dummy llama8b --batch 64 --prompt 8448 --rounds 30 --draft none eagle3 parallel --k 0 1 2 3 4 5 6 7 8
    dummy smol135m --batch 256 --prompt 768 --rounds 100 --draft none eagle3 parallel --k 0 1 2 3 4 5 6 7 8
    dummy smol135m --batch 1 --prompt 768 --rounds 200 --draft none eagle3 parallel --k 3 4 5 6 7 8
}
figure_window() {
    for window in 512 1024 2048; do
        dummy llama8b --batch 64 --prompt 8192 --rounds 20 --draft none window --k 1 2 3 4 6 --window "$window" --sink 4
        dummy llama8b --batch 32 --prompt 16384 --rounds 20 --draft none window --k 1 2 3 4 6 --window "$window" --sink 4
    done
}
figure_job() {
    local folder=$out/job8b common
    common=(draft=eagle3 draft.num_speculative_tokens=3 "draft.synthetic=[$rates]" draft.window=512 draft.sink_tokens=4 model.load_format=dummy)
    [ -e "$folder" ] || bench --make-job "$folder" --shape llama8b --prompt 8192 --gen 3072
    for lengths in known hidden; do
        run "job-$lengths${SLOTS:+-$SLOTS}" +job=reasoning_8k model.path="$folder/model" model.max_len=11264 decode=greedy \
            decode.ignore_eos=true decode.max_new_tokens=3072 input.path="$folder/$lengths.parquet" "${common[@]}" \
            ${SLOTS:+packing.max_num_seqs=$SLOTS}
    done
}
figure_gsm8k() { real gsm8k gsm8k_test --batch 1024 --draft none eagle3 --k 3 5 auto --draft-path "$HEADS/eagle3" --runs 3; }
figure_drafters() {
    for data in gsm8k_test specbench; do
        real "$data" "$data" --batch 256 --draft lookup eagle3 tree hybrid --k 3 5 --draft-path "$HEADS/eagle3" --nodes 16 --topk 4
        real "$data" "$data" --batch 256 --draft parallel --k 3 5 --draft-path "$HEADS/parallel"
        real "$data" "$data" --batch 256 --draft window --k 3 5 --window 128 --sink 4
    done
}
figure_rows() {
    for batch in 1 2 4 8; do
        for head in eagle3 parallel; do
            real "rows-$batch" gsm8k_test --batch "$batch" --requests 64 --draft "$head" --k 3 4 5 6 7 8 --draft-path "$HEADS/$head"
        done
    done
}
figure_draws() {
    real draws gsm8k_test --batch 256 --draft eagle3 --k 3 5 --temperature 0 0.6 1 --opt coupled=false --draft-path "$HEADS/eagle3"
}

for section in "$@"; do
    "figure_$section"
done
