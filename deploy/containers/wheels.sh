#!/usr/bin/env bash
# Collects the wheels of one image into dist/wheels/IMAGE, pinned by constraints.txt. The build of an image installs from
# there and needs no network, so that one set of wheels makes one image.
#
#   deploy/containers/wheels.sh gateway|edge|pool-cpu|pool-cuda
#
# PyTorch's wheel on PyPI is the one for CUDA. For pool-cpu pip has to know where the one without is:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu deploy/containers/wheels.sh pool-cpu
# PYTHON: an interpreter of the base image's version (3.11 for Debian bookworm) with pip. EXTRAS: others than the image's own.
set -euo pipefail
cd "$(dirname "$0")/../.."
image=${1:?usage: wheels.sh gateway|edge|pool-cpu|pool-cuda}
case $image in
gateway) extras=gateway,discovery,tracing ;;
edge) extras=edge,metrics,tracing ;;
pool-cpu | pool-cuda) extras=cloud,announce,metrics,tracing ;;
*) echo "no image is called $image: gateway, edge, pool-cpu or pool-cuda" >&2; exit 2 ;;
esac
into=dist/wheels/$image
rm -rf "$into" && mkdir -p "$into"
"${PYTHON:-python3}" -m pip wheel --quiet --disable-pip-version-check --wheel-dir "$into" -c constraints.txt \
  ".[${EXTRAS:-$extras}]" pip==25.3
if [ "$image" = pool-cpu ] && ls "$into" | grep -q ^nvidia; then
  echo "this is PyTorch for CUDA: set PIP_EXTRA_INDEX_URL as this file's head says" >&2; exit 1
fi
echo "$into: $(ls "$into" | wc -l) wheels, $(du -sh "$into" | cut -f1)"
