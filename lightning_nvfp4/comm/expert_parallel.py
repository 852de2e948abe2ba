"""The expert-parallel forward of an experts module, as an `EPImplementation` of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.distributed.expert_parallel import EPImplementation

from lightning_nvfp4.comm.all_to_all import Exchange, combine, dispatch, dispatch_codes
from lightning_nvfp4.comm.choice import Choice, choose
from lightning_nvfp4.comm.codec import AUTO, CODECS, BlockCodec, Codec, PlainCodec, find_codec
from lightning_nvfp4.comm.link import Link, Traffic
from lightning_nvfp4.comm.routing import Route, plan_route
from lightning_nvfp4.ops import Groups, QuantizedTensor
from lightning_nvfp4.recipe import GemmRecipe


@dataclass(frozen=True)
class ExpertRows:
    """In the place of `top_k_index`: the rows are sorted by expert and padded already, and are to stay so.

    Attributes:
        groups: rows of each expert.
        codes: the rows as the first GEMM's quantized input, if they arrived so; their tensor then has no content.
        segments: see `Route.segments`; stochastic rounding then draws for each by itself, whichever rank that is on.
    """

    groups: Groups
    codes: QuantizedTensor | None = None
    segments: tuple[tuple[int, int, int], ...] | None = None


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
        on_choice: called with what ``auto`` became.
        traffic: bytes sent by this rank.
    """

    names: dict[str, str]
    consistent: bool = False
    on_choice: Callable[[Choice], None] | None = None
    traffic: Traffic = field(default_factory=Traffic)

    def __post_init__(self) -> None:
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
        consistent = self.communication.consistent
        route = plan_route(top_k_index, self.num_local_experts, self.link, alignment, per_source=consistent)
        exchange = Exchange(self.link, self.communication.codecs, route, consistent)
        if AUTO in self.communication.names.values():
            self._choose(hidden_states, exchange, layers)
            exchange = replace(exchange, codecs=self.communication.codecs)
        if layers is None:
            x_RD = dispatch(hidden_states, exchange, hidden_states.dtype, hidden_states.dtype)
            y_RD = self._own_forward(x_RD, route)
        else:
            y_RD = self._converted_forward(hidden_states, exchange, layers[0])
        return combine(y_RD, top_k_weights, exchange, hidden_states.dtype)

    def _choose(self, x_TD: Tensor, exchange: Exchange, layers: tuple[_Numerics, ...] | None) -> None:
        takes_nvfp4 = layers is not None and _takes_codes(layers[0], CODECS["nvfp4"])
        dtype = x_TD.dtype if layers is None else torch.bfloat16
        choice = choose(self.communication.names, x_TD, exchange, dtype, takes_nvfp4)
        self.communication.use(choice.names)
        if self.communication.on_choice is not None:
            self.communication.on_choice(choice)

    def _converted_forward(self, x_TD: Tensor, exchange: Exchange, layer: _Numerics) -> Tensor:
        codec = exchange.codecs["dispatch_forward"]
        rows = ExpertRows(exchange.route.groups, segments=exchange.route.segments)
        device = x_TD.device.type
        # Codes have fewer bits than BF16: the rows' gradients need no more either where the rest runs in BF16.
        dtype = x_TD.dtype
        if not isinstance(codec, PlainCodec) and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        if _takes_codes(layer, codec):
            carrier, codes = dispatch_codes(x_TD.to(torch.bfloat16), exchange, dtype)
            return self.experts_forward(carrier, replace(rows, codes=codes), None)
        # These experts round their input to BF16, so that nothing is lost by sending it so.
        return self.experts_forward(dispatch(x_TD, exchange, torch.bfloat16, dtype), rows, None)

    def _own_forward(self, x_RD: Tensor, route: Route) -> Tensor:
        if not x_RD.shape[0]:
            # One row keeps the graph, so that the ranks' collectives in backward meet.
            row = x_RD.sum(0, keepdim=True)
            return self.experts_forward(row, route.order.new_zeros(1, 1), row.new_ones(1, 1))[:0]
        return self.experts_forward(x_RD, route.experts.unsqueeze(1), x_RD.new_ones(x_RD.shape[0], 1))


def _takes_codes(layer: _Numerics, codec: Codec) -> bool:
    """Return whether a layer is handed codes: not where Transformer Engine quantizes its input."""
    return not layer.native and takes_codes(layer.effective(), codec)


def takes_codes(gemm: GemmRecipe, codec: Codec) -> bool:
    """Return whether the codec's codes of a row are those that a layer's first GEMM makes of it, and all it needs.

    The backward has to start from the quantized input too, since the original stays where it came from.
    """
    return isinstance(codec, BlockCodec) and gemm.fprop_input == codec.spec and gemm.source == "dequantized"
