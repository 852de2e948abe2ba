"""Where rows go: from the tokens of each rank to the experts of all, sorted by expert and padded.

Shapes: T tokens of this rank, S = top-k choices of a token, P ranks of the group, E experts of a rank, R rows at this
rank's experts (padding included).
"""

from __future__ import annotations

from dataclasses import dataclass

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
        sent_choices: int64, choice of each row for another rank.
        local_choices: int64, choice of each row that stays.
        send, receive: rows for and from each rank; 0 for this one.
        received_rows: int64, place among the R rows of each row from another rank.
        local_rows: int64, place of each row that stays.
        padding_rows: int64, places of the rows that nobody sent.
        groups: rows of each expert.
        num_rows: R.
        keys: int64 (R,) number of each row that names its source rank and choice; 0 for padding. ``None`` unless asked.
    """

    num_tokens: int
    num_choices: int
    sent_choices: Tensor
    local_choices: Tensor
    send: tuple[int, ...]
    receive: tuple[int, ...]
    received_rows: Tensor
    local_rows: Tensor
    padding_rows: Tensor
    groups: Groups
    num_rows: int

    def tokens_of(self, choices: Tensor) -> Tensor:
        """Return the token of each choice."""
        return choices // self.num_choices


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
    ids = top_k_index.reshape(-1).to(torch.int64)
    order = torch.argsort(ids, stable=True)
    edges = torch.arange(num_experts * size + 1, device=device)
    send_PE = torch.searchsorted(ids[order], edges).diff().view(size, num_experts)
    receive_PE = link.swap_counts(send_PE)
    send, receive, padded_of_source, padded_of_expert = _on_host(send_PE, receive_PE, alignment)
    num_rows = sum(padded_of_source if per_source else padded_of_expert)

    # Rows lie by expert, then by source.
    counts_EP = receive_PE.T
    cells = _padded(counts_EP, alignment) if per_source else counts_EP.clone()
    if not per_source:
        cells[:, -1] += _padded(counts_EP.sum(1), alignment) - counts_EP.sum(1)
    ends_EP = cells.reshape(-1).cumsum(0).view(cells.shape)
    first_EP = ends_EP - cells
    rows = _spread(first_EP.T.reshape(-1), receive_PE.reshape(-1), sum(receive))
    padding = _spread((first_EP + counts_EP).reshape(-1), (cells - counts_EP).reshape(-1), num_rows - sum(receive))

    own_send, own_receive = _own(send, link.rank), _own(receive, link.rank)
    offsets = torch.nn.functional.pad(ends_EP[:, -1], (1, 0)).to(torch.int32)
    groups = Groups(num_experts, offsets=offsets)
    if device.type == "cpu":
        groups = Groups(num_experts, counts=tuple(offsets.diff().tolist()))
    return Route(
        num_tokens=top_k_index.shape[0],
        num_choices=top_k_index.shape[1],
        sent_choices=_without(order, own_send),
        local_choices=order[own_send],
        send=tuple(0 if r == link.rank else n for r, n in enumerate(send)),
        receive=tuple(0 if r == link.rank else n for r, n in enumerate(receive)),
        received_rows=_without(rows, own_receive),
        local_rows=rows[own_receive],
        padding_rows=padding,
        groups=groups,
        num_rows=num_rows,
    )


def _on_host(send_PE: Tensor, receive_PE: Tensor, alignment: int) -> tuple[list[int], ...]:
    """Return rows for and from each rank, and padded rows by source and by expert; the one wait of a layer."""
    size, num_experts = send_PE.shape
    by_source = _padded(receive_PE, alignment).sum(1)
    by_expert = _padded(receive_PE.sum(0), alignment)
    numbers = torch.cat([send_PE.sum(1), receive_PE.sum(1), by_source, by_expert]).tolist()
    return numbers[:size], numbers[size : 2 * size], numbers[2 * size : 3 * size], numbers[3 * size :]


def _padded(counts: Tensor, alignment: int) -> Tensor:
    return (counts + alignment - 1) // alignment * alignment


def _spread(starts: Tensor, counts: Tensor, total: int) -> Tensor:
    """Return start, start + 1, ... for each run of a count, one after another; `total` is the sum of the counts."""
    before = counts.cumsum(0) - counts
    runs = torch.repeat_interleave(starts - before, counts, output_size=total)
    return runs + torch.arange(total, device=starts.device)


def _own(counts: list[int], rank: int) -> slice:
    start = sum(counts[:rank])
    return slice(start, start + counts[rank])


def _without(x: Tensor, part: slice) -> Tensor:
    return torch.cat([x[: part.start], x[part.stop :]])
