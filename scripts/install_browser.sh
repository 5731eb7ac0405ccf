#!/usr/bin/env bash
# Install Debian's Chromium for the tests in tests/browser and for scripts/studio_screenshots.py.
#
#     bash scripts/install_browser.sh
#
# Needs root and apt-get. Where it may not install, it prints why and exits with 0: the tests are then skipped.
set -euo pipefail

for name in chromium chromium-browser google-chrome; do
  if [ -x "/usr/bin/$name" ]; then
    echo "browser for the tests: /usr/bin/$name"
    exit 0
  fi
done
if ! command -v apt-get >/dev/null; then
  echo "no browser for the tests: found no apt-get, expected Debian or Ubuntu; install Chromium by hand"
  exit 0
fi
if [ "$(id -u)" -ne 0 ]; then
  echo "no browser for the tests: installing needs root; type: sudo bash scripts/install_browser.sh"
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
if { apt-get -qq update && apt-get -qq install --yes --no-install-recommends chromium; } >/dev/null; then
  echo "browser for the tests: /usr/bin/chromium"
else
  echo "no browser for the tests: apt-get could not install chromium (its messages are above)"
fi
