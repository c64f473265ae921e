#!/usr/bin/env bash
# wait.sh LIST: waits until fetch.sh has marked this very list as complete, so that no half-loaded model is read.
set -euo pipefail
marker=$OUTRIDER_CACHE/complete/$(sha256sum <"$1" | cut -c1-64)
until [[ -e $marker ]]; do
  echo "waiting for the job outrider-fetch: $(tr '\n' ' ' <"$1")"
  sleep 10
done
