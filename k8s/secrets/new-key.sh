#!/usr/bin/env bash
# new-key.sh NAME: adds an API key for NAME to the file `keys`, which keeps its hash only, and prints the key, once.
# The first call also makes the secrets that nobody needs to know: of the streams, of Redis, and a key for Prometheus.
set -euo pipefail
name=${1:?name whom the key is for, for example: new-key.sh alice}
cd "$(dirname "${BASH_SOURCE[0]}")"
umask 077

random() { od -An -N32 -v -tx1 /dev/urandom | tr -d ' \n'; }
add() { printf '# %s\nsha256:%s\n' "$1" "$(printf %s "$2" | sha256sum | cut -c1-64)" >>keys; }

for file in stream-secret redis-password; do
  [[ -e $file ]] || random >"$file"
done
if [[ ! -e metrics-key ]]; then
  random >metrics-key
  add "Prometheus" "$(<metrics-key)"
fi
key=sk-$(random)
add "$name" "$key"
echo "$key"
