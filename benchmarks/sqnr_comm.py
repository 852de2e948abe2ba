"""How exact each codec is on what a trained model sends: SQNR in dB, for each leg of the all-to-all.

    nvfp4 fit --config recipes/pretrain.yaml
    python benchmarks/sqnr_comm.py --model runs/pretrain [--precision nvfp4-hybrid] [--csv FILE]

One batch of the embedded data, forward and backward. Rows are those of all experts layers; SQNR is the power of the
rows over the power of what the codec changes in them. Ends with status 1 if S2F6 is less than 8 dB above MXFP8 on any
leg.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import defaultdict

import torch
from timing import show
from torch import Tensor

from lightning_nvfp4.comm.codec import CODECS, BlockCodec, PlainCodec
from lightning_nvfp4.comm.expert_parallel import Communication, CompressedAllToAll
from lightning_nvfp4.comm.link import LEGS
from lightning_nvfp4.lm.data.text import TextData
from lightning_nvfp4.lm.hf_model import load_model
from lightning_nvfp4.nn.autocast import bf16_autocast
from lightning_nvfp4.nn.convert import convert
from lightning_nvfp4.recipe import QuantSpec
from lightning_nvfp4.selection import is_experts

ARMS = {
    "mxfp8": CODECS["mxfp8"],
    "mxfp8 e5m2": BlockCodec(QuantSpec("mxfp8", element="e5m2")),
    "nvfp4": CODECS["nvfp4"],
    "s2f6 without RHT": BlockCodec(QuantSpec("s2f6", hadamard=0)),
    "s2f6": CODECS["s2f6"],
}


class Recorder(PlainCodec):
    """Keeps the rows that pass."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def encode(self, x_RD: Tensor, dtype: torch.dtype) -> Tensor:
        """Keep and send."""
        self.seen.append(x_RD.detach().to(dtype))
        return super().encode(x_RD, dtype)

    def encode_rows(self, x_RD: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Keep and send."""
        if len(index):
            return self.encode(x_RD[index], dtype)
        return super().encode_rows(x_RD, index, dtype)


def main() -> int:
    """Record, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="runs/pretrain")
    parser.add_argument("--precision", default="nvfp4-hybrid")
    parser.add_argument("--csv", default="sqnr_comm.csv")
    options = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = record(options.model, options.precision, device)
    table, short = [], False
    for leg in LEGS:
        exact = [seen for seen in rows[leg] if len(seen)]
        by_arm: dict[str, float] = {}
        for name, codec in ARMS.items():
            powers = torch.zeros(2, dtype=torch.float64)
            for x in exact:
                decoded = codec.decode(codec.encode(x, torch.bfloat16), x.shape[1], torch.bfloat16)
                powers += torch.stack([x.double().square().sum(), (decoded.double() - x.double()).square().sum()]).cpu()
            by_arm[name] = 10 * math.log10(powers[0] / powers[1])
        count, width = sum(map(len, exact)), exact[0].shape[1]
        kurtosis = torch.cat([x.double().flatten() for x in exact])
        kurtosis = float((kurtosis / kurtosis.std()).pow(4).mean())
        table.append([leg, str(count), f"{kurtosis:.1f}", *(f"{db:.1f}" for db in by_arm.values())])
        short |= by_arm["s2f6"] < by_arm["mxfp8"] + 8
    plain = CODECS["none"].row_bytes(width, torch.bfloat16)
    share = [f"{codec.row_bytes(width, torch.bfloat16) / plain:.3f}" for codec in ARMS.values()]
    table.append([f"bytes / BF16, hidden {width}", "", "", *share])
    title = f"SQNR in dB of {options.model}, {options.precision}, embedded data, seed 0"
    show(title, ["leg", "rows", "kurtosis", *ARMS], table, device, options.csv)
    return int(short)


def record(folder: str, precision: str, device: str) -> dict[str, list[Tensor]]:
    """Return the rows of each leg in one forward and backward of the model."""
    model = load_model(folder).to(device).train()
    report = convert(model, precision)
    report.context.begin(0, 0, 0, 0)
    communication = Communication(dict.fromkeys(LEGS, "none"), consistent=True)
    recorders = {leg: Recorder() for leg in LEGS}
    communication.codecs.update(recorders)
    for module in list(model.modules()):
        if is_experts(module):
            module.forward = CompressedAllToAll(module, None, None, communication=communication)
    data = TextData("embedded", stage="pretrain", sequence_length=128, batch_size=16, seed=1)
    data.prepare_data()
    data.setup("fit")
    batch = {name: value.to(device) for name, value in next(iter(data.train_dataloader())).items()}
    with bf16_autocast(device):
        loss = model(input_ids=batch["input_ids"], labels=batch["labels"], use_cache=False).loss
    loss.backward()
    found: dict[str, list[Tensor]] = defaultdict(list)
    for leg, recorder in recorders.items():
        found[leg] = recorder.seen
    return found


if __name__ == "__main__":
    sys.exit(main())
