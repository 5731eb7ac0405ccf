#!/usr/bin/env bash
# Builds what a release consists of, from the last commit: source distribution, wheel of this platform, the list of what
# is in it (SBOM, CycloneDX), and checksums. Uploads nothing.
#   scripts/release.sh [--python PYTHON] [FOLDER]      the folder: dist; the Python: that of .venv
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."

python=$PWD/.venv/bin/python output=dist
while [ $# -gt 0 ]; do
    case $1 in
        --python) python=${2:?a Python}; shift 2 ;;
        -*) echo "unknown option $1; see the top of $0" >&2; exit 2 ;;
        *) output=$1; shift ;;
    esac
done
die() {
    printf 'release: %s\n' "$@" >&2
    exit 1
}
[ -x "$python" ] || die "found no $python: make environment, or --python PYTHON"
[ -z "$(git status --porcelain)" ] || die "there are changes that no commit has: commit or stash them"

export PYTHONDONTWRITEBYTECODE=1 # nothing is written into the tree that is packed
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/tree" "$work/release"
git archive HEAD | tar -x -C "$work/tree" # what is built by hand or left over in the checkout is no part of it
version=$(cd "$work/tree/src" && "$python" -c 'import gracetune; print(gracetune.__version__)')
[ ! -e "$output/gracetune-$version.tar.gz" ] || die "$output holds a release $version already: another folder, or another version"

(cd "$work/tree" && "$python" -c 'import sys, setuptools.build_meta as backend; backend.build_sdist(sys.argv[1])' "$work/release") \
    >"$work/log" 2>&1 || { cat "$work/log" >&2; die "the source distribution cannot be built"; }
sdist=$work/release/gracetune-$version.tar.gz
[ -f "$sdist" ] || die "expected $(basename "$sdist"), found $(ls "$work/release")"
# From the source distribution, not from the tree: what it lacks is noticed here.
"$python" -m pip wheel --quiet --no-input --disable-pip-version-check --no-deps --no-build-isolation --no-index --no-cache-dir \
    --wheel-dir "$work/release" "$sdist" >"$work/log" 2>&1 || { cat "$work/log" >&2; die "the wheel cannot be built from the source distribution"; }
wheel=$(echo "$work"/release/gracetune-"$version"-py3-none-*.whl)
[ -f "$wheel" ] || die "expected a wheel of every Python, found $(ls "$work/release")"

(cd "$work/tree/src" && find gracetune -type f) | sort >"$work/tracked"
"$python" -m zipfile -l "$wheel" | awk 'NR > 1 { print $1 }' | sort >"$work/packed"
missing=$(comm -23 "$work/tracked" "$work/packed")
[ -z "$missing" ] || die "the wheel lacks" "$missing"
grep -qx 'gracetune/memory/native/_uvm.so' "$work/packed" || die "the wheel lacks the native library: install a C compiler"
grep -q 'dist-info/licenses/LICENSE$' "$work/packed" || die "the wheel lacks the licence"

"$python" scripts/sbom.py "$wheel" "$sdist" >"$work/release/gracetune-$version.cdx.json"
(cd "$work/release" && sha256sum -- * >SHA256SUMS)
mkdir -p "$output"
mv "$work"/release/* "$output"
echo "release $version in $output:"
(cd "$output" && sha256sum --check SHA256SUMS)
