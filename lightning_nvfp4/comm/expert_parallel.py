"""The expert-parallel forward of an experts module, as an `EPImplementation` of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.distributed.expert_parallel import EPImplementation

from lightning_nvfp4.comm.all_to_all import Combine, Dispatch, Exchange
from lightning_nvfp4.comm.choice import Choice, choose
from lightning_nvfp4.comm.codec import AUTO, CODECS, BlockCodec, Codec, PlainCodec, find_codec
from lightning_nvfp4.comm.link import Link, Traffic
from lightning_nvfp4.comm.routing import Route, plan_routes
from lightning_nvfp4.errors import UserError
from lightning_nvfp4.ops import Groups, QuantizedTensor
from lightning_nvfp4.recipe import GemmRecipe

MOST_PARTS = 64
"""Parts of a rank's tokens: each takes collectives and all launches of the experts once more."""


@dataclass(frozen=True)
class ExpertRows:
    """In the place of `top_k_index`: the rows are sorted by expert and padded already, and are to stay so.

    Attributes:
        groups: rows of each expert.
        codes: the rows as the first GEMM's quantized input, if they arrived so; their tensor then has no content.
        segments: see `Route.segments`; stochastic rounding then draws for each by itself, whichever rank that is on.
        part: which part of the micro-batch's tokens the rows are of; each draws by itself.
    """

    groups: Groups
    codes: QuantizedTensor | None = None
    segments: tuple[tuple[int, int, int], ...] | None = None
    part: int = 0


class _Numerics(Protocol):
    """What is asked of a converted layer; `nn.context.LayerNumerics` is one."""

    native: bool

    @property
    def tokens_alignment(self) -> int: ...

    def effective(self) -> GemmRecipe: ...


@dataclass
class Communication:
    """The settings that all experts modules of a model share, and what they count.

    Attributes:
        names: the codec of each of `link.LEGS`; ``auto`` until the first rows have been measured.
        consistent: results do not depend on the expert-parallel size.
        overlap_degree: parts of a rank's tokens, whose transfers run while the experts work on another part; the same
            on every rank.
        on_choice: called with what ``auto`` became.
        traffic: bytes sent by this rank.
    """

    names: dict[str, str]
    consistent: bool = False
    overlap_degree: int = 1
    on_choice: Callable[[Choice], None] | None = None
    traffic: Traffic = field(default_factory=Traffic)

    def __post_init__(self) -> None:
        degree = self.overlap_degree
        if not isinstance(degree, int) or isinstance(degree, bool) or not 1 <= degree <= MOST_PARTS:
            raise UserError(
                f"overlap_degree = {degree!r} must be a whole number of parts of a rank's tokens, at most "
                f"{MOST_PARTS}: 1, or 2 to 4 where the wire takes about as long as the experts."
            )
        if degree > 1 and self.consistent:
            raise UserError(
                f"overlap_degree = {degree} with consistent = True: blocks along tokens and stochastic rounding would "
                "depend on how the tokens are split. Set overlap_degree to 1, or consistent to False."
            )
        self.use(self.names)

    def use(self, names: Mapping[str, str]) -> None:
        """Take these codecs from now on.

        Raises:
            UserError: an unknown one.
        """
        self.codecs: dict[str, Codec] = {leg: find_codec(name) for leg, name in names.items() if name != AUTO}
        self.names = dict(names)


class CompressedAllToAll(EPImplementation):
    """All-to-all expert parallelism with a codec on every leg.

    An experts module in a block-scaled precision gets its rows sorted, padded and, where the wire's codes are what its
    GEMM would make of them, still quantized; any other runs its own forward on the rows it receives.

    Args:
        experts: the module, its parameters already those of this rank.
        ep_mesh, tp_mesh: as transformers gives them; tensor parallelism is not supported.
        communication: settings and counters.
    """

    def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any, *, communication: Communication) -> None:
        self.experts, self.communication = experts, communication
        self.experts_forward = experts.forward
        self.num_local_experts = experts.num_experts
        self.link = Link(None if ep_mesh is None else ep_mesh.get_group(), communication.traffic)
        if tp_mesh is not None and tp_mesh.size() > 1:
            raise ValueError("The compressed all-to-all has no tensor parallelism: use tp_size=1.")

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted outputs (T, D) of the tokens (T, D) that this rank holds."""
        layers: tuple[_Numerics, ...] | None = getattr(self.experts, "block_scaled_numerics", None)
        alignment = 1 if layers is None else max(layer.tokens_alignment for layer in layers)
        settings, num_local = self.communication, self.num_local_experts
        consistent, parts = settings.consistent, settings.overlap_degree
        routes = plan_routes(top_k_index, num_local, self.link, alignment, per_source=consistent, parts=parts)
        x_TD, weights_TS = (_split(tensor, routes) for tensor in (hidden_states, top_k_weights))
        exchanges = [Exchange(self.link, settings.codecs, route, consistent) for route in routes]
        if AUTO in settings.names.values():
            self._choose(x_TD[0], exchanges[0], layers)
            exchanges = [replace(exchange, codecs=settings.codecs) for exchange in exchanges]
        # Every part is sent before the first is worked on, and returns while the next one is. Backward runs the newest
        # of the nodes that are ready first, so that it does the same from the last part to the first.
        sent = [self._dispatch(x, exchange, layers) for x, exchange in zip(x_TD, exchanges, strict=True)]
        returning = []
        for i, exchange in enumerate(exchanges):
            y_RD = self._experts(sent[i], exchange, layers, i)
            returning.append(Combine(y_RD, exchange, hidden_states.dtype))
        sums = [combine.sum(weights) for combine, weights in zip(returning, weights_TS, strict=True)]
        return sums[0] if parts == 1 else torch.cat(sums)

    def _choose(self, x_TD: Tensor, exchange: Exchange, layers: tuple[_Numerics, ...] | None) -> None:
        takes_nvfp4 = layers is not None and _takes_codes(layers[0], CODECS["nvfp4"])
        dtype = x_TD.dtype if layers is None else torch.bfloat16
        choice = choose(self.communication.names, x_TD, exchange, dtype, takes_nvfp4)
        self.communication.use(choice.names)
        if self.communication.on_choice is not None:
            self.communication.on_choice(choice)

    def _dispatch(self, x_TD: Tensor, exchange: Exchange, layers: tuple[_Numerics, ...] | None) -> Dispatch:
        dtype = x_TD.dtype
        if layers is None:
            return Dispatch(x_TD, exchange, dtype, dtype)
        codec, device = exchange.codecs["dispatch_forward"], x_TD.device.type
        # Codes have fewer bits than BF16: the rows' gradients need no more either where the rest runs in BF16.
        if not isinstance(codec, PlainCodec) and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        if _takes_codes(layers[0], codec):
            x_TD = x_TD.to(torch.bfloat16)
        # These experts round their input to BF16, so that nothing is lost by sending it so.
        return Dispatch(x_TD, exchange, torch.bfloat16, dtype)

    def _experts(self, sent: Dispatch, exchange: Exchange, layers: tuple[_Numerics, ...] | None, part: int) -> Tensor:
        if layers is None:
            return self._own_forward(sent.rows(), exchange.route)
        rows = ExpertRows(exchange.route.groups, segments=exchange.route.segments, part=part)
        if _takes_codes(layers[0], exchange.codecs["dispatch_forward"]):
            carrier, codes = sent.codes()
            return self.experts_forward(carrier, replace(rows, codes=codes), None)
        return self.experts_forward(sent.rows(), rows, None)

    def _own_forward(self, x_RD: Tensor, route: Route) -> Tensor:
        if not x_RD.shape[0]:
            # One row keeps the graph, so that the ranks' collectives in backward meet.
            row = x_RD.sum(0, keepdim=True)
            return self.experts_forward(row, route.order.new_zeros(1, 1), row.new_ones(1, 1))[:0]
        return self.experts_forward(x_RD, route.experts.unsqueeze(1), x_RD.new_ones(x_RD.shape[0], 1))


def _split(x: Tensor, routes: Sequence[Route]) -> Sequence[Tensor]:
    """Return the rows of x of each route's tokens."""
    return [x] if len(routes) == 1 else x.split([route.num_tokens for route in routes])


def _takes_codes(layer: _Numerics, codec: Codec) -> bool:
    """Return whether a layer is handed codes: not where Transformer Engine quantizes its input."""
    return not layer.native and takes_codes(layer.effective(), codec)


def takes_codes(gemm: GemmRecipe, codec: Codec) -> bool:
    """Return whether the codec's codes of a row are those that a layer's first GEMM makes of it, and all it needs.

    The backward has to start from the quantized input too, since the original stays where it came from.
    """
    return isinstance(codec, BlockCodec) and gemm.fprop_input == codec.spec and gemm.source == "dequantized"
