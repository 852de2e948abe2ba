"""Check an evaluation in BF16 against lm-evaluation-harness run on its own: same model, same documents, same digits.

    nvfp4 eval --config eval/offline.yaml --data-dir DATA --checkpoint MODEL --precision bf16 --out OUT
    python benchmarks/check_lm_eval.py OUT/offline.bf16.json --data-dir DATA

The harness loads the model itself (FP32 weights, BF16 autocast, log-softmax in FP32), and runs its stock tasks
unchanged: the data are laid out as the hub's repositories in a temporary folder. Tasks that the result lacks, and MBPP,
are left out. On a CPU without BF16 instructions attention is this package's on both sides: in FP32. Prints one row for
each score, with the number of documents whose answers are equal bit for bit, and exits with 1 on a difference.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ |= dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE", "HF_ALLOW_CODE_EVAL"), "1")

import torch

from lightning_nvfp4.evaluation.articles import read_articles
from lightning_nvfp4.evaluation.documents import load_documents
from lightning_nvfp4.evaluation.results import EvalResult, Sample, read_result
from lightning_nvfp4.nn.autocast import attention_of_autocast

GROUPS = {"mmlu": "subject", "mmlu_pro": "category"}
CODE_EVAL = """
import evaluate
import datasets
from lightning_nvfp4.lm.rl.sandbox import Program
from lightning_nvfp4.lm.rl.sandbox import run_many

class CodeEval(evaluate.Metric):
    def _info(self):
        text = datasets.Value("string")
        features = datasets.Features({"predictions": datasets.Sequence(text), "references": text})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references, k=(1,), **options):
        programs = [Program(p[0], r) for p, r in zip(predictions, references)]
        results = run_many(programs, timeout=5, workers=1, packages=(), allow_unsafe=True, memory_bytes=1 << 30)
        return {"pass@1": sum(r.passed for r in results) / len(results)}, {}
"""


def main() -> int:
    """Compare and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", help="file that nvfp4 eval wrote, of a Hugging Face folder in bf16")
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--tasks", nargs="*", help="of the result (default: all that the harness has)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    result = read_result(options.result)
    model = str(Path(result.checkpoint).resolve())
    data = Path(options.data_dir).resolve()
    names = [name for name in REPOSITORIES if name in result.config["tasks"] and (options.tasks or [name]).count(name)]
    names = [name for name in names if any(sample.task == name for sample in result.samples)]
    equal = True
    with tempfile.TemporaryDirectory() as hub:
        for name in names:
            REPOSITORIES[name](Path(hub), data)
        (Path(hub) / "code_eval").mkdir()
        (Path(hub) / "code_eval" / "code_eval.py").write_text(CODE_EVAL)
        os.chdir(hub)
        print(f"{'task':<14}{'metric':<28}{'here':>22}{'lm-eval':>22}{'documents':>11}{'equal':>7}")
        for name in names:
            equal &= _check(name, result, model, options.device)
        os.chdir("/")
    return 0 if equal else 1


def _check(name: str, result: EvalResult, model: str, device: str) -> bool:
    import lm_eval

    spec, ours = result.config["tasks"][name], [s for s in result.samples if s.task == name]
    metrics = list(dict.fromkeys(sample.metric for sample in ours))
    ours = [sample for sample in ours if sample.metric == metrics[0]]
    counts: dict[str, int] = {}
    for sample in ours:
        label = f"{name}_{sample.part.replace(' ', '_')}" if sample.part else name
        counts[label] = counts.get(label, 0) + 1
    with attention_of_autocast(torch.device(device).type):
        theirs: Any = lm_eval.simple_evaluate(
            model="hf",
            model_args={
                "pretrained": model,
                "dtype": "float32",
                "mixed_precision_dtype": "bfloat16",
                "softmax_dtype": "float32",
                "max_length": result.config["max_length"],
            },
            tasks=list(counts),
            num_fewshot=spec["fewshot"],
            samples={label: list(range(count)) for label, count in counts.items()},
            batch_size=spec["batch_size"] or result.config["batch_size"],
            device=device,
            fewshot_random_seed=result.seeds["fewshot"],
            bootstrap_iters=0,
            confirm_run_unsafe_code=True,
        )
    answers: dict[str, Any] = {}
    for entries in theirs["samples"].values():
        for entry in entries:
            answers[entry["arguments"][0][0]] = [response[0] for response in entry["resps"]]
    same = sum(_same(sample, answers.get(sample.prompt)) for sample in ours)
    agree = same == len(ours) == len(answers)
    for score in (s for s in result.scores if s.task == name and s.metric != "token_perplexity"):
        metric, _, filtered = score.metric.partition("@")
        stock = {"pass_at_1": "pass@1"}.get(metric, metric)
        parts = [
            (float(next(v for k, v in values.items() if k.split(",")[0] == stock and filtered in k)), counts[label])
            for label, values in theirs["results"].items()
            if label in counts
        ]
        value = sum(v * n for v, n in parts) / len(ours)
        agree &= abs(value - score.value) <= 1e-12 * abs(value)
        print(f"{name:<14}{score.metric:<28}{score.value!r:>22}{value!r:>22}{len(ours):>11}{same:>7}", flush=True)
    return agree


def _same(sample: Sample, answers: Any) -> bool:
    """Whether the harness on its own got the same likelihoods, or the same text, bit for bit."""
    if answers is None:
        return False
    if isinstance(sample.response, str):
        return answers == [sample.response]
    if isinstance(sample.response, dict):
        return answers == [sample.logprob]
    return [answer[0] for answer in answers] == sample.response


def _repository(folder: Path, files: dict[str, dict[str, Iterable[dict[str, Any]]]]) -> None:
    """Write a data set repository: configuration -> split -> rows."""
    card = ["---", "configs:"]
    for config, splits in files.items():
        card += [f"- config_name: {json.dumps(config)}", "  data_files:"]
        for split, rows in splits.items():
            path = folder / config.replace(" ", "_") / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            card += [f"  - split: {split}", f"    path: {path.relative_to(folder)}"]
    (folder / "README.md").write_text("\n".join([*card, "---", ""]), encoding="utf-8")


def _rows(data: Path, **files: str) -> dict[str, list[dict[str, Any]]]:
    rows = {}
    for split, file in files.items():
        rows[split] = load_documents({"test": file}, file, seed=0, count=None, data_dir=data)["test"]
    return rows


def _gsm8k(hub: Path, data: Path) -> None:
    _repository(hub / "openai/gsm8k", {"main": _rows(data, train="gsm8k/train.jsonl", test="gsm8k/test.jsonl")})


def _mmlu(hub: Path, data: Path) -> None:
    rows = _rows(data, dev="mmlu/dev.jsonl", test="mmlu/test.jsonl")
    subjects = sorted({row["subject"] for row in rows["test"]})
    parts = {name: {s: [row for row in rows[s] if row["subject"] == name] for s in rows} for name in subjects}
    _repository(hub / "cais/mmlu", parts)


def _mmlu_pro(hub: Path, data: Path) -> None:
    rows = _rows(data, validation="mmlu_pro/validation.jsonl", test="mmlu_pro/test.jsonl.gz")
    _repository(hub / "TIGER-Lab/MMLU-Pro", {"default": rows})


def _humaneval(hub: Path, data: Path) -> None:
    rows = _rows(data, test="humaneval/HumanEval.jsonl")
    _repository(hub / "openai/openai_humaneval", {"openai_humaneval": rows})


def _wikitext(hub: Path, data: Path) -> None:
    pages = [{"page": row["page"]} for row in read_articles(data / "wikitext2" / "wiki.test.txt.gz")]
    splits = {split: pages for split in ("train", "validation", "test")}
    _repository(hub / "EleutherAI/wikitext_document_level", {"wikitext-2-raw-v1": splits})


REPOSITORIES = {
    "wikitext": _wikitext,
    "mmlu": _mmlu,
    "mmlu_pro": _mmlu_pro,
    "gsm8k": _gsm8k,
    "humaneval": _humaneval,
}

if __name__ == "__main__":
    sys.exit(main())
