"""Where rows go: from the tokens of each rank to the experts of all, sorted by expert and padded.

Shapes: T tokens of this rank, S = top-k choices of a token, P ranks of the group, E experts of a rank, R rows at this
rank's experts (padding included), N parts of the tokens.
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
        sent_choices, sent_tokens: int64, choice and token of each row for another rank.
        local_choices, local_tokens: int64, choice and token of each row that stays.
        send, receive: rows for and from each rank; 0 for this one.
        received_rows: int64, place among the R rows of each row from another rank.
        local_rows: int64, place of each row that stays.
        padding_rows: int64, places of the rows that nobody sent.
        ends: int64 (E,), the end of each expert's rows.
        num_rows: R.
        segments: first row, end and number of each part that one source sends to one expert, padding included; the
            number names both among all. ``None`` unless padded per source.
    """

    num_tokens: int
    num_choices: int
    order: Tensor
    own: slice
    sent_choices: Tensor
    sent_tokens: Tensor
    local_choices: Tensor
    local_tokens: Tensor
    send: tuple[int, ...]
    receive: tuple[int, ...]
    received_rows: Tensor
    local_rows: Tensor
    padding_rows: Tensor
    ends: Tensor
    num_rows: int
    segments: tuple[tuple[int, int, int], ...] | None = None

    @functools.cached_property
    def positions(self) -> Tensor:
        """int64 (T * S,): where each choice stands in `order`."""
        return torch.empty_like(self.order).index_copy_(0, self.order, counting(self.order.shape[0], self.order.device))

    @functools.cached_property
    def groups(self) -> Groups:
        """Rows of each expert."""
        ends = self.ends
        if ends.device.type == "cpu":
            return Groups(len(ends), counts=tuple(ends.diff(prepend=ends.new_zeros(1)).tolist()))
        return Groups(len(ends), offsets=torch.nn.functional.pad(ends, (1, 0)).to(torch.int32))

    @functools.cached_property
    def experts(self) -> Tensor:
        """int64 (R,): the expert of each row."""
        return torch.searchsorted(self.ends, counting(self.num_rows, self.ends.device), right=True)


_counted: dict[torch.device, Tensor] = {}


def counting(length: int, device: torch.device) -> Tensor:
    """Return 0, 1, ... as int64; not to be written to."""
    kept = _counted.get(device)
    if kept is None or kept.shape[0] < length:
        kept = _counted[device] = torch.arange(max(2 * length, 1024), device=device)
    return kept[:length]


def plan_routes(
    top_k_index: Tensor, num_experts: int, link: Link, alignment: int, per_source: bool, parts: int = 1
) -> list[Route]:
    """Sort the choices by expert, equal ids in token order, and learn what comes from the other ranks.

    The host waits once, for the counts of rows.

    Args:
        top_k_index: (T, S) integer ids of all experts of the group; rank r has those from r * `num_experts`.
        num_experts: E.
        link: the group.
        alignment: rows of an expert are padded to a multiple of it.
        per_source: pad the rows of each source rank apart, so that blocks along tokens do not depend on the group.
        parts: tokens are split into that many runs of nearly equal length, empty ones if there are fewer tokens; the
            same on every rank.

    Returns:
        The route of each part, whose tokens and choices count from its own first token.
    """
    device, size, num_choices = top_k_index.device, link.size, top_k_index.shape[1]
    tokens = split_sizes(top_k_index.shape[0], parts)
    choices = [length * num_choices for length in tokens]
    ids = top_k_index.reshape(-1)
    if parts > 1:  # all are sorted at once, those of the first part to the front
        ids = torch.cat([part + i * size * num_experts for i, part in enumerate(ids.split(choices))])
    sorted_ids, order = ids.sort(stable=True)
    edges = counting(parts * size * num_experts + 1, device).to(sorted_ids.dtype)
    send_PNE = torch.searchsorted(sorted_ids, edges).diff().view(parts, size, num_experts).transpose(0, 1)
    receive_PNE = link.swap_counts(send_PNE)
    counts = torch.stack([send_PNE, receive_PNE]).cpu().numpy()  # the wait
    routes = []
    for i, part in enumerate(order.split(choices)):
        part = part - sum(choices[:i]) if i else part
        shape = tokens[i], num_choices
        routes.append(_route(shape, part, receive_PNE[:, i], counts[:, :, i], link, alignment, per_source))
    return routes


def split_sizes(length: int, parts: int) -> list[int]:
    """Return the sizes of runs of nearly equal length, the longer ones first."""
    return [length // parts + (i < length % parts) for i in range(parts)]


def _route(
    shape: tuple[int, int],
    order: Tensor,
    receive_PE: Tensor,
    counts: np.ndarray,
    link: Link,
    alignment: int,
    per_source: bool,
) -> Route:
    """Return the route of some tokens.

    Args:
        shape: T and S.
        order: as in `Route`.
        receive_PE: how many rows each rank sends to each expert here.
        counts: (2, P, E), rows that go to, and come from, each rank and expert.
        link: as in `plan_routes`, and so are the rest.
        alignment: of each expert's rows.
        per_source: or of each source's.
    """
    send, receive = counts.sum(2).tolist()
    first_EP, ends_EP, padding = _layout(counts[1].T, alignment, per_source)
    flat = counts[1].reshape(-1)
    shifts, padding_rows, ends = _to_device(
        [first_EP.T.reshape(-1) - (flat.cumsum() - flat), padding, ends_EP[:, -1]], order.device
    )
    total = sum(receive)
    rows = torch.repeat_interleave(shifts, receive_PE.reshape(-1), output_size=total) + counting(total, order.device)
    own, own_received = _own(send, link.rank), _own(receive, link.rank)
    send[link.rank] = receive[link.rank] = 0
    tokens = order // shape[1]
    return Route(
        num_tokens=shape[0],
        num_choices=shape[1],
        order=order,
        own=own,
        sent_choices=_without(order, own),
        sent_tokens=_without(tokens, own),
        local_choices=order[own],
        local_tokens=tokens[own],
        send=tuple(send),
        receive=tuple(receive),
        received_rows=_without(rows, own_received),
        local_rows=rows[own_received],
        padding_rows=padding_rows,
        ends=ends,
        num_rows=int(ends_EP[-1, -1]),
        segments=_segments(first_EP, ends_EP, link) if per_source else None,
    )


def _segments(first_EP: np.ndarray, ends_EP: np.ndarray, link: Link) -> tuple[tuple[int, int, int], ...]:
    num_experts, size = first_EP.shape
    experts = link.rank * num_experts + np.arange(num_experts)
    numbers_EP = np.array(link.sources) * (num_experts * size) + experts[:, None]
    cells = zip(first_EP.flat, ends_EP.flat, numbers_EP.flat, strict=True)
    return tuple((int(start), int(end), int(number)) for start, end, number in cells if end > start)


def _layout(counts_EP: np.ndarray, alignment: int, per_source: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lay rows out by expert, then by source.

    Returns:
        The first row and the end of each (E, P), the end including padding, and the rows of padding.
    """
    cells_EP = counts_EP.copy()
    if alignment == 1:
        pass
    elif per_source:
        cells_EP += -counts_EP % alignment
    else:
        cells_EP[:, -1] += -counts_EP.sum(1) % alignment
    ends_EP = cells_EP.reshape(-1).cumsum().reshape(cells_EP.shape)
    first_EP = ends_EP - cells_EP
    runs = []
    if alignment > 1:
        runs = [np.arange(a, b) for a, b in zip((first_EP + counts_EP).flat, ends_EP.flat, strict=True) if b > a]
    return first_EP, ends_EP, np.concatenate(runs) if runs else np.empty(0, np.int64)


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
    if not part.start:
        return x[part.stop :]
    return x[: part.start] if part.stop == x.shape[0] else torch.cat([x[: part.start], x[part.stop :]])
