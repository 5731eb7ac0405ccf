# shellcheck shell=bash
# Shared by scripts/test_*_features.sh: flags, levels, checks, one table at the end. Sourced, never run by itself.
#
#   source "$(dirname "${BASH_SOURCE[0]}")/feature_tests.sh"
#   ft_begin "what this script tests" "attention audio ..." "$@"   # reads the flags; enters the repository's folder
#   ft_check LEVEL FEATURE "name" COMMAND...      # runs it if its level and feature are requested
#   ft_skip  LEVEL FEATURE "name" "why"           # says that it is not run, and why
#   ft_end                                        # the table; leaves with the exit code
#
# A command that finds out itself that it cannot run prints why as its last line and ends with $FT_SKIPPED.
# A script with flags of its own defines ft_own_flag FLAG [VALUE] (prints nothing; returns how many words it took, 0: unknown)
# and ft_own_help; one that sets ft_backends before ft_begin refuses other names. After ft_begin: $ft_python, $ft_backend,
# $ft_work (a folder, removed at the end), $ft_tolerance, $ft_baseline.
#
# Exit codes: 0 what ran passed, 1 something failed, 2 wrong flags, 77 nothing could be run (the reasons are in the table).

readonly FT_SKIPPED=77
readonly FT_LEVELS="unit integration system performance"

# shellcheck disable=SC2034 # some are for the scripts alone
ft_backend="" ft_level="" ft_features="" ft_asked="" ft_tolerance="25%" ft_work="" ft_python="" ft_baseline=""
ft_failed=0 ft_passed=0 ft_rows=()

ft_usage() {
    cat <<TEXT
usage: $0 [flags]

$ft_title

  --level LEVEL        unit, integration, system or performance; may be given several times. Default: all of them
$(for feature in $ft_features; do printf '  --%-18s only this (and what else is named)\n' "$feature"; done)
TEXT
    if ft_has "$ft_features" attention; then
        echo "  --backend NAME       only this attention backend${ft_backends:+: $ft_backends}"
    fi
    if ft_has "$ft_features" manual-validation; then echo "  --manual             the same as --manual-validation"; fi
    cat <<TEXT
  --baseline FOLDER    performance: compare with this baseline instead of one captured a moment before
  --tolerance SHARE    performance: how much slower or larger is still well (default: $ft_tolerance)
  --help               this text
TEXT
    if declare -F ft_own_help >/dev/null; then ft_own_help; fi
    echo
    echo "Exit codes: 0 what ran passed, 1 something failed, 2 wrong flags, 77 nothing could be run; reasons are printed."
    echo "PYTHON=/path/to/python chooses the interpreter; otherwise .venv's."
}

ft_has() { [[ " $1 " == *" $2 "* ]]; }

ft_wrong() { # found, expected, what to type
    printf '%s\n  found     %s\n  expected  %s\n  try       %s\n' "$0" "$1" "$2" "$3" >&2
    exit 2
}

ft_value() { # FLAG VALUE...: the value of a flag, or a complaint
    if [ $# -lt 2 ] || [[ $2 == --* ]] || [ -z "$2" ]; then ft_wrong "$1 without a value" "$1 VALUE" "$0 --help"; fi
}

ft_begin() {
    ft_title=$1 ft_features=$2
    shift 2
    local own level flag
    while [ $# -gt 0 ]; do
        flag=$1
        case $flag in
            --help | -h) ft_usage && exit 0 ;;
            --level | --backend | --tolerance | --baseline) ft_value "$@" ;;
        esac
        case $flag in
            --level)
                ft_has "$FT_LEVELS" "$2" || ft_wrong "--level $2" "one of: $FT_LEVELS" "$0 --level unit"
                ft_level="$ft_level $2" && shift 2
                ;;
            --backend)
                ft_has "$ft_features" attention || ft_wrong "--backend" "a flag of this script" "$0 --help"
                if [ -n "${ft_backends:-}" ] && ! ft_has "$ft_backends" "$2"; then
                    ft_wrong "--backend $2" "one of: $ft_backends" "$0 --backend ${ft_backends%% *}"
                fi
                # shellcheck disable=SC2034
                ft_backend=$2
                ft_asked="$ft_asked attention" && shift 2
                ;;
            --tolerance) ft_tolerance=$2 && shift 2 ;;
            --baseline) ft_baseline=$2 && shift 2 ;;
            *)
                [ "$flag" = --manual ] && flag=--manual-validation
                if [[ $flag == --* ]] && ft_has "$ft_features" "${flag#--}"; then
                    ft_asked="$ft_asked ${flag#--}" && shift
                    continue
                fi
                own=0
                if declare -F ft_own_flag >/dev/null; then ft_own_flag "$@" || own=$?; fi
                [ "$own" -gt 0 ] || ft_wrong "$1" "a flag of this script" "$0 --help"
                shift "$own"
                ;;
        esac
    done
    if [ -n "$ft_baseline" ]; then
        [ -e "$ft_baseline" ] || ft_wrong "--baseline $ft_baseline, which is not there" "a baseline's folder" \
            "gracetune baseline capture CONFIG"
        ft_baseline=$(realpath "$ft_baseline")
    fi
    cd -P "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
    ft_python=${PYTHON:-.venv/bin/python}
    if ! "$ft_python" -c 'import gracetune' 2>/dev/null; then
        printf '%s\n  found     no gracetune in %s\n  expected  an environment that has it\n  try       %s\n' "$0" \
            "$ft_python" "bash scripts/bootstrap.sh" >&2
        exit 1
    fi
    [[ $ft_python == */* ]] && ft_python=$(realpath -s "$ft_python")
    ft_work=$(mktemp -d)
    trap 'rm -rf "$ft_work"' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false # nothing here is fetched
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"       # tiny models gain nothing from threads, and a busy machine starves them
    for level in $FT_LEVELS; do ft_wants "$level" || ft_note "$level" "not requested (--level$ft_level)"; done
}

ft_note() { printf '%-12s %s\n' "$1" "$2"; }
ft_wants() { [ -z "$ft_level" ] || ft_has "$ft_level" "$1"; }
ft_concerns() { [ -z "$ft_asked" ] || ft_has "$ft_asked" "$1"; }
ft_gracetune() { "$ft_python" -m gracetune.cli.main "$@"; }

ft_row() { ft_rows+=("$(printf '%-8s %-12s %-18s %-46s %s' "$@")"); }

ft_skip() { # LEVEL FEATURE NAME WHY
    ft_wants "$1" && ft_concerns "$2" || return 0
    ft_row skipped "$1" "$2" "$3" "$4"
    printf 'skipped  %s: %s\n' "$3" "$4"
}

ft_check() { # LEVEL FEATURE NAME COMMAND...
    local level=$1 feature=$2 name=$3 log code=0 began=$SECONDS
    ft_wants "$level" && ft_concerns "$feature" || return 0
    shift 3
    log=$ft_work/check-${#ft_rows[@]}.log
    # Not `|| code=$?`: there bash would not stop a function of several commands at the first that fails.
    set +e
    (
        set -e
        "$@"
    ) >"$log" 2>&1 </dev/null
    code=$?
    set -e
    if [ "$code" -eq 0 ]; then
        ft_passed=$((ft_passed + 1))
        ft_row ok "$level" "$feature" "$name" "$((SECONDS - began)) s"
        printf 'ok       %s\n' "$name"
        if [ "$level" = performance ]; then tail -n 1 "$log" | sed 's/^/    /'; fi # what was measured
    elif [ "$code" -eq "$FT_SKIPPED" ]; then
        ft_skip "$level" "$feature" "$name" "$(tail -n 1 "$log")"
    else
        ft_failed=$((ft_failed + 1))
        ft_row FAILED "$level" "$feature" "$name" "exit code $code"
        printf 'FAILED   %s (exit code %s): %s\n' "$name" "$code" "$*"
        tail -n 60 "$log" | sed 's/^/    /'
    fi
}

ft_pytest() { # TESTS...: the everyday ones, with one thread
    "$ft_python" -m pytest -q -p no:cacheprovider -m "not gpu and not full" "$@"
}

ft_end() {
    printf '\n%-8s %-12s %-18s %-46s %s\n' result level feature check ""
    if [ ${#ft_rows[@]} -gt 0 ]; then printf '%s\n' "${ft_rows[@]}"; fi
    printf '\n%s passed, %s failed, %s skipped\n' "$ft_passed" "$ft_failed" "$((${#ft_rows[@]} - ft_passed - ft_failed))"
    if [ "$ft_failed" -gt 0 ]; then exit 1; fi
    if [ "$ft_passed" -eq 0 ]; then
        echo "nothing could be run"
        exit "$FT_SKIPPED"
    fi
    exit 0
}

# -- what two scripts share: jobs made by feature_job.py, in $ft_work ---------------------------------------------------

ft_job() { "$ft_python" scripts/feature_job.py "$@"; }

# NAME FAMILY [--steps N] [--attention NAME]: once; its config is $ft_work/NAME/config.yaml. Skips what cannot run here.
ft_make_job() {
    local folder=$ft_work/$1
    shift
    [ -f "$folder/config.yaml" ] || { rm -rf "$folder" && ft_job make "$folder" "$@"; }
}

ft_train_job() { # NAME FAMILY [flags]: a whole run with every feature on, and whether it did what was requested
    ft_make_job "$@"
    ft_gracetune train "$ft_work/$1/config.yaml" --resume none --set name="$1"
    ft_job verify "$ft_work/$1/config.yaml"
}

ft_ask_job() { # NAME FAMILY [flags]: a run with a validation requested by hand
    ft_make_job "$@"
    ft_job ask "$ft_work/$1/config.yaml"
}

ft_capture_and_compare() { # NAME FAMILY [flags]: against --baseline, or one captured a moment before
    local before=$ft_baseline after code=0
    ft_make_job "$@"
    if [ -z "$before" ]; then before=$(ft_captured "$1" before); fi
    after=$(ft_captured "$1" after)
    ft_gracetune baseline compare "$before" "$after" --tolerance "$ft_tolerance" || code=$?
    if [ "$code" -ne 0 ]; then ft_job busy "$before" "$after" "$ft_tolerance"; fi
    return "$code"
}

ft_captured() { # NAME WHICH: the folder of a new baseline
    # A $(...) does not stop at what fails in it: without the `|| return` the name of no folder would be told.
    ft_gracetune baseline capture "$ft_work/$1/config.yaml" --output "$ft_work/$1/$2" --steps 40 >&2 || return
    echo "$ft_work/$1/$2"/*/
}

ft_needs_gpu() { # the command, or the reason why there is no sense in it
    if ! "$ft_python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
        echo "torch sees no CUDA GPU here"
        return "$FT_SKIPPED"
    fi
    "$@"
}
