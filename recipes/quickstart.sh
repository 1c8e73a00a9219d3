#!/bin/sh
# A head for a model in three commands: the model's own answers, the training, the measuring. Under 20 minutes on two
# cores with the demo target.
#
#   recipes/quickstart.sh [TARGET [PROMPTS [OUT]]]      with eyas on the path: PATH=.venv/bin:$PATH after `make setup`
set -eu
here=$(dirname "$0")
target=${1:-smollm2} prompts=${2:-$here/prompts.jsonl} out=${3:-runs/quickstart}

eyas prepare --target "$target" --prompts "$prompts" --limit 200 --max-new-tokens 128 --out "$out/answers"
eyas train --target "$target" --answers "$out/answers" --features "$out/states" --out "$out/head" \
    --recipe "$here/quickstart.toml"
eyas bench --target "$target" --workload mt_bench --limit 8 --max-new-tokens 64 --method "$out/head"
