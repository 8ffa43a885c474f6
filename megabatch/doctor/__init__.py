"""What works on this machine: each part of a run is tried, not looked up, and judged in words.

Whatever may crash, hang or raise (an import, a GPU, a name server, workers that join) is tried in a
child process with a time limit, so that a broken part costs its own row and nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from megabatch.doctor import compilers, machine, network, software
from megabatch.doctor.child import first_line
from megabatch.doctor.finding import Finding

Check = Callable[[], Finding]


def examine() -> list[Finding]:
    """Try every part; raises nothing, whatever the parts do."""
    facts = software.torch_facts()
    checks: list[tuple[str, Check]] = [
        ("Python", software.check_python),
        ("torch", partial(software.check_torch, facts)),
        ("CUDA", partial(software.check_cuda, facts)),
        ("NCCL", partial(software.check_nccl, facts)),
        ("gloo", partial(software.check_gloo, facts)),
        ("training step", partial(software.check_training, facts)),
        ("compiler", partial(compilers.check_compiler, facts)),
        ("launcher", network.check_launcher),
        ("cores", machine.check_cores),
        ("memory", machine.check_memory),
        ("shared memory", machine.check_shared_memory),
        ("open files", machine.check_open_files),
        ("working folder", machine.check_folder),
        ("loopback", network.check_loopback),
        ("hostname", network.check_hostname),
        *[(one.name, partial(software.check_library, one)) for one in software.LIBRARIES],
        ("torchvision, timm", partial(software.check_torchvision, facts)),
    ]
    # Threads only wait for their children; a few at a time, so that small machines are not flooded.
    with ThreadPoolExecutor(max(2, (os.cpu_count() or 2) // 2)) as pool:
        return list(pool.map(_guarded, checks))


def conclusion(findings: list[Finding]) -> tuple[bool, str]:
    """Whether training can work here, and one sentence that says why not."""
    stopped = [f"{finding.part}: {finding.found}" for finding in findings if not finding.allows]
    if stopped:
        return False, f"training cannot work here: {'; '.join(stopped)}"
    limited = [finding.part for finding in findings if finding.state == "limited"]
    return True, "training works here" + (f"; limited: {', '.join(limited)}" if limited else "")


def _guarded(check: tuple[str, Check]) -> Finding:
    part, look = check
    try:
        return look()
    except Exception as error:
        found = f"could not be examined: {type(error).__name__}: {first_line(error)}"
        return Finding(part, "limited", found, "nothing is known of it; training may still work")
