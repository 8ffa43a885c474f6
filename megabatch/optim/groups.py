"""Which parameters decay and adapt: decided by the type of the module and the number of dimensions,
never by name."""

from __future__ import annotations

from typing import Any

from torch import nn

Group = dict[str, Any]

# _NormBase is the parent of every batch norm and instance norm.
NORMALISATIONS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def parameter_groups(
    module: nn.Module, weight_decay: float, *, share: float = 1.0, decay_all: bool = False
) -> list[Group]:
    """One group of weights that decay and adapt, one of all the rest, which does neither.

    The rest is what normalises and what has fewer than two dimensions; it learns at `share` of the
    rate, and decays only if `decay_all`. Frozen parameters and empty groups are left out.
    """
    trainable = [p for p in module.parameters() if p.requires_grad]
    normalising = {
        p for m in module.modules() if isinstance(m, NORMALISATIONS) for p in m.parameters()
    }
    adapted: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for p in trainable:
        (plain if p.ndim < 2 or p in normalising else adapted).append(p)
    assert len(adapted) + len(plain) == len(trainable) == len({*adapted, *plain})
    groups: list[Group] = [
        {"params": adapted, "weight_decay": weight_decay, "adapt": True, "share": 1.0},
        {
            "params": plain,
            "weight_decay": weight_decay if decay_all else 0.0,
            "adapt": False,
            "share": share,
        },
    ]
    return [group for group in groups if group["params"]]
