"""Moments of several processes, summed: every rank then holds those of all tokens, and fits the same mapper."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from kvferry.errors import InvalidInput, TransferFailed
from kvferry.map.moments import Moments


def all_reduce(moments: Moments, group: Any = None) -> None:
    """Replace ``moments``, in place, by the sum over the ranks of a process group.

    The ranks' shifts differ; all move to that of the lowest rank that has tokens, in float64, before the sum.

    Raises:
        InvalidInput: no process group is initialised.
        TransferFailed: the ranks have different layouts, or one of them is gone.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        raise InvalidInput("no process group: call torch.distributed.init_process_group first")
    try:
        _all_reduce(moments, group)
    except RuntimeError as error:
        raise TransferFailed(f"the ranks' moments could not be summed: {error}") from error


def _all_reduce(moments: Moments, group: Any) -> None:
    world = distributed.get_world_size(group)
    counts: list[Any] = [None] * world
    distributed.all_gather_object(counts, (moments.layout.digest, moments.count), group=group)
    if len({digest for digest, _ in counts}) != 1:
        raise TransferFailed("the ranks fit different layouts: start all of them with the same settings")
    leader = next((rank for rank, (_, count) in enumerate(counts) if count), None)
    if leader is None:
        return
    shift_x, shift_y = moments.shift_x, moments.shift_y
    if shift_x is None or shift_y is None:
        shift_x, shift_y = torch.zeros_like(moments.sum_x), torch.zeros_like(moments.sum_y)
    shift_x, shift_y = shift_x.clone(), shift_y.clone()
    place = leader if group is None else distributed.get_global_rank(group, leader)
    distributed.broadcast(shift_x, src=place, group=group)
    distributed.broadcast(shift_y, src=place, group=group)
    moved = moments.about(shift_x, shift_y)
    for _, tensor in moved._sums():
        distributed.all_reduce(tensor, group=group)
    moments.count = sum(count for _, count in counts)
    moments.shift_x, moments.shift_y = shift_x, shift_y
    moments.sum_x, moments.sum_y, moments.energy = moved.sum_x, moved.sum_y, moved.energy
    moments.gram, moments.cross = moved.gram, moved.cross
