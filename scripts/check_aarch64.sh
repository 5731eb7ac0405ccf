#!/usr/bin/env bash
# Shows the wheel that a Grace machine (aarch64, glibc 2.35 or newer) would install for each requirement, indirect ones and
# torch's CUDA packages included. Exits 1 if one has none. It only looks: nothing is installed, and whole wheels are not fetched.
#   scripts/check_aarch64.sh [PYTHON_VERSION ...]     default: 3.11 3.12; run it on Linux, needs the network
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/bootstrap.sh

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
platforms=(--platform manylinux2014_aarch64)
for minor in {17..35}; do platforms+=(--platform "manylinux_2_${minor}_aarch64"); done
.venv/bin/python scripts/wheel_table.py requirements >"$work/requirements.txt"

# show PYTHON_VERSION
show() {
    .venv/bin/python -m pip install --dry-run --quiet --no-input --ignore-installed --target "$work/nowhere" \
        --only-binary=:all: --implementation cp --python-version "$1" "${platforms[@]}" --use-feature=fast-deps \
        --constraint constraints.txt --requirement "$work/requirements.txt" --report "$work/report.json" 2>"$work/errors" || {
        grep -v '^WARNING' "$work/errors" >&2
        echo "a requirement named above has no aarch64 wheel for Python $1" >&2
        return 1
    }
    .venv/bin/python scripts/wheel_table.py table "$work/report.json"
}

if [ $# -eq 0 ]; then set -- 3.11 3.12; fi
status=0
for version in "$@"; do
    echo "Python $version on aarch64"
    show "$version" || status=1
done
exit "$status"
