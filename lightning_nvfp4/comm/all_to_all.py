"""The two all-to-alls of expert parallelism, dispatch and combine, differentiable and encoded on every leg.

Dispatch copies tokens to their experts, combine brings the outputs back and sums them with their weights; the gradient
of each travels the other's way::

    dispatch_forward   x_TD    -> x_RD       combine_forward    y_RD    -> out_TD = sum over s of w_TS * y
    dispatch_backward  dx_RD   -> dx_TD      combine_backward   dout_TD -> dy_RD  = w * dout

Shapes: T tokens, S = top-k choices of a token, D hidden size, R rows at this rank's experts, padding included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_nvfp4.comm.codec import BlockCodec, Codec
from lightning_nvfp4.comm.link import Link, Pending
from lightning_nvfp4.comm.routing import Route, counting
from lightning_nvfp4.ops import QuantizedTensor
from lightning_nvfp4.ops.rows import TokenSum, move_rows


@dataclass(frozen=True)
class Exchange:
    """What the transfers of one layer have in common.

    Attributes:
        link: the group of ranks.
        codecs: a codec for each of `link.LEGS`.
        route: where the rows of this forward go.
        consistent: rows that stay pass through the codec too, so that results do not depend on the group.
    """

    link: Link
    codecs: Mapping[str, Codec]
    route: Route
    consistent: bool = False


class Dispatch:
    """Tokens on their way to their experts; the gradient comes back between the backwards of `rows` and of this.

    Every rank makes one, and takes what arrives once. What it does in between goes on while the wire is busy.

    Args:
        x_TD: tokens of this rank.
        exchange: see `Exchange`.
        wire_dtype: what a codec that keeps a dtype sends.
        dtype: of the result and, in backward, of what the experts give back.
    """

    def __init__(self, x_TD: Tensor, exchange: Exchange, wire_dtype: torch.dtype, dtype: torch.dtype) -> None:
        self._way = _Way(exchange, wire_dtype, dtype)
        self._ticket = _StartDispatch.apply(x_TD, self._way)

    def rows(self) -> Tensor:
        """Return the rows of this rank's experts (R, D); padding rows are zeros."""
        return _FinishDispatch.apply(self._ticket, self._way, False)

    def codes(self) -> tuple[Tensor, QuantizedTensor]:
        """Return NVFP4 (or other) codes as they arrived, for a GEMM that takes them so.

        They are the bits that quantizing the rows at the experts would give, since every row has its own scales.

        Returns:
            A tensor (R, D) that carries the gradient and has no content, and the quantized rows.
        """
        codec = self._way.exchange.codecs["dispatch_forward"]
        assert isinstance(codec, BlockCodec)
        carrier, rows_RB = _FinishDispatch.apply(self._ticket, self._way, True)
        return carrier, codec.codes(rows_RB, carrier.shape[1])


class Combine:
    """Outputs of the experts on their way back to their tokens; as `Dispatch`.

    Args:
        y_RD: outputs of this rank's experts.
        exchange: of the dispatch that brought the rows.
        dtype: of the result, rounded once.
    """

    def __init__(self, y_RD: Tensor, exchange: Exchange, dtype: torch.dtype = torch.float32) -> None:
        self._way = _Way(exchange, y_RD.dtype, dtype)
        self._ticket = _StartCombine.apply(y_RD, self._way)

    def sum(self, weights_TS: Tensor) -> Tensor:
        """Return the weighted sum (T, D) of each token's outputs, added in FP32 in the order of its choices.

        Args:
            weights_TS: routing weights of this rank's tokens, applied in FP32 after decoding.
        """
        return _FinishCombine.apply(self._ticket, weights_TS, self._way)


class _Way:
    """What the start and the finish of one transfer share, in forward and then, the other way, in backward."""

    def __init__(self, exchange: Exchange, wire_dtype: torch.dtype, dtype: torch.dtype) -> None:
        self.exchange, self.wire_dtype, self.dtype = exchange, wire_dtype, dtype
        self._transfer: Transfer | None = None

    def put(self, transfer: Transfer) -> Tensor:
        """Keep a transfer that has been started; return what stands for it in the graph, which has no elements."""
        self._transfer = transfer
        return transfer.source.new_empty(0, dtype=torch.float32)

    def take(self) -> Transfer:
        """Return the transfer, and let go of it."""
        transfer, self._transfer = self._transfer, None
        assert transfer is not None, "a transfer is finished once"
        return transfer


class _StartDispatch(torch.autograd.Function):
    """Encode and send; in backward receive, decode and sum."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, way: _Way) -> Tensor:
        ctx.way, ctx.dtype = way, x_TD.dtype
        return way.put(start_to_rows(x_TD, None, way.exchange, "dispatch_forward", way.wire_dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        exchange = ctx.way.exchange
        returned = finish_to_tokens(ctx.way.take(), exchange)
        return sum_choices(returned, None, exchange, "dispatch_backward", ctx.dtype), None


class _FinishDispatch(torch.autograd.Function):
    """Receive and decode, unless the codes are wanted; in backward encode and send."""

    @staticmethod
    def forward(ctx: Any, ticket: Tensor, way: _Way, codes: bool) -> Tensor | tuple[Tensor, Tensor]:
        ctx.way, transfer = way, way.take()
        if not codes:
            return finish_to_rows(transfer, way.exchange).to(way.dtype)
        rows_RB = _finish_codes(transfer, way.exchange)
        ctx.mark_non_differentiable(rows_RB)
        return ticket.new_zeros((), dtype=way.dtype).expand(len(rows_RB), transfer.source.shape[1]), rows_RB

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        return ctx.way.put(start_to_tokens(grad_outputs[0], ctx.way.exchange, "dispatch_backward")), None, None


class _StartCombine(torch.autograd.Function):
    """Encode and send; in backward receive and decode."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, way: _Way) -> Tensor:
        ctx.way = way
        return way.put(start_to_tokens(y_RD, way.exchange, "combine_forward"))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return finish_to_rows(ctx.way.take(), ctx.way.exchange), None


class _FinishCombine(torch.autograd.Function):
    """Receive, decode and sum; in backward encode and send the weighted gradient."""

    @staticmethod
    def forward(ctx: Any, ticket: Tensor, weights_TS: Tensor, way: _Way) -> Tensor:
        ctx.way = way
        returned = finish_to_tokens(way.take(), way.exchange)
        ctx.save_for_backward(*returned, weights_TS)
        return sum_choices(returned, weights_TS, way.exchange, "combine_forward", way.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor, None]:
        (grad_TD,), way, ticket = grad_outputs, ctx.way, None
        *saved, weights_TS = ctx.saved_tensors
        grad_TD = grad_TD.float()
        if ctx.needs_input_grad[0]:
            transfer = start_to_rows(grad_TD, weights_TS, way.exchange, "combine_backward", way.wire_dtype)
            ticket = way.put(transfer)
        # While the wire is busy: what the router learns.
        y_TSD = _choices(Returned(*saved), way.exchange, "combine_forward")
        parts = [(y_TSD[:, s].float() * grad_TD).sum(-1) for s in range(weights_TS.shape[1])]
        return ticket, torch.stack(parts, dim=1).to(weights_TS.dtype), None


class Transfer(NamedTuple):
    """Rows on their way.

    Attributes:
        pending: those that leave.
        source: the matrix that they, and those that stay, are taken from.
        weights_TS: factors of the rows.
        leg: which codec.
        dtype: in which the rows are wanted.
    """

    pending: Pending
    source: Tensor
    weights_TS: Tensor | None
    leg: str
    dtype: torch.dtype

    def encoded(self, codec: Codec, choices: Tensor, tokens: Tensor) -> Tensor:
        """Return some of its rows as they are sent."""
        return _encoded(self.source, self.weights_TS, codec, choices, tokens, self.dtype)


def start_to_rows(
    x_TD: Tensor, weights_TS: Tensor | None, exchange: Exchange, leg: str, dtype: torch.dtype
) -> Transfer:
    """Send every token's choices, times their weights, to the experts; a collective that goes on.

    Args:
        x_TD: tokens; float32 where there are weights.
        weights_TS: a factor for each choice.
        exchange: the way.
        leg: which codec.
        dtype: of the rows.
    """
    route = exchange.route
    sent = _encoded(x_TD, weights_TS, exchange.codecs[leg], route.sent_choices, route.sent_tokens, dtype)
    pending = exchange.link.start(sent, route.send, route.receive, leg, x_TD.shape[1])
    return Transfer(pending, x_TD, weights_TS, leg, dtype)


def finish_to_rows(transfer: Transfer, exchange: Exchange) -> Tensor:
    """Return the rows at the experts (R, D); padding rows are zeros."""
    route, codec = exchange.route, exchange.codecs[transfer.leg]
    x_TD, weights_TS = transfer.source, transfer.weights_TS
    out_RD = torch.empty(route.num_rows, x_TD.shape[1], dtype=transfer.dtype, device=x_TD.device)
    # While the wire is busy: the rows that stay.
    if route.padding_rows.shape[0]:
        out_RD.index_fill_(0, route.padding_rows, 0)
    if exchange.consistent:
        codec.decode_rows(transfer.encoded(codec, route.local_choices, route.local_tokens), out_RD, route.local_rows)
    elif weights_TS is None:
        move_rows(x_TD, route.local_tokens, out_RD, route.local_rows)
    else:
        rows = _weighted(x_TD, weights_TS, route.local_choices, route.local_tokens)
        move_rows(rows, None, out_RD, route.local_rows)
    codec.decode_rows(transfer.pending.wait(), out_RD, route.received_rows)
    return out_RD


def _finish_codes(transfer: Transfer, exchange: Exchange) -> Tensor:
    """Return the rows at the experts as bytes (R, B), padding as rows of zeros are encoded."""
    route, codec, x_TD = exchange.route, exchange.codecs[transfer.leg], transfer.source
    kept = transfer.encoded(codec, route.local_choices, route.local_tokens)
    rows_RB = kept.new_empty(route.num_rows, kept.shape[1])
    if route.padding_rows.shape[0]:
        rows_RB[route.padding_rows] = codec.encode(x_TD.new_zeros(1, x_TD.shape[1]), transfer.dtype)
    move_rows(kept, None, rows_RB, route.local_rows)
    move_rows(transfer.pending.wait(), None, rows_RB, route.received_rows)
    return rows_RB


def _encoded(
    x_TD: Tensor, weights_TS: Tensor | None, codec: Codec, choices: Tensor, tokens: Tensor, dtype: torch.dtype
) -> Tensor:
    if weights_TS is None:
        return codec.encode_rows(x_TD, tokens, dtype)
    return codec.encode(_weighted(x_TD, weights_TS, choices, tokens), dtype)


def _weighted(x_TD: Tensor, weights_TS: Tensor, choices: Tensor, tokens: Tensor) -> Tensor:
    return x_TD[tokens] * weights_TS.reshape(-1)[choices].float().unsqueeze(1)


class Returned(NamedTuple):
    """What the tokens get back, as it arrived.

    Attributes:
        received_RB: rows of other ranks, encoded, in the order in which they were sent.
        kept_KD: rows that did not leave, decoded.
        kept_rows: int64, the row of `kept_KD` of each row that stayed.
    """

    received_RB: Tensor
    kept_KD: Tensor
    kept_rows: Tensor


def start_to_tokens(y_RD: Tensor, exchange: Exchange, leg: str) -> Transfer:
    """Send the experts' rows (R, D) back to where their tokens are; a collective that goes on."""
    route = exchange.route
    sent = exchange.codecs[leg].encode_rows(y_RD, route.received_rows, y_RD.dtype)
    pending = exchange.link.start(sent, route.receive, route.send, leg, y_RD.shape[1])
    return Transfer(pending, y_RD, None, leg, y_RD.dtype)


def finish_to_tokens(transfer: Transfer, exchange: Exchange) -> Returned:
    """Return the rows of this rank's tokens."""
    codec, kept, rows = exchange.codecs[transfer.leg], transfer.source, exchange.route.local_rows
    if exchange.consistent:
        kept = codec.decode(codec.encode_rows(kept, rows, kept.dtype), kept.shape[1], kept.dtype)
        rows = counting(kept.shape[0], kept.device)
    return Returned(transfer.pending.wait(), kept, rows)


def sum_choices(
    returned: Returned, weights_TS: Tensor | None, exchange: Exchange, leg: str, dtype: torch.dtype
) -> Tensor:
    """Return the (weighted) sum over each token's choices (T, D), added in FP32 in their order."""
    route, codec = exchange.route, exchange.codecs[leg]
    kept, rows = returned.kept_KD, returned.kept_rows
    what = TokenSum(kept, rows, route.positions, route.own, weights_TS, route.num_choices, dtype)
    fused = codec.sum_rows(returned.received_RB, what)
    if fused is not None:
        return fused
    y_TSD = _choices(returned, exchange, leg)
    total = None
    for s in range(route.num_choices):
        part = y_TSD[:, s].float()
        part = part if weights_TS is None else part * weights_TS[:, s, None].float()
        total = part if total is None else total + part
    assert total is not None
    return total.to(dtype)


def _choices(returned: Returned, exchange: Exchange, leg: str) -> Tensor:
    """Return the row of every choice (T, S, D), decoded."""
    received_RB, kept_KD, kept_rows = returned
    route, codec = exchange.route, exchange.codecs[leg]
    out_CD = kept_KD.new_empty(route.num_tokens * route.num_choices, kept_KD.shape[1])
    move_rows(kept_KD, kept_rows, out_CD, route.local_choices)
    codec.decode_rows(received_RB, out_CD, route.sent_choices)
    return out_CD.view(route.num_tokens, route.num_choices, out_CD.shape[1])
