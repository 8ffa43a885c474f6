"""How workers find each other: this machine's own names, and what a launcher has said."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping

from megabatch.doctor import child
from megabatch.doctor.child import Failed, ask
from megabatch.doctor.finding import Finding
from megabatch.errors import UserError
from megabatch.workers.place import LAUNCHERS, launcher_of, place_by

LOOPBACK = "127.0.0.1"
NAME_SECONDS = 15

# By the variable that holds the rank.
STARTED_BY = {
    "RANK": "torchrun (or who sets RANK and WORLD_SIZE)",
    "OMPI_COMM_WORLD_RANK": "Open MPI's mpirun",
    "PMI_RANK": "MPICH's or Intel's mpiexec",
    "SLURM_PROCID": "Slurm's srun",
}


def check_loopback() -> Finding:
    """A connection of this machine with itself: local workers have nothing else."""
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            address = server.getsockname()
            with socket.create_connection(address, timeout=5) as there:
                here, _ = server.accept()
                with here:
                    there.sendall(b"x")
                    here.settimeout(5)
                    assert here.recv(1) == b"x"
    except OSError as error:
        found = f"{LOOPBACK} does not answer: {error.strerror or error}"
        return Finding(
            "loopback", "limited", found, "local workers cannot join", "ip link set lo up"
        )
    return Finding("loopback", "works", f"{LOOPBACK} answers")


def check_hostname(environ: Mapping[str, str] = os.environ, host: str | None = None) -> Finding:
    """gloo tells the other machines the address that this machine's name leads to."""
    host = host or socket.gethostname()
    networks = [name for _, name in socket.if_nameindex() if name != "lo"][:5]
    costs = "workers on other machines cannot join by gloo; on one machine nothing"
    remedy = f"GLOO_SOCKET_IFNAME=INTERFACE (there is {', '.join(networks) or 'none'})"
    if chosen := environ.get("GLOO_SOCKET_IFNAME"):
        if chosen in (name for _, name in socket.if_nameindex()):
            return Finding("hostname", "works", f"not asked: gloo uses {chosen} by its variable")
        found = f"GLOO_SOCKET_IFNAME is {chosen}, which is not here"
        return Finding("hostname", "limited", found, costs, remedy)
    try:
        addresses = ask(child.addresses_of, host, seconds=NAME_SECONDS)
    except Failed as error:
        found = f"{host} leads nowhere: {error}"
        return Finding("hostname", "limited", found, costs, f"a line in /etc/hosts, or {remedy}")
    found = f"{host} is {', '.join(addresses)}"
    if all(ipaddress.ip_address(address).is_loopback for address in addresses):
        costs = "other machines would be told to dial themselves; on one machine nothing"
        return Finding("hostname", "limited", found, costs, remedy)
    if not any(_is_ours(address) for address in addresses):
        found += ", which is no address of this machine"
        return Finding("hostname", "limited", found, costs, f"a line in /etc/hosts, or {remedy}")
    return Finding("hostname", "works", found)


def _is_ours(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as one:
            one.bind((address, 0))
    except OSError:
        return False
    return True


def check_launcher(environ: Mapping[str, str] = os.environ) -> Finding:
    """Which launcher's worker this process would be, and where it would meet the others."""
    names = launcher_of(environ)
    if not names:
        return _no_launcher(environ)
    who = STARTED_BY.get(names[0], names[0])
    try:
        place = place_by(environ)
    except UserError as error:
        return Finding("launcher", "stops", f"{who}, but {error}", remedy="start it again")
    found = f"{who}: worker {place.rank} of {place.world}"
    if place.world == 1:
        return Finding("launcher", "works", found)
    if store := environ.get("MEGABATCH_STORE"):
        folder = os.path.dirname(os.path.abspath(store))
        if not os.path.isdir(folder):
            found += f", but there is no folder {folder} for MEGABATCH_STORE"
            remedy = "a folder that all machines share"
            return Finding("launcher", "stops", found, "the workers cannot meet", remedy)
        return Finding("launcher", "works", f"{found}, meeting through {store}")
    if "MASTER_ADDR" not in environ:
        first = "$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)"
        return Finding(
            "launcher",
            "stops",
            f"{found}, but MASTER_ADDR is not set",
            "the workers cannot meet",
            f"export MASTER_ADDR={first if 'SLURM_JOB_NODELIST' in environ else 'FIRST_HOST'}, "
            f"or MEGABATCH_STORE=FILE that all can reach",
        )
    master = environ["MASTER_ADDR"]
    try:
        ask(child.addresses_of, master, seconds=NAME_SECONDS)
    except Failed as error:
        found += f", but MASTER_ADDR {master} leads nowhere: {error}"
        remedy = "the first host's address instead of its name"
        return Finding("launcher", "stops", found, "the workers cannot meet", remedy)
    return Finding("launcher", "works", f"{found}, meeting at {master}")


def _no_launcher(environ: Mapping[str, str]) -> Finding:
    found = "none: train starts local workers by itself"
    if "SLURM_JOB_ID" in environ:
        costs = "the job's other machines stay idle"
        remedy = "srun megabatch train ..."
        return Finding("launcher", "limited", f"{found}, inside a Slurm job", costs, remedy)
    for rank, world, *_ in LAUNCHERS:
        there, absent = (rank, world) if rank in environ else (world, rank)
        if there in environ and absent not in environ:
            found = f"{there} is set but {absent} is not, so no launcher is joined"
            costs = "train starts local workers instead"
            remedy = f"set {absent} too, or unset {there}"
            return Finding("launcher", "limited", found, costs, remedy)
    return Finding("launcher", "works", found)
