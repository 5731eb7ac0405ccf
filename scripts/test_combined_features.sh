#!/usr/bin/env bash
# GH200 features together with attention backends, validation on request and sound: whole runs on tiny models.
# `scripts/test_combined_features.sh --help` lists the flags.
# shellcheck disable=SC2329 # functions here are called through ft_check
set -euo pipefail
# shellcheck source=scripts/feature_tests.sh
source "$(dirname "${BASH_SOURCE[0]}")/feature_tests.sh"
ft_backends="auto sdpa flash cudnn efficient math flash_attn_2 flash_attn_3"
ft_begin "Tests GH200 features together with attention backends, validation on request and sound." \
    "attention manual-validation audio diagnostic" "$@"

dry_run() { # NAME: plan, staging, caches and one real batch
    ft_make_job "dry-$1" wan --attention "$1"
    ft_gracetune train "$ft_work/dry-$1/config.yaml" --dry-run --json
}

launch() { # the line of the guides, with SimpleTuner's flags
    ft_make_job launched flux
    "$ft_python" train.py --config "$ft_work/launched/config.yaml" --attention_mechanism diffusers \
        --enable_manual_validation --max_train_steps 4 --json
}

diagnose() { # what a run would meet: the machine, the config, the plan
    ft_make_job looked-at wan
    "$ft_python" gh200_diagnostic.py --skip-allocation --output "$ft_work/report.json"
    ft_gracetune config check "$ft_work/looked-at/config.yaml"
    ft_gracetune estimate "$ft_work/looked-at/config.yaml" --json
}

backends=${ft_backend:-$ft_backends}

ft_check unit attention "the choice of a kernel" ft_pytest tests/unit/models/test_attention.py
ft_check unit manual-validation "windows do not change under a validation" ft_pytest tests/unit/optim/test_batch_ramp.py \
    tests/runs/test_validation.py -k "ramp or nobody_can_be_asked"
ft_check unit audio "sound: decoding and staging" ft_pytest tests/unit/data/media/test_audio.py tests/unit/data/backends/test_in_memory.py
ft_check unit diagnostic "the examination and its checks" ft_pytest tests/unit/hardware/test_checks.py

for name in $backends; do
    ft_check integration attention "attention $name: plan and one batch" dry_run "$name"
done
ft_check integration manual-validation "train.py with SimpleTuner's flags" launch
ft_check integration diagnostic "machine, config and plan" diagnose

for name in $backends; do
    ft_check system attention "attention $name: a whole run" ft_train_job "with-$name" wan --attention "$name"
done
ft_check system manual-validation "validation by hand during the ramp" ft_ask_job asked wan --attention "${ft_backend:-auto}"
ft_check system audio "sound: staging, caches, ramp" ft_train_job sound stable_audio

ft_check performance attention "baseline: capture and compare" ft_capture_and_compare pace wan --attention "${ft_backend:-auto}"
ft_check performance audio "baseline of sound: capture and compare" ft_capture_and_compare sound-pace stable_audio
ft_end
