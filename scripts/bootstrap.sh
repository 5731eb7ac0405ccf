#!/usr/bin/env bash
# Creates .venv and installs gracetune into it; run again it only compares a stamp.
# PYTHON=/path/to/python chooses the interpreter. Without it: the first Python >= 3.11, one with a CUDA torch before others.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv
origin_file=$venv/gracetune-origin # the checkout and the Python it was made for
stamp_file=$venv/gracetune-stamp   # what was installed; written last, so an interrupted install leaves none
pins_file=$venv/gracetune-constraints.txt

say() { printf 'bootstrap: %s\n' "$*"; }
die() {
    printf 'bootstrap: %s\n' "$@" >&2
    exit 1
}

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }
origin_of() { "$1" -c 'import os, sys; print(os.getcwd(), sys.prefix, "%d.%d" % sys.version_info[:2])'; }
# Python files need no new install; what is compiled or fetched does.
stamp_of_files() {
    "$venv/bin/python" -c 'import hashlib, pathlib, sys
files = [*map(pathlib.Path, ("pyproject.toml", "constraints.txt", "setup.py")), *sorted(pathlib.Path("src").rglob("*.[ch]"))]
contents = b"".join(file.read_bytes() for file in files if file.is_file())
print(hashlib.sha256(contents).hexdigest(), "%d.%d" % sys.version_info[:2])'
}

# Prints reuse or install, then the reason, then (for a torch in another venv) the lines of a .pth file that leads to it.
ask_torch() { "$1" scripts/pick_torch.py decide 2>/dev/null || printf 'install\nimporting the torch of %s fails\n' "$1"; }

# Sets python and torch_answer.
choose_python() {
    local name path answer names=(python3 python3.13 python3.12 python3.11 python)
    if [ -n "${PYTHON:-}" ]; then names=("$PYTHON"); fi
    python=
    for name in "${names[@]}"; do
        path=$(command -v "$name") || continue
        if [[ $path == "$PWD/$venv/"* ]] || ! new_enough "$path"; then continue; fi
        answer=$(ask_torch "$path")
        if [ -z "$python" ] || [[ $answer == reuse* ]]; then python=$path torch_answer=$answer; fi
        if [[ $answer == reuse* ]]; then return; fi
    done
    [ -n "$python" ] || die "found no Python 3.11 or newer (tried: ${names[*]})." \
        "Install one:              sudo apt-get install python3.12 python3.12-venv" \
        "or name the one you have: PYTHON=/path/to/python3.12 make demo"
}

create_venv() {
    local decision reason pth_lines pip_from options=(--prompt gracetune)
    choose_python
    { read -r decision && read -r reason && pth_lines=$(cat); } <<<"$torch_answer"
    if [ "$decision" = reuse ]; then say "$reason: .venv will use it"; else say "$reason: .venv gets its own"; fi
    if [ "$decision" = reuse ] && [ -z "$pth_lines" ]; then options+=(--system-site-packages); fi

    if "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        pip_from=ensurepip
    elif "$python" -c 'import venv' 2>/dev/null && "$python" -m pip --python "$python" --version >/dev/null 2>&1; then
        pip_from=machine # Debian keeps ensurepip in a package of its own; the pip of the machine can do its work
        options+=(--without-pip)
    else
        die "$python cannot create a virtual environment: it lacks venv or ensurepip, and a pip >= 22.3 to stand in for it." \
            "Install what is missing: sudo apt-get install python$(version_of "$python")-venv"
    fi

    say "creating .venv with $python"
    rm -rf "$venv"
    mkdir "$venv"
    echo unfinished >"$origin_file"
    "$python" -m venv "${options[@]}" "$venv"
    if [ "$pip_from" = machine ]; then "$python" -m pip --python "$venv/bin/python" install --quiet pip; fi
    if [ -n "$pth_lines" ]; then
        printf '%s\n' "$pth_lines" >"$venv/lib/python$(version_of "$python")/site-packages/reused-torch.pth"
    fi
    origin_of "$python" >"$origin_file"
}

# Prints why .venv cannot be kept; nothing if it can. A .venv someone made by hand has no origin and is kept.
unusable() {
    local origin=
    if ! new_enough "$venv/bin/python"; then
        echo ".venv is broken: its Python is gone or too old"
        return
    fi
    if [ -f "$origin_file" ]; then origin=$(cat "$origin_file"); fi
    if [ -n "$origin" ] && [[ $origin != "$PWD "*" $(version_of "$venv/bin/python")" ]]; then
        # The scripts in .venv/bin name their interpreter by its full path: a moved checkout needs them anew.
        echo ".venv was not finished, or was made in another folder or for another Python"
    elif [ -n "${PYTHON:-}" ] && [ "$(origin_of "$PYTHON")" != "$origin" ]; then
        echo ".venv was not made with PYTHON=$PYTHON"
    elif [ -z "$origin" ] && ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
        echo ".venv is incomplete: it has no pip"
    fi
}

if [ -n "${PYTHON:-}" ]; then
    new_enough "$PYTHON" || die "PYTHON=$PYTHON does not run, or is older than Python 3.11." \
        "Name one that is not: PYTHON=/path/to/python3.12 make demo"
    if [ "$("$PYTHON" -c 'import sys; print(sys.prefix)')" = "$PWD/$venv" ]; then PYTHON=; fi # .venv itself: nothing to change
fi
if [ -e "$venv" ] || [ -L "$venv" ]; then
    why=$(unusable)
    if [ -n "$why" ]; then
        say "$why; building it anew"
        create_venv
    fi
else
    create_venv
fi

stamp=$(stamp_of_files)
if [ -f "$stamp_file" ] && [ "$(cat "$stamp_file")" = "$stamp" ]; then exit 0; fi
rm -f "$stamp_file"
say "installing gracetune and what it needs into .venv (minutes the first time)"
if [ -n "${PIP_CONSTRAINT:-}" ]; then say "PIP_CONSTRAINT is left aside: constraints.txt says what .venv holds"; fi
"$venv/bin/python" scripts/pick_torch.py constraints >"$pins_file"
env -u PIP_CONSTRAINT "$venv/bin/python" -m pip install --disable-pip-version-check --no-input -c "$pins_file" -e '.[dev]'
printf '%s\n' "$stamp" >"$stamp_file"
say ".venv is ready"
