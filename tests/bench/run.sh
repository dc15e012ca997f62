#!/usr/bin/env bash
# Every benchmark, one after the other: tables on the terminal, JSON under bench-results/.
# usage: run.sh   (by `make bench`, which sets BENCH_PYTHON: the environment that has the peers)
set -euo pipefail
cd "$(dirname "$0")/../.."
out=bench-results
ours=.venv/bin/python
peers=${BENCH_PYTHON:?set by make bench}
mkdir -p "$out"
model=$("$ours" -m ropeway model fetch smollm2 --json | "$ours" -c 'import json, sys; print(json.load(sys.stdin)["directory"])')

echo "== edge: CPU per request beside the published routers"
"$ours" tests/bench/bench_edge.py --tokenizer "$model" --peers-python "$peers" --json "$out/edge.json"
echo "== edge: small requests while very long prompts flow"
"$ours" tests/bench/bench_long_prompts.py --tokenizer "$model" --json "$out/long_prompts.json"
echo "== index: beside Dynamo's RadixTree, in one process"
PYTHONPATH=. DYN_LOG=error "$peers" tests/bench/bench_index.py --json "$out/index.json"
echo "== shared index: lookups and ingest on a server"
PYTHONPATH=. "$ours" tests/bench/bench_shared_index.py --json "$out/shared_index.json"
echo "== shared index: propagation, hand-over, hits and siblings among gateways"
PYTHONPATH=. "$ours" tests/bench/bench_shared.py --json "$out/shared.json"
echo "== shared index: a gateway that starts beside a million blocks"
PYTHONPATH=. "$ours" tests/bench/bench_shared_start.py --json "$out/shared_start.json"
echo "== shared index: a day of churn in miniature"
PYTHONPATH=. "$ours" tests/bench/bench_shared_churn.py --json "$out/shared_churn.json"
echo "== notes among gateways"
PYTHONPATH=. "$ours" tests/bench/bench_notes.py --json "$out/notes.json"
echo "== hashing"
PYTHONPATH=. "$ours" tests/bench/bench_hashing.py --json "$out/hashing.json"
echo "== prompts: rendering, tokenizing, naming"
PYTHONPATH=. "$ours" tests/bench/bench_prompts.py --tokenizer "$model" --json "$out/prompts.json"
echo "== policies: time per decision"
PYTHONPATH=. "$ours" tests/bench/bench_policies.py --json "$out/policies.json"
echo "== admission: a flood beside a quiet tenant, and three times too much of all"
PYTHONPATH=. "$ours" tests/bench/bench_admission.py --json "$out/admission.json"
echo "== reference worker: time to first token, cold and on a full prefix hit"
PYTHONPATH=. "$ours" tests/bench/bench_reference.py --model "$model" --json "$out/reference.json"
