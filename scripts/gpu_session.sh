#!/usr/bin/env bash
# One step of a session on a lent GPU machine, each under ten minutes: what is proven and measured there.
#   scripts/gpu_session.sh STEP OUT        as COMMIT=$(git describe --always --dirty) on a copy of the checkout
# STEP, in the order of worth, with what each is expected to take on an H200:
#   tests     `make test-gpu`: one process, a random order (ORDER=--order-seed=N repeats one)    6-9 min
#   forms     `make test-gpu-long`: every adapter's form as a compiled graph computes it         6-8 min
#   steps     rows lora, automagic, lora-45gib of `bench suite`, with the baseline               4-5 min
#   others    rows lokr, lora-fp8                                                                4-5 min
#   video     row video                                                                          8 min
#   families  rows of flux, qwen, sdxl, with the baseline, gradients and all samples             6-9 min
#   whole     whole runs with every memory mechanism, each beside its plain twin                 4-5 min
#   flux      stock diffusers' FLUX gradients, attention kernel by kernel                        1 min
#   switch    what a switch between two streamed experts costs                                   2-3 min
#   pace      train_1b's pace beside a plain loop                                                2 min
#   parts     bench cache, memory, optim                                                         4 min
#   learning  train_1b's resumed run beside the curves of numerics.py (no times are read here)   6 min
#   blocks    other ways of computing a block's adapters: what to build next                     6 min
#   full      full fine-tunes with resident and streamed optimizer state                         4-5 min
# SMOKE=1 runs the same commands on tiny models, on a CPU too: does everything start, end and write its file?
# Every result is a file in OUT as soon as it has a row, beside OUT/STEP.log. What runs too long is ended by SIGKILL:
# a SIGTERM would also end torch's compile workers, and the next compile would wait for them for ever.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

step=${1:-} out=${2:-} smoke=${SMOKE:-}
case $step in
    tests | forms | steps | others | video | families | whole | flux | switch | pace | parts | learning | blocks | full) ;;
    *) out="" ;;
esac
if [ -z "$out" ]; then
    echo "usage: $0 STEP OUT, where STEP is tests, forms, steps, others, video, families, whole, flux, switch, pace, parts, learning, blocks or full" >&2
    exit 2
fi
mkdir -p "$out" build
out=$(realpath "$out")
# Results say how they were made: through this link their commands name no folder of this machine.
ln -sfn "$out" build/session
python=${PYTHON:-python3}

export PYTHONPATH=$PWD/src PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
# Where COMMIT is given, the copy's own .git (if there is one) is of another commit. It stays: the machine may need it.
[ -z "${COMMIT:-}" ] || export GIT_DIR=/nonexistent
if ! "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("diffusers") is None)'; then
    if [ ! -d build/bundle ]; then # whole or not at all; scripts/offline_bundle.sh makes it
        mkdir -p build/unpacking
        tar -xf .carry/bundle.tar.xz -C build/unpacking
        mv build/unpacking build/bundle
    fi
    PYTHONPATH+=:$PWD/build/bundle
fi
ls src/gracetune/memory/native/*.so >/dev/null 2>&1 || "$python" setup.py -q build_ext --inplace

limited() { # SECONDS COMMAND...: its end is noted, and whatever it is, the next command runs
    local began=$SECONDS code=0
    timeout -s KILL "$1" "${@:2}" >>"$out/$step.log" 2>&1 || code=$?
    echo "exit $code after $((SECONDS - began)) s: ${*:5}" | tee -a "$out/$step.log"
}
# Ends without Python's last rites: in them torch 2.11 has waited five minutes for a compile worker that did not end.
at_once='import os, runpy, sys, traceback
code, sys.argv = 1, sys.argv[1:]
try:
    (runpy.run_path if sys.argv[0].endswith(".py") else runpy.run_module)(sys.argv[0], run_name="__main__")
    code = 0
except SystemExit as end:
    code = end.code
except BaseException:
    traceback.print_exc()
sys.stdout.flush()
sys.stderr.flush()
os._exit(code if isinstance(code, int) else int(code is not None))'
bench() { limited "$1" "$python" -c "$at_once" gracetune.cli.main bench "${@:2}"; }
tested() { # MARKS: as `make test-gpu` does, into OUT; results of earlier sessions are merged
    [ -n "$smoke" ] || cp -n benchmarks/results/gpu-tests-*.json "$out" 2>/dev/null || true
    limited 535 "$python" -c "$at_once" pytest tests/gpu -m "$1" -s -q -rfE -p no:cacheprovider --durations=10 \
        --timeout=180 --timeout-method=thread --gpu-results build/session "${only_collect[@]}" ${ORDER:+"$ORDER"}
}
script() { limited "$1" "$python" -c "$at_once" "benchmarks/$2" "${@:3}"; }

suite=(suite) small_train=() small_curves=(--seeds 3) small_blocks=() small=() only_collect=()
if [ -n "$smoke" ]; then
    suite+=(--smoke)
    small_train=(--layers 2 --heads 1 --ffn 64 --images 4 --side 64 --batch 2 --steps 6 --timed-steps 20)
    small_curves=(--seeds 2 --steps 60)
    small_blocks=(--smoke --samples 3)
    small=(--smoke)
    only_collect=(--collect-only)
fi

case $step in
    tests)
        tested 'gpu and not full'
        ;;
    forms) tested 'gpu and full' ;;
    steps)
        bench 535 "${suite[@]}" --only lora --only automagic --only lora-45gib --output build/session/steps-h200.json
        ;;
    others) bench 535 "${suite[@]}" --only lokr --only lora-fp8 --output build/session/steps-others-h200.json ;;
    video) bench 550 "${suite[@]}" --only video --output build/session/steps-video-h200.json ;;
    families)
        for name in flux qwen sdxl; do
            bench 188 "$name" --baseline --output "build/session/steps-$name-h200.json" "${small[@]}"
        done
        ;;
    whole) script 560 whole_runs.py --output build/session/whole-runs-h200.json "${small[@]}" ;;
    flux) script 120 flux_gradients.py --output build/session/flux-gradients-h200.json "${small[@]}" ;;
    switch) script 240 expert_switch.py --output build/session/expert-switch-h200.json "${small[@]}" ;;
    full) script 280 full_finetune.py --output build/session/full-finetune-h200.json "${small[@]}" ;;
    pace) script 180 train_1b.py --only pace --output build/session/train-1b-pace-h200.json "${small_train[@]}" ;;
    parts)
        bench 220 cache --output build/session/cache-h200.json
        bench 90 memory --output build/session/memory-h200.json
        bench 50 optim --output build/session/optim-h200.json
        ;;
    learning)
        script 500 train_1b.py --only resume --output build/session/train-1b-h200.json "${small_train[@]}" &
        script 270 numerics.py --bench wan14b --adapter lora --precision fp8 "${small_curves[@]}" \
            --output build/session/numerics-fp8-h200.json
        script 260 numerics.py --bench wan14b --curve-adapter lora --curve-adapter lokr "${small_curves[@]}" \
            --output build/session/numerics-h200.json
        wait
        ;;
    blocks) script 535 block_variants.py --output build/session/block-variants-h200.json "${small_blocks[@]}" ;;
esac

"$python" - "$out" "${COMMIT:-}" <<'PY' | tee -a "$out/$step.log"
import json, sys
from pathlib import Path

folder, commit = Path(sys.argv[1]), sys.argv[2]
for path in sorted(folder.glob("*.json")):
    text = path.read_text()
    if str(folder) in text or str(Path.cwd()) in text:
        print(f"{path.name} names a folder of this machine: take it out before it is committed")
    result = json.loads(text)
    for one in (result, *result.get("rows", ())):
        if commit and one.get("git_commit", "") is None:
            one["git_commit"] = commit
    path.write_text(json.dumps(result, indent=2) + "\n")
    if "tests" in result:
        print(f"{path.stem}: {result['passed']} passed, {result['failed']} failed, {result['skipped']} skipped; seeds {result['seeds']}")
    for row in result.get("rows", ()):
        mark = {True: "ok", False: "MISS", None: ""}[row.get("ok")]
        if "ms_per_step" in row:
            value = f"{row['ms_per_step']:.1f} ms, {row['ratio']}x, {row['peak_gib']} GiB ({row['estimated_peak_gib']})"
        else:
            value = f"{row['value']:.4g} {row['unit']}"
        print(f"{path.stem:<22} {row['name']:<28} {value:<50} {row.get('bar', ''):<16} {mark}".rstrip())
PY
if [ "$step" = tests ] || [ "$step" = forms ]; then tail -n 40 "$out/$step.log"; fi
