#!/bin/sh
# Build the Containerfile, and run what it holds, where there is neither a daemon nor a registry.
#   scripts/container.sh [OPTION OF buildah build ...]
# Its base image is made here, of Debian's or Ubuntu's packages with their own Python in place of
# docker.io/library/python: what this shows is that every step of the file runs and that the
# command works in what comes out, and not that python:VERSION-slim has what the steps need.
# Needs root, buildah, debootstrap, 4 to 12 GB of disk (torch for CUDA is large) and five to ten
# minutes. Where pip wants settings of this machine, hand them in:
#   --volume /etc/pip.conf:/etc/pip.conf:ro --env PIP_INDEX_URL
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
export CONTAINERS_STORAGE_CONF="$work/storage.conf"
cat >"$work/storage.conf" <<END
[storage]
driver = "${STORAGE_DRIVER:-overlay}"
graphroot = "$work/store"
runroot = "$work/run"
END

clean() {
    # Containers are unmounted before the folder goes.
    buildah rm --all >/dev/null 2>&1 || true
    rm -rf "$work"
}
trap clean EXIT
trap 'exit 1' INT TERM

base=$(sed -n 's/^FROM \([^ ]*\)$/\1/p' "$root/Containerfile")
python=$(sed -n 's/^ARG PYTHON=//p' "$root/Containerfile")
base=$(echo "$base" | sed "s/\${PYTHON}/$python/")

echo "== a base image for $base"
. /etc/os-release
debootstrap --variant=minbase --include=ca-certificates,python3,python3-dev,python3-pip \
    "$VERSION_CODENAME" "$work/base" >"$work/log" 2>&1 || { tail "$work/log"; exit 1; }
# As in that image: python without a number, and pip may install beside it.
ln -s python3 "$work/base/usr/bin/python"
rm -f "$work"/base/usr/lib/python3*/EXTERNALLY-MANAGED
from=$(buildah from scratch)
buildah add --quiet "$from" "$work/base" / >/dev/null
buildah commit --quiet --rm "$from" "$base" >/dev/null
rm -rf "$work/base"

echo "== the Containerfile"
buildah build --layers --isolation chroot --pull-never --quiet "$@" --tag megabatch "$root" \
    >"$work/log" 2>&1 || { tail -n 40 "$work/log"; exit 1; }
buildah images megabatch

# As somebody who is nobody in the container, with a folder of theirs.
mkdir "$work/here"
chmod 755 "$work"
chown 1234:1234 "$work/here"
megabatch=$(buildah from --pull-never localhost/megabatch)
entry=$(buildah inspect --format '{{index .OCIv1.Config.Entrypoint 0}}' "$megabatch")
for words in --help doctor "train digits --epochs 1 --workers 2"; do
    echo "== $entry $words"
    # What follows the verb is a list of words.
    # shellcheck disable=SC2086
    buildah run --isolation chroot --user 1234:1234 --volume "$work/here:/here" "$megabatch" -- \
        $entry $words
done
ls -l "$work/here/runs"
