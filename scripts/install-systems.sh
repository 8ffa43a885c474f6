#!/bin/sh
# What `make test-systems` runs: Open MPI, MPICH, Slurm with munge, Chromium, sshd, zsh and fish (Debian, Ubuntu).
# Does nothing where all of them are there; otherwise it needs root and a package mirror.
set -eu

# Slurm's daemons live in /usr/sbin, which is not on every path.
PATH=$PATH:/usr/sbin

missing=
need() { # COMMAND PACKAGE
    command -v "$1" >/dev/null || missing="$missing $2"
}
need mpirun.openmpi openmpi-bin
need mpiexec.hydra mpich
need srun slurm-client
need slurmctld slurmctld
need slurmd slurmd
need munged munge
need chromium chromium
need sshd openssh-server
need zsh zsh
need fish fish

[ -n "$missing" ] || exit 0
echo "installing$missing" >&2

# Packages must not start services here: the tests start their own, with their own settings.
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
    trap 'rm -f $policy' EXIT
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod +x $policy
fi

export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
# $missing is a list of words.
# shellcheck disable=SC2086
if ! { apt-get update && apt-get install --yes --no-install-recommends $missing; } >"$log" 2>&1; then
    cat "$log" >&2
    exit 1
fi
rm -f "$log"
