#!/usr/bin/env bash
# Builds one image, and before it what it needs and is not there: the base (base.sh) and the wheels (wheels.sh).
#
#   deploy/containers/build.sh gateway|edge|pool-cpu|pool-cuda [TAG]
#
# ENGINE: podman (default), or docker. BUILD_FLAGS: more options of its `build`. BASE: another base image, for example
# docker.io/library/python:3.11-slim-bookworm, which an image registry has to be reached for.
set -euo pipefail
cd "$(dirname "$0")/../.."
image=${1:?usage: build.sh gateway|edge|pool-cpu|pool-cuda [TAG]}
tag=${2:-localhost/tidegate-$image:latest}
engine=(${ENGINE:-podman})
base=${BASE:-localhost/tidegate-base:bookworm}
if [ -z "${BASE:-}" ] && ! "${engine[@]}" image inspect "$base" >/dev/null 2>&1; then
  archive=$(mktemp -u).tar
  deploy/containers/base.sh "$archive" && "${engine[@]}" import "$archive" "$base"
  rm -f "$archive"
fi
[ -d "dist/wheels/$image" ] || deploy/containers/wheels.sh "$image"
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml | head -1)
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
# Docker's format: the other one has no place for a health check. Docker itself knows no such option.
format=$([ "${engine[0]##*/}" = docker ] || echo --format=docker)
# shellcheck disable=SC2086
"${engine[@]}" build $format ${BUILD_FLAGS:-} -f deploy/containers/Containerfile --target "$image" \
  --build-arg BASE="$base" --label org.opencontainers.image.version="$version" \
  --label org.opencontainers.image.revision="$revision" -t "$tag" .
