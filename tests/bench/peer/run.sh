#!/bin/sh
# Culet at level `power` and the peer, in turn, scenario by scenario; then their ratios.
#   REPS=3 ONLY=b,c,d,e,f,g,h,i,k,l tests/bench/peer/run.sh
set -eu
cd "$(dirname "$0")"
ROOT=$(cd ../../.. && pwd)
OUT=${OUT:-results.json}; REPS=${REPS:-3}; ONLY=${ONLY:-b,c,d,e,f,g,h,i,k,l}
PYCMD=${PYCMD:-"$ROOT/.venv/bin/python $ROOT/tests/bench/peer_server.py --port {port} --dir {dir}"}
if [ ! -f dist/latest/worker.js ]; then
  npm install --ignore-scripts --no-audit --no-fund --legacy-peer-deps --loglevel=error
  node build.mjs
fi
# An installed server is compiled, as the peer's is bundled: a restart pays for neither.
unset PYTHONDONTWRITEBYTECODE
"$ROOT/.venv/bin/python" -m compileall -q "$ROOT/kernel" "$ROOT/storage" "$ROOT/adapters" "$ROOT/web"
drive() { node driver.mjs --out "$OUT" --repeats "$REPS" --quiet "${QUIET:-2}" "$@"; }
for s in $(echo "$ONLY" | tr , ' '); do
  [ "${1:-pair}" = py ] || drive --target peer --only "$s"
  drive --label culet --cmd "$PYCMD" --only "$s"
done
node ratios.mjs "$OUT"
