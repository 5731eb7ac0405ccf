#!/usr/bin/env bash
# Every GH200 feature by itself, on tiny models and generated data: diagnostics, unified memory, staging, caches, ramp.
# `scripts/test_gh200_features.sh --help` lists the flags.
# shellcheck disable=SC2329 # functions here are called through ft_check
set -euo pipefail
# shellcheck source=scripts/feature_tests.sh
source "$(dirname "${BASH_SOURCE[0]}")/feature_tests.sh"
ft_backends="auto sdpa flash cudnn efficient math flash_attn_2 flash_attn_3"
ft_begin "Tests every GH200 feature by itself." "diagnostic staging caches ramp attention manual-validation audio" "$@"

diagnose() { # as the guides type it; the report is read back
    "$ft_python" gh200_diagnostic.py --oversubscription-scale 1.5 --output "$ft_work/report.json"
    "$ft_python" -c 'import json, sys; assert json.load(open(sys.argv[1]))["machine"]' "$ft_work/report.json"
}

stage() {
    ft_make_job staged flux
    ft_gracetune data show "$ft_work/staged/config.yaml" --json
}

build_and_audit() {
    ft_make_job cached flux
    ft_gracetune cache build "$ft_work/cached/config.yaml"
    ft_gracetune cache audit "$ft_work/cached/config.yaml"
}

environment_script() { # both exports are what a run reads; sourced, as the guides type it
    # shellcheck disable=SC2016 # for the inner shell
    env -u GH200_UVM_OVERSUBSCRIPTION_RATIO -u GH200_UVM_ACCESS_PATTERN bash -ec 'source scripts/setup_gh200_env.sh
        [ -n "$GH200_UVM_OVERSUBSCRIPTION_RATIO" ]
        [ -n "$GH200_UVM_ACCESS_PATTERN" ]'
}

kernel() { # NAME: one real batch with it; making the job asks first whether this machine can
    ft_make_job "kernel-$1" wan --attention "$1"
    ft_gracetune train "$ft_work/kernel-$1/config.yaml" --dry-run --json
}

ft_check unit diagnostic "the examination and its checks" ft_pytest tests/unit/hardware/test_checks.py tests/unit/hardware/test_profile.py
ft_check unit diagnostic "unified memory's decisions" ft_pytest tests/unit/memory/test_governor.py tests/unit/memory/test_placement.py \
    tests/unit/memory/test_lookahead.py tests/unit/test_gh200.py
ft_check unit staging "files staged in memory" ft_pytest tests/unit/data/backends/test_in_memory.py
ft_check unit caches "caches in memory" ft_pytest tests/unit/cache/test_resident.py
ft_check unit ramp "the batch ramp" ft_pytest tests/unit/optim/test_batch_ramp.py
ft_check unit attention "the choice of a kernel" ft_pytest tests/unit/models/test_attention.py
ft_check unit manual-validation "who can be asked for a validation" ft_pytest tests/runs/test_validation.py -k nobody_can_be_asked
ft_check unit audio "decoding sound" ft_pytest tests/unit/data/media/test_audio.py

ft_check integration diagnostic "gh200_diagnostic.py" diagnose
ft_check integration diagnostic "validate_uvm.py" ft_needs_gpu "$ft_python" validate_uvm.py
ft_check integration diagnostic "setup_gh200_env.sh" environment_script
ft_check integration staging "gracetune data show of a staged dataset" stage
ft_check integration caches "gracetune cache build, audit" build_and_audit
for name in ${ft_backend:-$ft_backends}; do
    ft_check integration attention "attention: $name" kernel "$name"
done

ft_check system staging "two experts: staging, caches, ramp" ft_train_job dual wan
ft_check system caches "one denoiser: staging, caches, ramp" ft_train_job single flux
ft_check system manual-validation "a validation requested by hand" ft_ask_job asked flux
ft_check system audio "sound staged in memory" ft_train_job sound stable_audio

ft_check performance ramp "baseline: capture and compare" ft_capture_and_compare pace flux
ft_end
