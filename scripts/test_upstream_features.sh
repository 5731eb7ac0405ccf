#!/usr/bin/env bash
# The real SimpleTuner, plain and with the overlay, on a tiny SDXL and generated pictures, on the CPU.
# `scripts/test_upstream_features.sh --help` lists the flags. Without --install it uses an environment that is there.
# shellcheck disable=SC2329 # ft_check calls the functions by name
set -euo pipefail
# shellcheck source=scripts/feature_tests.sh
source "$(dirname "${BASH_SOURCE[0]}")/feature_tests.sh"

install=no
venv=${XDG_CACHE_HOME:-$HOME/.cache}/gracetune/upstream-simpletuner
result=
# Upstream's own names, without those of other makers' chips; the two with _ are how the GH200 guides write them.
# shellcheck disable=SC2034 # read by ft_begin, which refuses others
ft_backends="diffusers native native-math native-efficient native-flash cudnn flex xformers sla kohaku-fa kohaku-fa-auto \
sageattention sageattention-int8-fp16-triton sageattention-int8-fp16-cuda sageattention-int8-fp8-cuda \
flash-attn flash-attn-hub flash-attn-2 flash-attn-varlen-hub flash-attn-3 flash-attn-3-hub flash-attn-3-varlen \
flash-attn-3-varlen-hub flash-attn-4-hub flash_attn_2 flash_attn_3"

ft_own_flag() {
    case $1 in
        --install) install=yes && return 1 ;;
        --venv)
            ft_value "$@"
            venv=$(realpath -m "$2")
            return 2
            ;;
        --result)
            ft_value "$@"
            result=$(realpath -m "$2")
            return 2
            ;;
    esac
    return 0
}

ft_own_help() {
    cat <<TEXT
  --install            make the environment first: Python 3.12 or newer, upstream from the package index (several GB)
  --venv DIR           the environment (default: $venv)
  --result FILE        write the summary of the proof (losses, opened files, versions) here

Upstream stops on a CPU in its pin_memory call: \`Tensor.pin_memory\` is neutralised in all runs, plain ones too.
UPSTREAM_PYTHON=/path/to/python chooses the interpreter that --install makes the environment with.
TEXT
}

ft_begin "Tests the overlay on the real SimpleTuner." "overlay ramp attention manual-validation audio diagnostic" "$@"

new_python() { # the first that upstream takes
    local name
    for name in ${UPSTREAM_PYTHON:-python3.12 python3.13 python3.14 python3}; do
        if "$name" -c 'import sys; sys.exit(not (3, 12) <= sys.version_info < (3, 15))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    printf -- '--install\n  found     no Python 3.12 to 3.14 on the PATH\n  expected  one\n  try       %s\n' \
        "UPSTREAM_PYTHON=/path/to/python $0 --install" >&2
    return 1
}

install_upstream() {
    local python
    python=$(new_python)
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    "$venv/bin/python" scripts/upstream_features/scenarios.py requirements >"$ft_work/requirements.txt"
    "$venv/bin/python" -m pip install --requirement "$ft_work/requirements.txt"
}

with_upstream() { # SCENARIO [flags]
    if ! "$venv/bin/python" -c 'from importlib.metadata import version; version("simpletuner")' 2>/dev/null; then
        echo "no SimpleTuner in $venv; --install makes one, --venv DIR names another"
        return "$FT_SKIPPED"
    fi
    local scenario=$1
    shift
    PYTHONPATH=src:overlays/simpletuner/src OMP_NUM_THREADS=1 \
        "$venv/bin/python" scripts/upstream_features/scenarios.py "$scenario" "$ft_work/bench" "$@"
}

source_of_upstream() { "$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

check_points() { # the same list, found without importing anything
    if [ ! -d "$(source_of_upstream 2>/dev/null)/simpletuner" ]; then
        echo "no SimpleTuner in $venv; --install makes one, --venv DIR names another"
        return "$FT_SKIPPED"
    fi
    ft_gracetune overlay check simpletuner --source "$(source_of_upstream)"
}

if [ "$install" = yes ]; then install_upstream; fi # for every choice of checks: each below would skip without it

ft_check unit overlay "the overlay on stand-ins" ft_pytest tests/unit/overlays/simpletuner
ft_check unit overlay "every wrapped name is there" with_upstream hooks
ft_check unit diagnostic "gracetune overlay check simpletuner" check_points

ft_check integration overlay "plain, off, idle, on: same losses, no file" with_upstream proof ${result:+--result "$result"}
for name in ${ft_backend:-diffusers flash_attn_3}; do
    ft_check integration attention "attention: $name" with_upstream attention --name "$name"
done
ft_check integration audio "a staged sound, gone from disk" with_upstream audio
ft_check integration diagnostic "gracetune doctor" ft_gracetune doctor --skip-allocation

ft_check system ramp "the ramp in upstream's loop" with_upstream ramp
ft_check system manual-validation "a validation requested by hand" with_upstream manual-validation

ft_check performance overlay "seconds, plain and with the overlay" with_upstream performance
ft_end
