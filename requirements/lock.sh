#!/bin/sh
# Makes the locks again: `lock.sh [--upgrade]`.
set -eu
cd "$(dirname "$0")/.."
lock() {
    out=requirements/$1.lock
    shift
    uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-annotate --no-header --extra s3 \
        --override requirements/overrides.txt "$@" -o "$out"
    { echo "# Made by requirements/lock.sh; install with --no-deps (requirements/README.md says why)."; cat "$out"; } >"$out.new"
    mv "$out.new" "$out"
}
lock cpu "$@" pyproject.toml requirements/cpu.in
lock dev "$@" -c requirements/cpu.lock pyproject.toml requirements/cpu.in requirements/dev.in
# dev.lock holds only what cpu.lock does not
awk '/^[a-z0-9]/ { keep = !($1 in seen); if (FILENAME ~ /cpu/) seen[$1] = 1 } FILENAME ~ /dev/ && (keep || /^#/)' \
    requirements/cpu.lock requirements/dev.lock >requirements/dev.lock.new
mv requirements/dev.lock.new requirements/dev.lock
lock gpu "$@" pyproject.toml requirements/gpu.in
# sagemaker-core takes neither vLLM's rich nor its protobuf
sed -n 's/^\([a-z0-9].*\) \\$/\1/p' requirements/cpu.lock | grep -vE '^(rich|protobuf)==' |
    lock deploy "$@" -c - --extra deploy --extra local-aws pyproject.toml requirements/deploy.in
