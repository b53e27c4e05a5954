"""trl's GRPO in two gloo processes: training under a plan matches trl's own trainer.

All runs generate the same completions, because sampling is seeded, the tiny model is float32, and expert outputs differ
between ranks by at most a rounding error.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
import trl
from grpo import RANKS, STEPS, WORDS, make_model, make_trainer
from processes import begin_rank, results_of

import foremoe
import foremoe.trl
from foremoe.hf import expert_layers

LOGGED = ("loss", "grad_norm", "reward", "entropy")


class OtherRouters(foremoe.trl.GRPOTrainer):
    """Generates with routers that choose other experts, and records how log-probabilities differ from the old ones."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.difference: list[float] = []  # per micro-step, the maximum over tokens with a loss

    def _publish(self) -> None:
        super()._publish()
        for layer in expert_layers(self.generator):
            layer.router.weight.data = layer.router.weight.data.flip(0)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        self.inputs = inputs
        return super()._compute_loss(model, inputs)

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **keywords: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*arguments, **keywords)
        if torch.is_grad_enabled():
            difference = (found[0] - self.inputs["old_per_token_logps"]) * self.inputs["completion_mask"]
            self.difference.append(float(difference.abs().max()))
        return found


class Failing(foremoe.trl.GRPOTrainer):
    """Fails in the second micro-step of its first optimizer step."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        if self._step == 1:
            raise KeyError("of the loss")
        return super()._compute_loss(model, inputs)


@contextlib.contextmanager
def delay_writing() -> Iterator[None]:
    """Delay rank 0's writing by one second, so that other ranks would return earlier.

    Only rank 0 calls _save(), as with transformers 5.19.
    """
    write = foremoe.trl.GRPOTrainer._save

    def late(*arguments: Any, **keywords: Any) -> None:
        if dist.get_rank() == 0:
            time.sleep(1)
            write(*arguments, **keywords)

    with mock.patch.object(foremoe.trl.GRPOTrainer, "_save", late):
        yield


def history(trainer: Any, names: tuple[str, ...]) -> dict[str, list[float]]:
    return {name: [entry[name] for entry in trainer.state.log_history if name in entry] for name in names}


def dense(trainer: Any) -> list[Any]:
    return [p.detach() for name, p in trainer.model.named_parameters() if ".experts." not in name]


def largest_difference(these: Any, those: Any) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(these, those, strict=True))


def equal_on_all_ranks(tensors: list[Any]) -> bool:
    own = torch.cat([tensor.reshape(-1) for tensor in tensors])
    parts = [torch.empty_like(own) for _ in range(RANKS)]
    dist.all_gather(parts, own)
    return all(torch.equal(part, own) for part in parts)


def difference_to_file(trainer: Any, folder: str) -> float:
    """Return the difference between the logits of the trained model and of a plain one loaded from `folder`."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.randint(3, WORDS, (2, 9), generator=torch.Generator().manual_seed(dist.get_rank()))
    with torch.no_grad():
        return largest_difference([loaded(ids).logits], [trainer.model.eval()(ids).logits])


def refusal(call: Any) -> str:
    try:
        call()
    except foremoe.InputError as error:
        return f"{error.field}: {error}"
    return "nothing"


def previous_of(call: Any) -> tuple[str, int] | None:
    """Return policy and number of micro-steps of the previous plan passed to a start_plan() call."""
    previous = call.kwargs["previous"]
    return None if previous is None else (previous.policy, previous.num_micro_steps)


def work(rank: int, folder: str) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1", MASTER_PORT="0", HF_HUB_OFFLINE="1", ACCELERATE_USE_CPU="true",
    )  # fmt: skip
    begin_rank(rank, RANKS, folder)
    found: dict[str, Any] = {}
    planned = train_and_resume(found, folder, rank)
    train_with_a_reference(found, folder)
    train_with_other_routers(found, folder)

    # The ranks' models differ before training; all ranks begin with rank 0's weights.
    mixed = make_trainer(
        foremoe.trl.GRPOTrainer, f"{folder}/mixed", make_model(rank).bfloat16(), {"warm_start": True}, bf16=True,
        max_steps=2, max_grad_norm=0.0,
    )  # fmt: skip
    own = mixed.expert_parallel._session.shares
    with mock.patch.object(own, "start_plan", wraps=own.start_plan) as planner:
        mixed.train()
    found["planned from"] = [previous_of(call) for call in planner.call_args_list]
    shared = {"residency": "shared", "warm_start": True}
    found["warm"] = refusal(lambda: make_trainer(foremoe.trl.GRPOTrainer, f"{folder}/warm", parallel=shared))
    found["mixed"] = history(mixed, LOGGED)
    found["mixed dense equal"] = equal_on_all_ranks(dense(mixed))

    failing = make_trainer(Failing, f"{folder}/failing")
    try:
        failing.train()
    except KeyError as error:
        found["failing"] = str(error), [p.grad is None for p in failing.model.parameters()]

    planned.generation_kwargs["num_beams"] = planned.generation_config.num_beams = 2
    found["beams"] = refusal(planned.train)
    odd = make_model(num_experts=7)
    found["odd"] = refusal(lambda: make_trainer(foremoe.trl.GRPOTrainer, f"{folder}/odd", odd))
    for optim in ("adafactor", "rmsprop"):
        found[optim] = refusal(lambda optim=optim: make_trainer(foremoe.trl.GRPOTrainer, f"{folder}/o", optim=optim))
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def train_and_resume(found: dict[str, Any], folder: str, rank: int) -> Any:
    plain = make_trainer(trl.GRPOTrainer, f"{folder}/plain")
    plain.train()
    found["plain"] = history(plain, LOGGED)
    vanilla = make_trainer(foremoe.trl.GRPOTrainer, f"{folder}/vanilla", parallel={"policy": "vanilla"})
    vanilla.train()
    found["vanilla"] = history(vanilla, LOGGED)

    planned = make_trainer(foremoe.trl.GRPOTrainer, f"{folder}/planned", save_strategy="steps", save_steps=3)
    before = [weight.detach().clone() for weight in planned.expert_parallel.expert_parameters()]
    planned.train()
    found["planned"] = history(planned, LOGGED)
    figures = tuple(name for name in planned.state.log_history[0] if name.startswith("foremoe/"))
    found["figures"] = history(planned, figures)
    after = planned.expert_parallel.expert_parameters()
    found["experts trained"] = all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    found["dense equal"] = equal_on_all_ranks(dense(planned))
    found["dense of trl"] = largest_difference(dense(planned), dense(plain))
    with delay_writing():
        planned.save_model(f"{folder}/saved")
    found["saved"] = difference_to_file(planned, f"{folder}/saved")

    checkpoint = f"{folder}/planned/checkpoint-3"
    resumed = make_trainer(foremoe.trl.GRPOTrainer, f"{folder}/planned", make_model(1))
    resumed.train(resume_from_checkpoint=checkpoint)
    found["resumed"] = largest_difference(planned.model.parameters(), resumed.model.parameters())
    state = torch.load(f"{checkpoint}/optimizer.pt")["state"]
    found["optimizer"] = {name: of["exp_avg"].shape for name, of in state.items()} == {
        name: p.shape for name, p in plain.model.named_parameters()
    }
    dist.barrier()
    if rank == 0:  # in the format of trl's own trainer
        torch.save(plain.optimizer.state_dict(), f"{checkpoint}/optimizer.pt")
    dist.barrier()
    found["of trl"] = refusal(lambda: resumed.train(resume_from_checkpoint=checkpoint))
    return planned


def train_with_a_reference(found: dict[str, Any], folder: str) -> None:
    """Train a saved model against a reference model, with evaluation, and reload the best checkpoint."""
    arguments = {
        "beta": 0.1, "cast_lm_head_to_fp32": True, "gradient_checkpointing": False, "max_steps": 2,
        "eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 2, "save_strategy": "steps",
        "save_steps": 1, "load_best_model_at_end": True, "metric_for_best_model": "reward",
    }  # fmt: skip
    model = f"{folder}/saved"
    for kind, name in ((trl.GRPOTrainer, "plain reference"), (foremoe.trl.GRPOTrainer, "reference")):
        trainer = make_trainer(kind, f"{folder}/{name}", model, **arguments)
        trainer.train()
        found[name] = history(trainer, (*LOGGED, "kl", "eval_reward"))
    found["best"] = difference_to_file(trainer, trainer.state.best_model_checkpoint)


def train_with_other_routers(found: dict[str, Any], folder: str) -> None:
    """Train with halves of three generations per optimizer step. Each completion is used twice."""
    trainer = make_trainer(
        OtherRouters, f"{folder}/other", parallel={"residency": "shared"}, num_iterations=2, steps_per_generation=2,
        gradient_accumulation_steps=6, max_steps=2, pad_to_multiple_of=8, eval_strategy="steps", eval_steps=1,
        router_aux_loss_coef=0.001,
    )  # fmt: skip
    with mock.patch("foremoe.torch.figures.judge", return_value=""):  # would reject such routes
        trainer.train()
    found["other"] = history(trainer, ("foremoe/mismatch", "eval_reward", "aux_loss"))
    found["other difference"] = trainer.difference
    found["other dense equal"] = equal_on_all_ranks(dense(trainer))


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return results_of(RANKS, work)


@pytest.mark.parametrize("name", LOGGED)
def test_five_steps_log_the_same_values_as_trl(found: list[dict[str, Any]], name: str) -> None:
    for of in found:
        assert len(of["planned"][name]) == STEPS
        assert of["planned"][name] == pytest.approx(of["vanilla"][name], rel=1e-4)
        assert of["planned"][name] == pytest.approx(of["plain"][name], rel=1e-4)


def test_weights_match_trl_and_are_equal_on_all_ranks(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert of["dense equal"] and of["experts trained"]
        assert of["dense of trl"] < 1e-3
        assert of["mixed dense equal"] and of["other dense equal"]


def test_the_plan_balances_ranks_and_replayed_routes_match(found: list[dict[str, Any]]) -> None:
    for of in found:
        figures = of["figures"]
        assert all(len(values) == STEPS for values in figures.values())
        assert min(figures["foremoe/rho_vanilla"]) > 1.1 > 1.02 > max(figures["foremoe/rho_planned_max"])
        assert figures["foremoe/rho_computed"] == figures["foremoe/rho_planned"]
        assert figures["foremoe/rho_computed_max"] == figures["foremoe/rho_planned_max"]
        assert min(figures["foremoe/copies"]) > 0
        assert max(figures["foremoe/mismatch"]) < 0.01, "routes travelled with their tokens"


def test_routes_of_generation_are_replayed_in_old_and_new_log_probabilities(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert min(of["other"]["foremoe/mismatch"]) > 0.5, "the generator chose other experts"
        # A step has six micro-steps, so the first step trains with the weights of the generation.
        assert max(of["other difference"][:6]) < 1e-4
        assert len(of["other difference"]) == 12 and max(of["other difference"]) > 1e-3
        assert len(of["other"]["eval_reward"]) == len(of["other"]["aux_loss"]) == 2


@pytest.mark.parametrize("name", [*LOGGED, "kl", "eval_reward"])
def test_a_reference_model_and_evaluation_match_trl(found: list[dict[str, Any]], name: str) -> None:
    for of in found:
        assert len(of["reference"][name]) == 2
        assert of["reference"][name] == pytest.approx(of["plain reference"][name], rel=1e-4, abs=1e-7)


def test_bfloat16_training_is_close_to_float32(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert of["mixed"]["grad_norm"][0] == pytest.approx(of["plain"]["grad_norm"][0], rel=0.05)


def test_a_warm_start_plans_each_step_from_the_previous_plan(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert of["planned from"] == [None, ("foremoe", 2)]


def test_saved_files_contain_all_experts_and_training_resumes(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert of["saved"] < 1e-5 and of["best"] < 1e-5
        assert of["resumed"] < 1e-6 and of["optimizer"], "the optimizer's state is that of all experts"


def test_an_error_inside_a_step_leaves_no_gradients(found: list[dict[str, Any]]) -> None:
    for of in found:
        message, without_gradient = of["failing"]
        assert message == "'of the loss'" and all(without_gradient)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("warm", "previous: previous: the former plan has no effect: under residency shared"),
        ("odd", "group: group: 2 ranks must divide 7 experts"),
        ("adafactor", "optim: optim: adafactor is not supported, since its state cannot be gathered"),
        ("rmsprop", "nothing"),
        ("beams", "generation_kwargs: generation_kwargs: generate() must run each token of a sequence once"),
        ("of trl", "resume_from_checkpoint: resume_from_checkpoint: optimizer.pt was not written by this trainer"),
    ],
)
def test_setups_that_several_ranks_cannot_train_are_rejected(
    found: list[dict[str, Any]], case: str, words: str
) -> None:
    for of in found:
        assert of[case].startswith(words)
