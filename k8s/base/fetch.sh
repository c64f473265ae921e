#!/usr/bin/env bash
# fetch.sh LIST: gets every model of LIST into the volume, then marks the list as complete. What is there already is kept.
set -euo pipefail
list=$1
while read -r model || [[ -n $model ]]; do
  case $model in
    '' | '#'*) ;;
    */*)  # a Hugging Face id: the files that Outrider reads, no others
      hf download "$model" \
        --include '*.json' --include '*.txt' --include '*.model' --include '*.jinja' --include '*.tiktoken' \
        --include '*.safetensors' --exclude '*/*' --exclude 'consolidated*'
      ;;
    *) outrider fetch "$model" ;;
  esac
done <"$list"
mkdir -p "$OUTRIDER_CACHE/complete"
touch "$OUTRIDER_CACHE/complete/$(sha256sum <"$list" | cut -c1-64)"
