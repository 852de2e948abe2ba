"""`strategy="expert-parallel"` in the Trainer: the same training on 1, 2 and 4 processes, and across checkpoints."""

import itertools
import os
import signal
from datetime import timedelta
from types import SimpleNamespace

import lightning
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from ranks import run_ranks
from tiny_models import ARCHITECTURES, UserModule, quiet_trainer, tiny_model, tokens
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_nvfp4 import ExpertParallelStrategy
from lightning_nvfp4.comm import CODECS
from lightning_nvfp4.errors import UserError
from lightning_nvfp4.lm.model import CausalLM
from lightning_nvfp4.lm.optim import OptimizerConfig, build_adamw
from lightning_nvfp4.strategies import sharded_checkpoint

BATCH, LENGTH, STEPS = 8, 12, 4


class Module(UserModule):
    """Groups of parameters by weight decay, tied embeddings, and the norm that clipping saw."""

    def __init__(self):
        super().__init__(tiny_model(tie_word_embeddings=True))
        self.norms = []

    def configure_optimizers(self):
        return build_adamw(self.model, OptimizerConfig(lr=3e-3))

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        from lightning_nvfp4.strategies.gradients import total_grad_norm

        self.norms.append(float(total_grad_norm(self.parameters())))
        super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)


def loader(rank, size):
    """An epoch of two batches; each rank has its share of both."""
    data = [tokens(1, LENGTH, seed=index)[0] for index in range(2 * BATCH)]
    return DataLoader(data, batch_size=BATCH // size, sampler=range(rank, len(data), size))


def fit(rank, size, strategy, steps=STEPS, save=None, resume=None, module=None, **trainer):
    module = module or Module()
    arguments = {"devices": size, "strategy": strategy, "gradient_clip_val": 0.3, "use_distributed_sampler": False}
    fitted = quiet_trainer(max_steps=steps, **arguments, **trainer)
    fitted.fit(module, loader(rank, size), ckpt_path=resume)
    if save is not None:
        fitted.save_checkpoint(save)
    return module, fitted


def train(rank, size, settings, precision, steps, save, resume):
    module, trainer = fit(rank, size, ExpertParallelStrategy(**settings), steps, save, resume, precision=precision)
    return module.losses, module.norms, dict(trainer.strategy.communication.names)


def mean(ranks, part=0):
    return torch.tensor([found[part] for found in ranks]).mean(0)


def close(a, b):
    torch.testing.assert_close(a, b, rtol=2e-6, atol=0)


@pytest.mark.parametrize(("size", "spread"), [(2, 2), (4, 4), (4, 2)])
def test_losses_and_gradient_norms_are_those_of_one_process(size, spread):
    """FP32 without codec: equal up to the order of sums over the batch, clipping included."""
    alone, _ = fit(0, 1, "auto")
    settings = {"codec": "none", "expert_parallel_size": spread}
    found = run_ranks(train, size, size, settings, "32-true", STEPS, None, None, group=None)
    close(mean(found), torch.tensor(alone.losses))
    for _, norms, _ in found:
        close(torch.tensor(norms), torch.tensor(alone.norms))
    assert min(alone.norms) > 0.3  # every step was clipped


def test_in_parts_the_losses_and_gradient_norms_are_those_of_one_process():
    """As above; with micro-batches, and activations that are recomputed."""
    alone, _ = fit(0, 1, "auto", accumulate_grad_batches=2)
    found = run_ranks(train_in_parts, 2, 2, 3, group=None)
    close(mean(found), torch.tensor(alone.losses))
    for _, norms in found:
        close(torch.tensor(norms), torch.tensor(alone.norms))


def train_in_parts(rank, size, degree):
    module = Module()
    module.model.activation_checkpointing_enable()
    strategy = ExpertParallelStrategy(codec="none", overlap_degree=degree)
    fit(rank, size, strategy, module=module, accumulate_grad_batches=2)
    return module.losses, module.norms


def recomputed(rank, size):
    """Weights and losses of a preset, with s2f6 on the wire: (recompute, accumulate) -> them."""
    found = {}
    for recompute, accumulate in itertools.product([False, True], [1, 2]):
        module = Module()
        if recompute:
            module.model.activation_checkpointing_enable()
        module.model.train()
        fit(
            rank,
            size,
            ExpertParallelStrategy(),
            2,
            module=module,
            precision="nvfp4-hybrid",
            accumulate_grad_batches=accumulate,
        )
        weights = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in module.named_parameters()}
        found[recompute, accumulate] = module.losses, {name: p.detach().clone() for name, p in weights.items()}
    return found


def test_recompute_changes_no_bit_with_and_without_accumulation():
    """It sends the tokens once more, with the same bits."""
    for found in run_ranks(recomputed, 2, 2, group=None):
        for accumulate in (1, 2):
            (losses, weights), (again, others) = found[False, accumulate], found[True, accumulate]
            assert losses == again and len(losses) == 2 * accumulate
            assert all(torch.equal(weights[name], others[name]) for name in weights)
        assert any(not torch.equal(found[False, 1][1][name], found[False, 2][1][name]) for name in weights)


def averaged(rank, size, kind):
    """The refusal, and the steps that were done."""
    strategies = {"expert-parallel": ExpertParallelStrategy, "fsdp2": ModelParallelStrategy}
    language_model = CausalLM(tiny_model().config.to_diff_dict())
    said = []
    for module in (Module(), language_model) if kind == "expert-parallel" else (language_model,):
        try:
            fit(rank, size, strategies[kind](), 2, module=module, callbacks=[EMAWeightAveraging()])
        except UserError as error:
            said.append(str(error))
    return said


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`", "ignore:You're using the WeightAveraging")
@pytest.mark.parametrize(("kind", "count"), [("expert-parallel", 2), ("fsdp2", 1)])
def test_averaged_weights_are_refused_where_they_are_sharded(kind, count):
    for said in run_ranks(averaged, 2, 2, kind, group=None):
        assert len(said) == count
        assert all("EMAWeightAveraging averages whole weights, and" in words and "'ddp'" in words for words in said)


OTHERS = [name for name in ARCHITECTURES if name != "qwen3_moe"]


def architectures(rank, size, spread):
    strategies = [ExpertParallelStrategy(codec="none") if spread else "auto" for _ in OTHERS]
    return [
        fit(rank, size, strategy, 2, module=UserModule(tiny_model(name)))[0].losses
        for name, strategy in zip(OTHERS, strategies, strict=True)
    ]


def test_every_architecture_trains_as_in_one_process():
    """Biased, transposed and shared experts, Mamba blocks, and a dense model, whose experts are none."""
    found = torch.tensor(run_ranks(architectures, 2, 2, True, group=None)).mean(0)
    torch.testing.assert_close(found, torch.tensor(architectures(0, 1, False)), rtol=5e-6, atol=0)


def continued(path):
    """Losses of a stock run of one process that was stopped in the middle and continued."""
    fit(0, 1, "auto", steps=2, save=path)
    return torch.tensor(fit(0, 1, "auto", resume=path)[0].losses)


@pytest.mark.parametrize("sharded", [True, False])
def test_a_checkpoint_of_two_ranks_continues_on_one_and_on_four(tmp_path, sharded):
    """Model, optimizer and loops; also where experts are spread in another way, and as a file in another strategy."""
    expected = continued(tmp_path / "stock")
    saved = str(tmp_path / "checkpoint")
    settings = {"codec": "none", "save_distributed_checkpoint": sharded}
    run_ranks(train, 2, 2, settings, "32-true", 2, saved, None, group=None)
    assert (tmp_path / "checkpoint").is_dir() == sharded
    assert {path.name for path in tmp_path.iterdir()} == {"stock", "checkpoint"}  # no temporary is left
    for size, spread in ((1, 1), (4, 2)):
        settings = {"codec": "none", "expert_parallel_size": spread}
        found = run_ranks(train, size, size, settings, "32-true", STEPS, None, saved, group=None)
        close(mean(found), expected)
    if not sharded:
        stock, _ = fit(0, 1, "auto", resume=saved)
        close(torch.tensor(stock.losses), expected)


def test_a_checkpoint_of_a_stock_run_continues_on_two_ranks(tmp_path):
    expected = continued(tmp_path / "stock")
    found = run_ranks(train, 2, 2, {"codec": "none"}, "32-true", STEPS, None, str(tmp_path / "stock"), group=None)
    close(mean(found), expected)


def logged(rank, folder, codec):
    trainer = {"logger": CSVLogger(folder, name="", version=""), "log_every_n_steps": 1, "accumulate_grad_batches": 2}
    module, fitted = fit(rank, 2, ExpertParallelStrategy(codec=codec), 1, precision="nvfp4-hybrid", **trainer)
    return dict(fitted.logged_metrics), module.model.config.hidden_size


def test_bytes_of_each_step_are_logged_over_all_ranks(tmp_path):
    (metrics, hidden), _ = run_ranks(logged, 2, str(tmp_path), "s2f6", group=None)
    row = CODECS["s2f6"].row_bytes(hidden, torch.bfloat16)
    rows = metrics["comm/bytes_sent"] / row
    assert rows == rows.round() and metrics["comm/bytes_saved"] == rows * (2 * hidden - row)
    # two layers, two micro-batches, four legs, two choices a token; about half of the rows leave
    assert 0.3 < rows / (2 * 2 * 4 * 2 * BATCH * LENGTH) < 0.7
    assert "comm/bytes_sent" in (tmp_path / "metrics.csv").read_text()


def chosen(rank, size, folder, saved, resume):
    strategy = ExpertParallelStrategy(codec="auto", legs={"combine_backward": "mxfp8"})
    logger = CSVLogger(folder, name="", version="")
    fit(rank, size, strategy, 4 if resume else 2, saved, resume, precision="nvfp4-hybrid", logger=logger)
    return strategy.codec_names, dict(logger.experiment.hparams) if rank == 0 else {}


def test_auto_measures_once_chooses_alike_on_all_ranks_and_is_saved_with_the_run(tmp_path, monkeypatch):
    saved = str(tmp_path / "checkpoint")
    (names, logged), other = run_ranks(chosen, 2, 2, str(tmp_path), saved, None, group=None)
    assert names == other[0] and names["combine_backward"] == "mxfp8"
    assert {names[leg] for leg in names if leg != "combine_backward"} <= {"none", "s2f6", "nvfp4"}
    assert logged == {f"codec/{leg}": name for leg, name in names.items()}
    # The other choice, were it measured anew: what was chosen is taken from the checkpoint.
    monkeypatch.setattr("lightning_nvfp4.comm.choice.CANDIDATES", ("mxfp8",))
    resumed = run_ranks(chosen, 2, 2, str(tmp_path / "resumed"), None, saved, group=None)
    assert all(found == names for found, _ in resumed)


def dying(rank, size):
    class Dies(Module):
        def on_train_batch_start(self, batch, batch_idx):
            if rank == 1 and batch_idx == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    fit(rank, size, ExpertParallelStrategy(timeout=timedelta(seconds=20)), module=Dies())


def test_a_rank_that_dies_is_reported_by_the_others():
    with pytest.raises(RuntimeError) as caught:
        run_ranks(dying, 2, 2, group=None, limit=40)
    report = str(caught.value)
    assert "rank 1: ended with status -9" in report
    assert "RankLostError" in report and "rank 0 of 2" in report and "last checkpoint" in report


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"codec": "s2f7"}, ["'s2f7'", "'s2f6'"]),
        ({"legs": {"dispatch": "none"}}, ["'dispatch'", "dispatch_forward"]),
        ({"expert_parallel_size": 0}, ["expert_parallel_size = 0"]),
        ({"overlap_degree": 0}, ["overlap_degree = 0", "whole number"]),
        ({"overlap_degree": 2, "consistent": True}, ["overlap_degree = 2", "consistent = True", "to 1"]),
    ],
)
def test_bad_settings_stop_at_construction(settings, words):
    with pytest.raises(UserError) as caught:
        ExpertParallelStrategy(**settings)
    assert all(word in str(caught.value) for word in words)


def refused(rank, size, spread, experts):
    module = UserModule(tiny_model(num_experts=experts) if experts else tiny_model("llama"))
    try:
        fit(rank, size, ExpertParallelStrategy(spread), module=module)
    except UserError as error:
        return str(error)
    return ""


def fitted_twice(rank, size):
    strategy, module = ExpertParallelStrategy(codec="none"), Module()
    _, trainer = fit(rank, size, strategy, 2, module=module)
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(module, loader(rank, size))
    try:
        fit(rank, size, ExpertParallelStrategy(codec="none"), 2, module=module)
    except UserError as error:
        return len(module.losses), str(error)


def test_a_module_is_fitted_again_by_its_trainer_and_refused_by_another():
    for steps, message in run_ranks(fitted_twice, 2, 2, group=None):
        assert steps == 4 and "another Trainer" in message


@pytest.mark.parametrize(
    ("spread", "experts", "words"),
    [
        (3, 6, ["expert_parallel_size = 3", "2 processes", "[1, 2]"]),
        (2, 7, ["7 experts", "mlp.experts", "[1]"]),
        (2, 0, ["LlamaForCausalLM", "ddp"]),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_the_ones_that_do(spread, experts, words):
    for message in run_ranks(refused, 2, 2, spread, experts, group=None):
        assert all(word in message for word in words)


def test_the_name_is_known_in_both_class_trees():
    from lightning.pytorch.strategies import ModelParallelStrategy
    from pytorch_lightning.strategies import ModelParallelStrategy as OtherModelParallelStrategy

    for package, base in ((lightning, ModelParallelStrategy), (pytorch_lightning, OtherModelParallelStrategy)):
        trainer = package.Trainer(strategy="expert-parallel", accelerator="cpu", devices=2, logger=False)
        assert trainer.strategy.strategy_name == "expert-parallel"
        assert isinstance(trainer.strategy, base)


def failing_save(rank, size, folder):
    module, trainer = fit(rank, size, ExpertParallelStrategy(codec="none"), 2)
    path = f"{folder}/last.ckpt"
    trainer.save_checkpoint(path)
    sharded_checkpoint.dcp = SimpleNamespace(save=lambda *args, **kwargs: full_disk())
    with pytest.raises(UserError, match="No space left on device.*unchanged"):
        trainer.save_checkpoint(path)
    return sorted(os.listdir(folder))


def full_disk():
    raise OSError(28, "No space left on device")


def test_a_checkpoint_that_cannot_be_written_leaves_the_previous_one_whole(tmp_path):
    for names in run_ranks(failing_save, 2, 2, str(tmp_path), group=None):
        assert names == ["last.ckpt"]
    # Killed between the two renames: the previous one is found under its other name.
    os.rename(tmp_path / "last.ckpt", tmp_path / ".last.ckpt.old")
    found = run_ranks(train, 2, 2, {"codec": "none"}, "32-true", 3, None, str(tmp_path / "last.ckpt"), group=None)
    assert len(found[0][0]) == 1
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_a_folder_that_was_cut_short_is_refused(tmp_path):
    (tmp_path / "cut.ckpt").mkdir()
    with pytest.raises(RuntimeError, match="cut short"):
        run_ranks(train, 1, 1, {"codec": "none"}, "32-true", 1, None, str(tmp_path / "cut.ckpt"), group=None)
