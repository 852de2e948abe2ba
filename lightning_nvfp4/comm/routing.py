"""Where rows go: from the tokens of each rank to the experts of all, sorted by expert and padded.

Shapes: T tokens of this rank, S = top-k choices of a token, P ranks of the group, E experts of a rank, R rows at this
rank's experts (padding included).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_nvfp4.comm.link import Link
from lightning_nvfp4.ops import Groups


@dataclass(frozen=True)
class Route:
    """The way of one layer's rows, there and back.

    A choice is the flat number token * S + slot. Rows for other ranks are in the order of rank, expert, choice; so are
    rows from others, by the rank they come from.

    Attributes:
        num_tokens, num_choices: T and S.
        order: int64 (T * S,), the choices by rank and expert.
        own: those in `order` that stay on this rank.
        send, receive: rows for and from each rank; 0 for this one.
        received_rows: int64, place among the R rows of each row from another rank.
        local_rows: int64, place of each row that stays.
        padding_rows: int64, places of the rows that nobody sent.
        groups: rows of each expert.
        num_rows: R.
    """

    num_tokens: int
    num_choices: int
    order: Tensor
    own: slice
    send: tuple[int, ...]
    receive: tuple[int, ...]
    received_rows: Tensor
    local_rows: Tensor
    padding_rows: Tensor
    groups: Groups
    num_rows: int

    @functools.cached_property
    def sent_choices(self) -> Tensor:
        """The choice of each row for another rank."""
        return _without(self.order, self.own)

    @functools.cached_property
    def local_choices(self) -> Tensor:
        """The choice of each row that stays."""
        return self.order[self.own]

    @functools.cached_property
    def tokens(self) -> Tensor:
        """The token of each choice in `order`."""
        return self.order // self.num_choices

    @functools.cached_property
    def sent_tokens(self) -> Tensor:
        """The token of each row for another rank."""
        return _without(self.tokens, self.own)

    @functools.cached_property
    def local_tokens(self) -> Tensor:
        """The token of each row that stays."""
        return self.tokens[self.own]

    @functools.cached_property
    def places(self) -> Tensor:
        """int64 (T * S,): where each choice's output is on its return.

        Row i of what the other ranks send back is i; the i-th row that stayed is -1 - i.
        """
        device, start, count = self.order.device, self.own.start, self.own.stop - self.own.start
        after = torch.arange(start, len(self.order) - count, device=device)
        parts = [torch.arange(start, device=device), torch.arange(-1, -1 - count, -1, device=device), after]
        return torch.empty_like(self.order).index_copy_(0, self.order, torch.cat(parts))


def plan_route(top_k_index: Tensor, num_experts: int, link: Link, alignment: int, per_source: bool) -> Route:
    """Sort the choices by expert, equal ids in token order, and learn what comes from the other ranks.

    The host waits once, for the counts of rows.

    Args:
        top_k_index: (T, S) integer ids of all experts of the group; rank r has those from r * `num_experts`.
        num_experts: E.
        link: the group.
        alignment: rows of an expert are padded to a multiple of it.
        per_source: pad the rows of each source rank apart, so that blocks along tokens do not depend on the group.
    """
    device, size = top_k_index.device, link.size
    sorted_ids, order = top_k_index.reshape(-1).sort(stable=True)
    edges = torch.arange(num_experts * size + 1, device=device, dtype=sorted_ids.dtype)
    send_PE = torch.searchsorted(sorted_ids, edges).diff().view(size, num_experts)
    receive_PE = link.swap_counts(send_PE)
    counts = torch.stack([send_PE, receive_PE]).cpu().numpy()  # the wait

    send, receive = counts.sum(2).tolist()
    first_EP, padding, ends_E = _layout(counts[1].T, alignment, per_source)
    before = counts[1].reshape(-1).cumsum() - counts[1].reshape(-1)
    shifts, padding_rows, offsets = _to_device(
        [first_EP.T.reshape(-1) - before, padding, np.concatenate([[0], ends_E])], device
    )
    total = sum(receive)
    rows = torch.repeat_interleave(shifts, receive_PE.reshape(-1), output_size=total)
    rows = rows + torch.arange(total, device=device)
    own, own_received = _own(send, link.rank), _own(receive, link.rank)
    if device.type == "cpu":
        groups = Groups(num_experts, counts=tuple(np.diff(ends_E, prepend=0).tolist()))
    else:
        groups = Groups(num_experts, offsets=offsets.to(torch.int32))
    return Route(
        num_tokens=top_k_index.shape[0],
        num_choices=top_k_index.shape[1],
        order=order,
        own=own,
        send=tuple(0 if r == link.rank else n for r, n in enumerate(send)),
        receive=tuple(0 if r == link.rank else n for r, n in enumerate(receive)),
        received_rows=_without(rows, own_received),
        local_rows=rows[own_received],
        padding_rows=padding_rows,
        groups=groups,
        num_rows=int(ends_E[-1]),
    )


def _layout(counts_EP: np.ndarray, alignment: int, per_source: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lay rows out by expert, then by source.

    Returns:
        The first row of each (E, P), the rows of padding, and the end of each expert's rows (E,).
    """
    cells_EP = counts_EP.copy()
    if per_source:
        cells_EP += -counts_EP % alignment
    else:
        cells_EP[:, -1] += -counts_EP.sum(1) % alignment
    ends_EP = cells_EP.reshape(-1).cumsum().reshape(cells_EP.shape)
    first_EP = ends_EP - cells_EP
    runs = [np.arange(a, b) for a, b in zip((first_EP + counts_EP).flat, ends_EP.flat, strict=True) if b > a]
    return first_EP, np.concatenate(runs) if runs else np.empty(0, np.int64), ends_EP[:, -1]


def _to_device(arrays: list[np.ndarray], device: torch.device) -> tuple[Tensor, ...]:
    """Return int64 arrays as tensors there, in one copy that the host does not wait for."""
    joined = torch.from_numpy(np.concatenate(arrays).astype(np.int64))
    if device.type == "cuda":
        joined = joined.pin_memory().to(device, non_blocking=True)
    return joined.split([len(array) for array in arrays])


def _own(counts: list[int], rank: int) -> slice:
    start = sum(counts[:rank])
    return slice(start, start + counts[rank])


def _without(x: Tensor, part: slice) -> Tensor:
    if part.start == 0:
        return x[part.stop :]
    return x[: part.start] if part.stop == len(x) else torch.cat([x[: part.start], x[part.stop :]])
