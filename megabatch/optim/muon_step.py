"""The arithmetic of one step of Muon: `MuonUpdate` says what it is, `update` does it on any
device.

The kernel in `kernels/muon.py` is another `MuonUpdate`, under the name `update`; this one is its
plain twin.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megabatch.optim.layerwise import Adaptation, Number, gated, subtract
from megabatch.optim.norms import norms

# Of an odd polynomial that, applied five times, brings singular values from 0.003 to 1 into about
# 0.7 to 1.2: steep at 0, it does not settle at 1 (kellerjordan.github.io/posts/muon).
_POLYNOMIAL = (3.4445, -4.7750, 2.0315)
_TIMES = 5


class MuonSettings(NamedTuple):
    """What a step needs of a group, each number ready to use."""

    rate: Number  # lr times share
    momentum: float
    weight_decay: float
    trust: float | None  # None: no adaptation, SGD's step
    nesterov: bool
    maximize: bool


class MuonUpdate(Protocol):
    """One step of Muon over weights of one device and dtype; the seam for a kernel.

    weights, buffers: changed in place.
    gradients: not changed; of the weights' shapes, perhaps of another memory layout.
    lengths: of each weight, a 0-dim tensor: what it keeps; infinite where it is free. [] without
        trust.
    good: a 0-dim boolean on the device, or None for true. Where it is false weights and buffers
        stay as they were, and gradients are 0. Never read by the host.
    copies: (i, tensor) for each weight that has a copy in another precision, which then is written.
    Returns ratios and norms as three float64 vectors in the weights' order, None without trust. The
    norms are of the weights before the step and of the step that is made orthogonal.

    Per weight, with g = -gradient under `maximize`: v = momentum v + g; u = g + momentum v under
    nesterov, else v. With trust w -= rate trust |w| / |O(u)| O(u), and then w has its length again;
    without, w -= rate (u + decay w).
    """

    def __call__(
        self,
        weights: list[Tensor],
        gradients: list[Tensor],
        buffers: list[Tensor],
        lengths: list[Tensor],
        settings: MuonSettings,
        good: Tensor | None,
        copies: list[tuple[int, Tensor]],
    ) -> Adaptation | None: ...


def update(
    weights: list[Tensor],
    gradients: list[Tensor],
    buffers: list[Tensor],
    lengths: list[Tensor],
    settings: MuonSettings,
    good: Tensor | None,
    copies: list[tuple[int, Tensor]],
) -> Adaptation | None:
    """`MuonUpdate` by torch's foreach operations, on any device."""
    moved = _moved(gradients, buffers, settings, good)
    seen = None
    if settings.trust is not None:
        steps = orthogonal(moved)
        weight_norms, step_norms = norms(weights, steps)
        kept = torch.stack(lengths).real.to(weight_norms.dtype)
        seen = _ratios(settings.trust, kept, weight_norms, step_norms)
        torch._foreach_mul_(steps, seen.ratio.unbind())
    else:
        steps = [each.clone() for each in moved]
        if settings.weight_decay != 0:
            torch._foreach_add_(steps, weights, alpha=settings.weight_decay)
    if good is not None:
        torch._foreach_mul_(steps, good.to(weights[0].dtype))
    subtract(weights, steps, settings.rate)
    if seen is not None:
        _give_back(weights, kept, good)
    if copies:
        torch._foreach_copy_([copy for _, copy in copies], [weights[i] for i, _ in copies])
    return seen


def _moved(
    gradients: list[Tensor], buffers: list[Tensor], settings: MuonSettings, good: Tensor | None
) -> list[Tensor]:
    """Move the momentum, and return where it points."""
    momentum, direction = settings.momentum, -1.0 if settings.maximize else 1.0
    # Through a closed gate the gradients are 0: the buffers stay if they do not decay either.
    torch._foreach_mul_(buffers, gated(momentum, good, buffers[0], closed=1.0))
    torch._foreach_add_(buffers, gradients, alpha=direction)
    if not settings.nesterov:
        return buffers
    moved = list(torch._foreach_mul(buffers, momentum))
    torch._foreach_add_(moved, gradients, alpha=direction)
    return moved


def orthogonal(tensors: list[Tensor], pad: bool | None = None) -> list[Tensor]:
    """Each as the nearest matrix with about equal singular values; vectors as they are.

    Matrices of one shape go through one product. `pad` (on a GPU): those of as many rows do, with
    columns of zeros, which change no product of theirs: a net has many layers, few widths, and a
    launch of its own for each would take longer than the zeros.
    """
    found = [tensor.clone() if tensor.ndim < 2 else torch.empty_like(tensor) for tensor in tensors]
    alike: dict[tuple[Any, ...], list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for tensor, place in zip(tensors, found, strict=True):
        if tensor.ndim >= 2 and tensor.numel():
            matrix, place = _wide(_as_it_lies(tensor, tensor)), _as_it_lies(place, tensor)
            filled = tensor.is_cuda if pad is None else pad
            columns = None if filled else matrix.shape[1]
            alike[tensor.device, tensor.dtype, matrix.shape[0], columns].append((matrix, place))
    for members in alike.values():
        most = max(matrix.shape[1] for matrix, _ in members)
        batch = members[0][0].new_zeros(len(members), len(members[0][0]), most)
        for row, (matrix, _) in zip(batch, members, strict=True):
            row[:, : matrix.shape[1]] = matrix
        for row, (matrix, place) in zip(_normalised_and_iterated(batch), members, strict=True):
            _put(row[:, : matrix.shape[1]], place)
    return found


def _as_it_lies(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor's dimensions in the order in which `like` has them in memory: a matrix of it is no
    copy, and an order of columns changes nothing."""
    last = like.ndim == 4 and like.is_contiguous(memory_format=torch.channels_last)
    return tensor.permute(0, 2, 3, 1) if last else tensor


def _wide(tensor: Tensor) -> Tensor:
    """A tensor's matrix, its first dimension by the rest, turned so that it has no more rows than
    columns."""
    matrix = tensor.flatten(1)
    return matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix


def _put(matrix: Tensor, place: Tensor) -> None:
    """Write a matrix to where a tensor of its own lies: the way back from _wide()."""
    if len(place) != len(matrix):
        matrix = matrix.mT
    place.copy_(matrix.unflatten(1, place.shape[1:]))


def _normalised_and_iterated(matrices: Tensor) -> Tensor:
    # By the largest number first: the squares of small ones, as a momentum that decays has them,
    # are 0 long before they are.
    largest = torch.linalg.vector_norm(matrices, torch.inf, dim=(1, 2), keepdim=True)
    x: Tensor = matrices / torch.where(largest > 0, largest, 1.0)
    x /= x.norm(dim=(1, 2), keepdim=True).clamp(min=1.0)
    if matrices.is_cuda and matrices.dtype == torch.float32:
        x = x.bfloat16()  # singular values need not be more alike than it can tell
    return iterated(x)


def iterated(x: Tensor, out: Tensor | None = None) -> Tensor:
    """The polynomial of the singular values of each matrix, whose length is 1, without taking it
    apart; `out` may be x itself, which only the first time reads."""
    a, b, c = _POLYNOMIAL
    for left in reversed(range(_TIMES)):
        square = x @ x.mT
        outer = torch.baddbmm(square, square, square, beta=b, alpha=c)
        x = torch.baddbmm(x, outer, x, beta=a, out=None if left else out)
    return x


def _ratios(trust: float, lengths: Tensor, weight_norms: Tensor, step_norms: Tensor) -> Adaptation:
    """What makes each step a share of its weight. A weight that began with zeros has no length, and
    its steps stay as long as they are, times the share: else it would grow without end."""
    known = torch.minimum(torch.minimum(weight_norms, step_norms), lengths) > 0
    ratios = trust * torch.where(known, weight_norms / step_norms, 1.0)
    return Adaptation(ratios, weight_norms, step_norms)


def _give_back(weights: list[Tensor], lengths: Tensor, good: Tensor | None) -> None:
    """Bring weights to these lengths, where there is one and the step counts."""
    (now,) = norms(weights)
    factors = lengths / now
    # What is as long as its dtype can tell stays as it is, however often it is asked for.
    near = (factors - 1).abs() <= torch.finfo(weights[0].dtype).eps
    kept = (lengths > 0) & lengths.isfinite() & (now > 0) & ~near
    if good is not None:
        kept &= good
    torch._foreach_mul_(weights, torch.where(kept, factors, 1.0).unbind())
