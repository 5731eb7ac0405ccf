#!/bin/sh
# Defaults for training on a unified-memory machine. Type:  source scripts/setup_gh200_env.sh
#
# Exports what is not set yet:
#   SIMPLETUNER_GH200_ENABLE_UVM_HINTS=1
#   GH200_UVM_OVERSUBSCRIPTION_RATIO=5.0   any number above 1.0
#   GH200_UVM_ACCESS_PATTERN=cpu_first     or balanced, gpu_first. Older guides say gpu_first, but preferring the device turns
#                                          the driver's protection against thrashing off just when memory has run out.
#   ACCELERATE_MIXED_PRECISION=bf16
# PyTorch's allocator string gets the UVM keys only where torch is a patched build that knows them. A stock torch refuses
# unknown keys, which would stop every other torch program in this shell; gracetune itself does not need the string.
#
# It runs in the user's own shell (bash, zsh, dash): all work is done in a subshell, so that no option, function or other
# variable changes here. Sourcing it again changes nothing more, and without a GPU it is harmless.

case "${ZSH_EVAL_CONTEXT:-}|$0" in
    (*file*'|'*) ;; # zsh puts a sourced file's name into $0, but says `file` in its context
    (*'|setup_gh200_env.sh' | *'|'*/setup_gh200_env.sh)
        echo "setup_gh200_env.sh was executed, so its settings ended with it. Type instead: source $0" >&2
        exit 1
        ;;
esac

eval "$(
    set +eu
    value_in_string() { printf ',%s,' "$string" | command sed -n "s/.*,[ ]*$1:\([^,]*\),.*/\1/p"; }
    add_to_string() {
        case ",$(printf '%s' "$string" | command tr -d ' ')," in
            (*",$1:"*) ;; # never twice, and never over what the user wrote
            (*) string="${string:+$string,}$1:$2" ;;
        esac
    }
    export_line() { printf "export %s='%s'\n" "$1" "$(printf '%s' "$2" | command sed "s/'/'\\\\''/g")"; }
    refuse() {
        echo "setup_gh200_env.sh: found '$2', expected $3; nothing was changed. Type: export $1=$4" >&2
        echo 'return 1'
        exit
    }
    # Looks into the library instead of importing torch, which would parse the string we are about to write.
    torch_kind() {
        command "${PYTHON:-python3}" -c '
import importlib.util, pathlib, sys
sys.path = [entry for entry in sys.path if entry]
spec = importlib.util.find_spec("torch")
library = pathlib.Path(spec.origin).parent / "lib" / "libc10_cuda.so"
print("patched" if library.is_file() and b"uvm_oversubscription_ratio" in library.read_bytes() else "stock")
' 2>/dev/null || echo missing
    }

    # torch reads the second variable only if the first is not set.
    variable=PYTORCH_ALLOC_CONF
    [ -n "$PYTORCH_ALLOC_CONF" ] || variable=PYTORCH_CUDA_ALLOC_CONF
    string="${PYTORCH_ALLOC_CONF:-$PYTORCH_CUDA_ALLOC_CONF}"
    # A value in the user's own string is a choice too, so it comes before our default.
    ratio="${GH200_UVM_OVERSUBSCRIPTION_RATIO:-$(value_in_string uvm_oversubscription_ratio)}"
    ratio="${ratio:-5.0}"
    pattern="${GH200_UVM_ACCESS_PATTERN:-$(value_in_string uvm_access_pattern)}"
    pattern="${pattern:-cpu_first}"
    command awk -v ratio="$ratio" 'BEGIN { exit !(ratio ~ /^[0-9]+([.][0-9]*)?$/ && ratio > 1) }' ||
        refuse GH200_UVM_OVERSUBSCRIPTION_RATIO "$ratio" "an oversubscription ratio above 1.0" 5.0
    case "$pattern" in
        (cpu_first | balanced | gpu_first) ;;
        (*) refuse GH200_UVM_ACCESS_PATTERN "$pattern" "the access pattern cpu_first, balanced or gpu_first" cpu_first ;;
    esac

    export_line SIMPLETUNER_GH200_ENABLE_UVM_HINTS "${SIMPLETUNER_GH200_ENABLE_UVM_HINTS:-1}"
    export_line GH200_UVM_OVERSUBSCRIPTION_RATIO "$ratio"
    export_line GH200_UVM_ACCESS_PATTERN "$pattern"
    export_line ACCELERATE_MIXED_PRECISION "${ACCELERATE_MIXED_PRECISION:-bf16}"
    case "$(torch_kind)" in
        (patched)
            add_to_string use_uvm True
            add_to_string uvm_oversubscription_ratio "$ratio"
            add_to_string uvm_access_pattern "$pattern"
            export_line "$variable" "$string"
            note="patched torch: $variable=$string"
            ;;
        (stock) note="stock torch: allocator string left alone" ;;
        (*) note="no torch seen by ${PYTHON:-python3}: allocator string left alone" ;;
    esac
    echo "gracetune: UVM hints ${SIMPLETUNER_GH200_ENABLE_UVM_HINTS:-1}, ratio $ratio, pattern $pattern, ${ACCELERATE_MIXED_PRECISION:-bf16}; $note" >&2
)"
