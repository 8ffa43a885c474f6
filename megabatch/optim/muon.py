"""Muon (Jordan et al. 2024): momentum whose matrices are made orthogonal, with a length for each
weight.

A batch of a large share of the images leaves few steps, and each of them must do more: a step whose
singular values are all alike moves along every direction that the gradients have shown, not along
the few that are largest. The length is LARS's: a share of the weight's own. Such steps would make a
weight longer at every turn, and the next step with it, without end; behind batch norm a length
means nothing, so weights keep theirs and turn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from megabatch.optim.groups import Group
from megabatch.optim.layerwise import (
    Adaptation,
    Layerwise,
    gated,
    rate_of,
    real,
    subtract,
    together,
    write_copies,
)
from megabatch.optim.norms import norms

# Of an odd polynomial that, applied five times, brings singular values from 0.003 to 1 into about
# 0.7 to 1.2: steep at 0, it does not settle at 1 (kellerjordan.github.io/posts/muon).
_POLYNOMIAL = (3.4445, -4.7750, 2.0315)
_TIMES = 5


class Muon(Layerwise):
    """u = momentum u + g; w -= lr trust |w| / |O(u)| O(u), where O makes a matrix orthogonal, and
    then w has the length again that it began with.

    A weight of more dimensions is a matrix of its first by the rest. One of fewer than two takes
    u's own direction, and its length is free. So is that of a matrix which began with zeros: its
    steps are lr trust O(u).
    Weights of a group that does not `adapt` take SGD's step, lr u, and they alone may decay:
    w -= lr weight_decay w. The last layer should be one of them (`parameter_groups(...,
    adapt_head=False)`): logits need a length that may grow.

    nesterov: O of g + momentum u.
    """

    STATE = ("momentum_buffer",)
    SOMETIMES = ("length",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust": trust,
            "nesterov": nesterov,
            "eps": 0.0,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
        }
        super().__init__(params, defaults)

    def _check(self, group: Group) -> None:
        super()._check(group)
        if not group["trust"] > 0:
            raise ValueError(f"trust must be positive, got {group['trust']}.")

    def _check_written(self, group: Group, written: set[str]) -> None:
        if "form" in written:
            raise ValueError(
                "this is the state of LARS, whose momentum has its ratios in it: beside Muon's "
                "gradients it would be nothing."
            )

    def _update(
        self,
        group: Group,
        weights: list[Tensor],
        good: Tensor | None,
        copies: Mapping[Tensor, Tensor],
    ) -> None:
        for part in together(group, weights):
            gate = None if good is None else good.to(part[0].device)
            values, steps = real(part), self._directions(group, part, gate)
            lengths = None
            if group["adapt"]:
                weight_norms, step_norms = norms(values, steps)
                lengths = self._first_lengths(part, weight_norms)
                seen = _ratios(group["trust"], lengths, weight_norms, step_norms)
                torch._foreach_mul_(steps, seen.ratio.unbind())
                self._note(part, seen)
            elif group["weight_decay"] != 0:
                torch._foreach_add_(steps, values, alpha=group["weight_decay"])
            if gate is not None:
                torch._foreach_mul_(steps, gate.to(values[0].dtype))
            subtract(part, steps, rate_of(group))
            if lengths is not None:
                _give_back(values, lengths, gate)
            write_copies(part, copies)

    def _first_lengths(self, weights: list[Tensor], now: Tensor) -> Tensor:
        """That the weights had before their first step; infinite where it is free."""
        for weight, value, length in zip(weights, real(weights), now.unbind(), strict=True):
            if "length" not in self.state[weight]:
                matrix = value.ndim > 1 and value.numel() > 1
                kept = length if matrix else torch.full_like(length, torch.inf)
                # In the weight's dtype, in which torch brings it back from a checkpoint.
                self.state[weight]["length"] = kept.to(weight.dtype, copy=True)
        return torch.stack([self.state[p]["length"] for p in weights]).real.to(now.dtype)

    def _directions(self, group: Group, weights: list[Tensor], good: Tensor | None) -> list[Tensor]:
        """Move the momentum, and return where it points: orthogonal, where weights adapt."""
        momentum, direction = group["momentum"], -1.0 if group["maximize"] else 1.0
        gradients = real([p.grad for p in weights])  # type: ignore[misc]
        buffers = real([self._buffer(weight) for weight in weights])
        # Through a closed gate the gradients are 0: the buffers stay if they do not decay either.
        torch._foreach_mul_(buffers, gated(momentum, good, buffers[0], closed=1.0))
        torch._foreach_add_(buffers, gradients, alpha=direction)
        if group["nesterov"]:
            moved = list(torch._foreach_mul(buffers, momentum))
            torch._foreach_add_(moved, gradients, alpha=direction)
        else:
            moved = buffers
        return orthogonal(moved) if group["adapt"] else [each.clone() for each in moved]

    def _buffer(self, weight: Tensor) -> Tensor:
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        buffer: Tensor = state["momentum_buffer"]
        return buffer


def build(settings: Any, groups: list[Group]) -> Muon:
    """As a config's section has it."""
    return Muon(
        groups,
        lr=0.0,
        momentum=settings.momentum,
        trust=settings.trust,
        nesterov=settings.nesterov,
    )


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
        for row, (matrix, place) in zip(_iterated(batch), members, strict=True):
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


def _iterated(matrices: Tensor) -> Tensor:
    """The polynomial of each matrix's singular values, without taking it apart."""
    a, b, c = _POLYNOMIAL
    # By the largest number first: the squares of small ones, as a momentum that decays has them,
    # are 0 long before they are.
    largest = torch.linalg.vector_norm(matrices, torch.inf, dim=(1, 2), keepdim=True)
    x: Tensor = matrices / torch.where(largest > 0, largest, 1.0)
    x /= x.norm(dim=(1, 2), keepdim=True).clamp(min=1.0)
    if matrices.is_cuda and matrices.dtype == torch.float32:
        x = x.bfloat16()  # singular values need not be more alike than it can tell
    for _ in range(_TIMES):
        square = x @ x.mT
        outer = torch.baddbmm(square, square, square, beta=b, alpha=c)
        x = torch.baddbmm(x, outer, x, beta=a)
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
