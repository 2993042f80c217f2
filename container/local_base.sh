#!/bin/sh
# A base image for the Dockerfile where no image registry can be reached: Debian bookworm with its Python 3.11 and pip,
# put together from Debian's packages. It has no compiler, as the Dockerfile's own base has none.
#   local_base.sh NAME [BUILDAH OPTION...]     the options say where the image is stored, as in --root DIR
set -eu
name=${1:?usage: local_base.sh NAME [BUILDAH OPTION...]}
shift
fail() { echo "local_base.sh: $1" >&2; exit 1; }
[ "$(id -u)" = 0 ] || fail "debootstrap needs root; or name a base image: make image-test BASE=python:3.11-slim-bookworm"
for tool in buildah debootstrap; do
    command -v "$tool" >/dev/null || fail "$tool is missing (Debian: apt-get install $tool)"
done

working=$(buildah "$@" from scratch)
trap 'buildah "$@" rm "$working" >/dev/null' EXIT
tree=$(buildah "$@" mount "$working")
debootstrap --variant=minbase --include=ca-certificates,python3,python3-pip,python3-venv bookworm "$tree" >/dev/null
rm -rf "$tree"/var/cache/apt/archives/*.deb "$tree"/var/lib/apt/lists/*
buildah "$@" unmount "$working" >/dev/null
buildah "$@" commit --quiet --format docker "$working" "$name" >/dev/null
