"""One optimizer step: clipped, refused where it is not finite, split until it fits."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from rlpost.model.packing import Row
from rlpost.objectives.policy_loss import PolicyObjective
from rlpost.settings import Autocast, GRPOLossSettings, OptimSettings, Schedule
from rlpost.train.update import Learner, Microbatches, update
from tests.train.test_split import minibatch, small_model

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def learner_of(model: PreTrainedModel, max_grad_norm: float = 1.0) -> Learner:
    """Steps by the gradient itself: SGD with a rate of 1."""
    return Learner(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        PolicyObjective(GRPOLossSettings(), temperature=1.0, max_completion_tokens=12),
        OptimSettings(lr=1.0, schedule=Schedule.constant, max_grad_norm=max_grad_norm),
        None,
    )


def test_infinite_gradient_changes_no_weight_and_is_kept() -> None:
    model = small_model(torch.float32)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    [bad] = [name for name in before if name.endswith("q_proj.weight")]
    model.get_parameter(bad).register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(FloatingPointError, match="nan"):
        update(learner_of(model), Microbatches(1000, CPU, Autocast.none), minibatch(model), number=0)
    not_finite = [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    assert not_finite == [bad]
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_long_gradient_is_clipped_to_max_grad_norm() -> None:
    def step(max_grad_norm: float) -> tuple[torch.Tensor, float]:
        """The change of all weights, and the norm that the step reports."""
        model = small_model(torch.float32)
        before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        microbatches = Microbatches(1000, CPU, Autocast.none)
        done = update(learner_of(model, max_grad_norm), microbatches, minibatch(model), number=0)
        return torch.nn.utils.parameters_to_vector(model.parameters()).detach() - before, done.grad_norm

    free, norm = step(1e9)
    assert free.norm().item() == pytest.approx(norm, rel=1e-3)
    clipped, reported = step(norm / 4)
    assert reported == pytest.approx(norm)  # of the gradient before it is clipped
    torch.testing.assert_close(clipped, free / 4, rtol=1e-3, atol=1e-6)


def group(prompt: int, *responses: int) -> list[Row]:
    """Completions of these lengths of one prompt."""
    return [
        Row(torch.full((prompt,), prompt), torch.ones(n, dtype=torch.int64), torch.ones(n) > 0, torch.zeros(n), 1.0)
        for n in responses
    ]


def sizes(tokens: int | None, rows: list[Row]) -> list[int]:
    microbatches = Microbatches(tokens, CPU, Autocast.none)
    return [microbatch.num_packed for microbatch in microbatches.of(rows)]


def test_cpu_reads_384_tokens_or_one_group_of_at_most_2048() -> None:
    small = [*group(100, 40, 50), *group(110, 80), *group(120, 50, 20)]  # 190, 190 and 190 tokens
    assert sizes(None, small) == [380, 190]
    assert sizes(600, small) == [570]
    large = [*small, *group(700, 200, 100, 50)]
    assert sizes(None, large) == [570, 1050]  # the largest group is not split, and as much is read at once elsewhere
    assert sizes(512, large) == [380, 190, 900, 800, 750]  # what was asked for is kept: the prompt is read three times
    huge = group(1000, 400, 400, 400, 400)  # 2600
    assert sizes(None, huge) == [1800, 1800]
    assert Microbatches(None, GPU, Autocast.none).tokens == 16384


def test_out_of_memory_halves_the_microbatch() -> None:
    notes: list[str] = []
    microbatches = Microbatches(None, CPU, Autocast.none, note=notes.append)
    rows, read = group(100, 300, 300, 300), []
    for attempt in microbatches.until_they_fit(read.clear):  # 1000 tokens, then 500, which holds one completion
        with attempt:
            read += [microbatch.num_packed for microbatch in microbatches.of(rows)]
            if 1000 in read:
                raise torch.OutOfMemoryError("there is no more")
    assert read == [400, 400, 400]
    [note] = notes
    assert note.endswith("tokens_per_microbatch=500")
