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
from lightning_nvfp4.comm.link import Link
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


def dispatch(x_TD: Tensor, exchange: Exchange, wire_dtype: torch.dtype, dtype: torch.dtype) -> Tensor:
    """Return the rows of this rank's experts (R, D) in `dtype`; padding rows are zeros.

    Args:
        x_TD: tokens of this rank.
        exchange: see `Exchange`.
        wire_dtype: what a codec that keeps a dtype sends.
        dtype: of the result and, in backward, of what the experts give back.
    """
    return _AllToAll.apply(x_TD, None, exchange, True, wire_dtype, dtype)


def dispatch_codes(x_TD: Tensor, exchange: Exchange, dtype: torch.dtype) -> tuple[Tensor, QuantizedTensor]:
    """Send NVFP4 (or other) codes and return them undecoded, for a GEMM that takes them so.

    They are the bits that quantizing the rows at the experts would give, since every row has its own scales.

    Returns:
        A tensor (R, D) of `dtype` that carries the gradient and has no content, and the quantized rows.
    """
    codec = exchange.codecs["dispatch_forward"]
    assert isinstance(codec, BlockCodec)
    carrier, rows_RB = _AllToAll.apply(x_TD, None, exchange, True, None, dtype)
    return carrier, codec.codes(rows_RB, x_TD.shape[1])


def combine(y_RD: Tensor, weights_TS: Tensor, exchange: Exchange, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the weighted sum (T, D) of each token's outputs, added in FP32 in the order of its choices.

    Args:
        y_RD: outputs of this rank's experts.
        weights_TS: routing weights of this rank's tokens, applied in FP32 after decoding.
        exchange: of the dispatch that brought the rows.
        dtype: of the result, rounded once.
    """
    return _AllToAll.apply(y_RD, weights_TS, exchange, False, y_RD.dtype, dtype)


class _AllToAll(torch.autograd.Function):
    """Encode, send and decode, forward and backward; to the experts, or back to the tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights_TS: Tensor | None,
        exchange: Exchange,
        to_experts: bool,
        wire_dtype: torch.dtype | None,
        dtype: torch.dtype,
    ) -> Tensor | tuple[Tensor, Tensor]:
        ctx.exchange, ctx.to_experts, ctx.x_dtype = exchange, to_experts, x.dtype
        if to_experts and wire_dtype is None:
            rows_RB = _codes_to_rows(x, exchange, "dispatch_forward")
            ctx.mark_non_differentiable(rows_RB)
            return x.new_zeros((), dtype=dtype).expand(exchange.route.num_rows, x.shape[1]), rows_RB
        if to_experts:
            assert wire_dtype is not None
            return tokens_to_rows(x, None, exchange, "dispatch_forward", wire_dtype).to(dtype)
        assert weights_TS is not None
        returned = rows_to_tokens(x, exchange, "combine_forward")
        ctx.save_for_backward(*returned, weights_TS)
        return sum_choices(returned, weights_TS, exchange, "combine_forward", dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        grad, exchange, dweights = grad_outputs[0], ctx.exchange, None
        if ctx.to_experts:
            returned = rows_to_tokens(grad, exchange, "dispatch_backward")
            dx = sum_choices(returned, None, exchange, "dispatch_backward", ctx.x_dtype)
        else:
            *saved, weights_TS = ctx.saved_tensors
            dx = tokens_to_rows(grad.float(), weights_TS, exchange, "combine_backward", ctx.x_dtype)
            y_TSD = _choices(Returned(*saved), exchange, "combine_forward")
            parts = [(y_TSD[:, s].float() * grad.float()).sum(-1) for s in range(weights_TS.shape[1])]
            dweights = torch.stack(parts, dim=1).to(weights_TS.dtype)
        return dx, dweights, None, None, None, None


def tokens_to_rows(x_TD: Tensor, weights_TS: Tensor | None, exchange: Exchange, leg: str, dtype: torch.dtype) -> Tensor:
    """Return the rows at the experts (R, D) of every token's choices, times their weights; a collective.

    Args:
        x_TD: tokens; float32 where there are weights.
        weights_TS: a factor for each choice.
        exchange: the way.
        leg: which codec.
        dtype: of the result.
    """
    route, codec = exchange.route, exchange.codecs[leg]

    def encoded(choices: Tensor, tokens: Tensor) -> Tensor:
        if weights_TS is None:
            return codec.encode_rows(x_TD, tokens, dtype)
        return codec.encode(_weighted(x_TD, weights_TS, choices, tokens), dtype)

    sent = encoded(route.sent_choices, route.sent_tokens)
    pending = exchange.link.start(sent, route.send, route.receive, leg, x_TD.shape[1])
    out_RD = torch.empty(route.num_rows, x_TD.shape[1], dtype=dtype, device=x_TD.device)
    # While the wire is busy: the rows that stay.
    if route.padding_rows.shape[0]:
        out_RD.index_fill_(0, route.padding_rows, 0)
    if exchange.consistent:
        codec.decode_rows(encoded(route.local_choices, route.local_tokens), out_RD, route.local_rows)
    elif weights_TS is None:
        move_rows(x_TD, route.local_tokens, out_RD, route.local_rows)
    else:
        rows = _weighted(x_TD, weights_TS, route.local_choices, route.local_tokens)
        move_rows(rows, None, out_RD, route.local_rows)
    codec.decode_rows(pending.wait(), out_RD, route.received_rows)
    return out_RD


def _weighted(x_TD: Tensor, weights_TS: Tensor, choices: Tensor, tokens: Tensor) -> Tensor:
    return x_TD[tokens] * weights_TS.reshape(-1)[choices].float().unsqueeze(1)


def _codes_to_rows(x_TD: Tensor, exchange: Exchange, leg: str) -> Tensor:
    """Return the rows at the experts as bytes (R, B), padding as rows of zeros are encoded."""
    route, codec = exchange.route, exchange.codecs[leg]
    sent = codec.encode_rows(x_TD, route.sent_tokens, x_TD.dtype)
    pending = exchange.link.start(sent, route.send, route.receive, leg, x_TD.shape[1])
    rows_RB = sent.new_empty(route.num_rows, sent.shape[1])
    if route.padding_rows.shape[0]:
        rows_RB[route.padding_rows] = codec.encode(x_TD.new_zeros(1, x_TD.shape[1]), x_TD.dtype)
    move_rows(codec.encode_rows(x_TD, route.local_tokens, x_TD.dtype), None, rows_RB, route.local_rows)
    move_rows(pending.wait(), None, rows_RB, route.received_rows)
    return rows_RB


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


def rows_to_tokens(y_RD: Tensor, exchange: Exchange, leg: str) -> Returned:
    """Send the experts' rows (R, D) back to where their tokens are; a collective."""
    route, codec = exchange.route, exchange.codecs[leg]
    sent = codec.encode_rows(y_RD, route.received_rows, y_RD.dtype)
    pending = exchange.link.start(sent, route.receive, route.send, leg, y_RD.shape[1])
    kept, rows = y_RD, route.local_rows
    if exchange.consistent:
        kept = codec.decode(codec.encode_rows(y_RD, rows, y_RD.dtype), y_RD.shape[1], y_RD.dtype)
        rows = counting(kept.shape[0], kept.device)
    return Returned(pending.wait(), kept, rows)


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
