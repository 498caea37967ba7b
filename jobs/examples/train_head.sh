#!/usr/bin/env bash
# A draft head for a chat model from nothing but the model: the model writes questions and texts and answers them, the head learns from that.
#
#   jobs/examples/train_head.sh MODEL WORK [draft=eagle3|parallel|block] [train overrides, such as train.steps=4000]
#
# Makes WORK/head, or WORK/head-block for draft=block and so on (HEAD=NAME: WORK/NAME), from one set of answers; the same command
# resumes it. Files of prompts of your own, one user turn per row in a column `prompt`, are answered too:
# PROMPTS='a.parquet b.parquet'. The sizes are for a small model on one GPU.
set -euo pipefail
model=${1:?MODEL WORK [overrides], such as smollm2-135m out/head} work=${2:?WORK: a folder for prompts, answers and the head}
shift 2
python=${PYTHON:-python}
turns=${TURNS:-22000} texts=${TEXTS:-16000} cap=${CAP:-288} # rows, rows, tokens of an answer: small models repeat themselves in long ones
kind=eagle3
for word in "$@"; do case $word in draft=*) kind=${word#draft=} ;; esac; done
shape=train.layers=2
case $kind in
eagle3) head=head ;;
block) head=head-block shape='train.layers=3 train.anchors=0.75' ;; # by FLOP a batch takes about as long as one of the other
*) head=head-$kind ;;
esac
mkdir -p "$work"

spec() { "$python" -m batchspec.cli "$@"; }
answer() { # NAME INPUT overrides: a job of the model; a finished job says so at once
    "$python" -m batchspec.run model.path="$model" draft=none output=training output.dir="$work/$1" input.path="$2" "${@:3}"
}
once() { [ -e "$1" ] || "${@:2}" "$1"; } # FILE command: makes FILE if it is missing

once "$work/openings.parquet" spec prompts --open "$model" --rows "$turns" --texts "$texts"
answer turns "$work/openings.parquet" decode.temperature=1 decode.max_new_tokens=384
once "$work/questions.parquet" spec prompts --from "$work/turns"
answer answers "$work/questions.parquet" decode.max_new_tokens="$cap"
data="$work/answers"
for file in ${PROMPTS:-}; do
    name=$(basename "$file" .parquet)
    answer "$name" "$file" input.chat=true decode.max_new_tokens="$cap" decode.temperature=0.6 decode.n=3
    data+=",$work/$name"
done
spec train draft="$kind" model.path="$model" "input.path=[$data]" output.dir="$work/${HEAD:-$head}" \
    $shape train.draft_vocab=16384 train.epochs=6 "$@"
