"""Which parameters decay and adapt: decided by the type of the module and the number of dimensions,
never by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from megabatch.errors import UserError

Group = dict[str, Any]

# _NormBase is the parent of every batch norm and instance norm.
NORMALISATIONS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_CONVOLUTION = nn.modules.conv._ConvNd
# Their weights multiply what comes in, whatever shape they have.
_MULTIPLYING = (_CONVOLUTION, nn.Linear, nn.Bilinear, nn.MultiheadAttention)


def parameter_groups(
    module: nn.Module,
    weight_decay: float,
    *,
    share: float = 1.0,
    decay_all: bool = False,
    adapt_head: bool = True,
) -> list[Group]:
    """One group of weights that decay and adapt, one of all the rest, which does neither.

    The rest is what normalises, what is looked up or added (embeddings, tokens, positions), what
    the module itself declares by timm's `no_weight_decay()`, and what has fewer than two
    dimensions; it learns at `share` of the rate, and decays only if `decay_all`. Without
    `adapt_head` the weight of the last layer, which gives the classes, is a group of its own: it
    decays and does not adapt, and learns at `share` of the rate. Frozen parameters and empty groups
    are left out.
    """
    if not isinstance(module, nn.Module):
        raise UserError(
            f"parameter_groups goes by the types of layers, but was given a "
            f"{type(module).__name__}: give the module itself, not its parameters()"
        )
    for name, p in module.named_parameters():
        if is_lazy(p):  # of no dimensions yet
            raise UserError(f"the module's {name} has no values yet: call it on images once")
    trainable = [p for p in module.parameters() if p.requires_grad]
    # An embedding that is also a layer's weight multiplies.
    multiplying = {
        p for m in module.modules() if isinstance(m, _MULTIPLYING) for p in m.parameters()
    }
    apart = {p for m in module.modules() for p in _apart(m)} - multiplying
    apart |= {p for m in module.modules() for p in _declared(m)}
    last = set() if adapt_head else _head(module)
    adapted: list[nn.Parameter] = []
    head: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for p in trainable:
        (plain if p.ndim < 2 or p in apart else head if p in last else adapted).append(p)
    assert len(adapted) + len(head) + len(plain) == len(trainable)
    groups: list[Group] = [
        {"params": adapted, "weight_decay": weight_decay, "adapt": True, "share": 1.0},
        {"params": head, "weight_decay": weight_decay, "adapt": False, "share": share},
        {
            "params": plain,
            "weight_decay": weight_decay if decay_all else 0.0,
            "adapt": False,
            "share": share,
        },
    ]
    return [group for group in groups if group["params"]]


def _head(module: nn.Module) -> set[nn.Parameter]:
    """What the weight that gives the classes is made of, in nets whose layers stand in the order of
    their use."""
    last = [layer for layer in module.modules() if isinstance(layer, (_CONVOLUTION, nn.Linear))]
    return set(last[-1].parameters()) if last else set()


def _apart(layer: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters of a layer that neither decay nor adapt, whatever their shape."""
    if isinstance(layer, (*NORMALISATIONS, *EMBEDDINGS)):
        yield from layer.parameters()
    elif not isinstance(layer, _MULTIPLYING):
        # One for all images of a batch: it is added, as tokens and positions are, or scales.
        yield from (p for p in layer.parameters(recurse=False) if p.ndim > 2 and len(p) == 1)


def _declared(layer: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters that the model's own author keeps from decaying, in timm's way."""
    declared = getattr(layer, "no_weight_decay", None)
    if callable(declared):
        named = dict(layer.named_parameters())
        yield from (named[name] for name in declared() if name in named)
