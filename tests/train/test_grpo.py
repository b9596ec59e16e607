"""The whole loop on a tiny model that knows some answers: learning, records, resuming, stopping."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlpost.catalog import TRAIN_GRPO
from rlpost.errors import DivergedError, PolicyError
from rlpost.estimate.needs import Needs
from rlpost.model.memory import CoresWatch
from rlpost.objectives.policy_loss import PolicyObjective
from rlpost.policies.transformers import TransformersWrapper
from rlpost.runs.checkpoint import load_checkpoint, verify
from rlpost.runs.removal import check_resumable
from rlpost.train import ranks, sampling, watchers
from rlpost.train import run as run_module
from rlpost.train import update as update_module
from tests.trainings import FOUR_SUMS, ends_alike, metrics, rollouts, train_in, weights

SMALL = [
    *["policy=transformers", "model.autocast=none", *FOUR_SUMS, "prompts_per_step=4", "group_size=4"],
    *["env.max_completion_tokens=6", "env.eval_limit=4", "optim.lr=1e-3", "checkpoint.every=0"],
]
Run = Callable[..., int]


@pytest.fixture(scope="module")
def run(half_right: Path) -> Run:
    """Train in a folder from a model that answers about half of the sums right."""

    def run(folder: Path, *words: str, resume: str | None = None) -> int:
        return train_in(TRAIN_GRPO, folder, [f"model.path={half_right}", *SMALL, *words], resume)

    return run


def test_reward_rises_unless_rewards_are_shuffled(run: Run, tmp_path: Path) -> None:
    words = ["steps=12", "group_size=16", "eval.enabled=false", "optim.lr=3e-3", "optim.schedule=constant"]
    assert run(tmp_path / "learning", *words) == 0
    assert run(tmp_path / "control", *words, "advantage.shuffle_rewards=true") == 0
    learning = [line["reward/mean"] for line in metrics(tmp_path / "learning")]
    control = [line["reward/mean"] for line in metrics(tmp_path / "control")]
    risen, drifted = (sum(r[-4:]) / 4 - sum(r[:2]) / 2 for r in (learning, control))
    assert risen > 0.1
    assert drifted < risen / 2


def test_every_number_of_a_step_is_recorded_and_true(run: Run, tmp_path: Path) -> None:
    assert run(tmp_path, "steps=2") == 0
    start, first, second = metrics(tmp_path)
    assert (start["step"], first["step"], second["step"]) == (0, 1, 2)
    assert start["eval/prompts"] == 4
    assert (first["policy/version"], second["policy/version"]) == (0, 1)
    assert (first["policy/lag_max"], second["policy/lag_max"]) == (0, 0)
    assert (
        second["eval/accuracy_lenient_low"] <= second["eval/accuracy_lenient"] <= second["eval/accuracy_lenient_high"]
    )
    rows = rollouts(tmp_path, 1)
    assert len(rows) == 16
    for row in rows:
        asked, said = (re.findall(r"\d+", row[name]) for name in ("prompt", "completion"))
        assert row["reward"] == float(bool(said) and int(said[-1]) == sum(map(int, asked)))
    assert 0 < first["reward/mean"] < 1
    assert first["reward/mean"] == pytest.approx(sum(row["reward"] for row in rows) / 16)
    assert first["reward/answer"] == first["accuracy/lenient"] == first["reward/mean"]
    assert first["completion/tokens_mean"] == pytest.approx(sum(len(row["token_ids"]) for row in rows) / 16)
    assert first["tokens/generated"] == sum(sum(row["mask"]) for row in rows)
    assert first["sampler/logprob_gap"] < 1e-5  # float32, and the trainer's own weights
    for row in rows:  # the trainer reads what has an advantage, at weights that are still the sampler's
        assert (row["trainer_log_probs"] is None) == (row["advantage"] == 0)
        assert row["trainer_log_probs"] is None or row["trainer_log_probs"] == pytest.approx(row["log_probs"], abs=1e-4)
    assert any(row["trainer_log_probs"] for row in rows)
    assert first["ess"] == pytest.approx(1.0, abs=1e-6)  # one update a step: the ratio is 1
    assert first["ratio/clip_fraction"] == 0.0
    assert 0 < first["entropy"] <= math.log(259) + 1e-3
    assert first["lr"] == 1e-3


def test_resumed_run_is_bitwise_the_unbroken_one(run: Run, tmp_path: Path) -> None:
    words = ["steps=5", "deterministic=true", "optim.schedule=cosine", "optim.warmup_steps=2", "eval.every=2"]
    assert run(tmp_path / "whole", *words) == 0
    broken = tmp_path / "broken"
    stop_in_step(2, lambda: run(broken, *words), expected=130)
    assert [line["step"] for line in metrics(broken)] == [0, 1, 2]
    (broken / "rollouts/step-000009.parquet").write_bytes(b"of a step that was never recorded")
    assert run(broken, *words, resume="latest") == 0
    assert ends_alike(broken, tmp_path / "whole")
    names = sorted(p.name for p in (broken / "rollouts").iterdir())
    assert names == [f"step-{i:06d}.parquet" for i in range(1, 6)]


def test_moved_reference_and_adapted_entropy_bonus_are_resumed(run: Run, tmp_path: Path) -> None:
    """The entropy, 5.5 nats at most, is below its target, so each step after the first raises the coefficient."""
    words = ["steps=4", "deterministic=true", "eval.enabled=false", "loss.right_nll_coef=0.1", "loss.kl_coef=0.1"]
    words += ["loss.ref_sync_every=2", "loss.entropy_target=10", "loss.entropy_step=0.01"]
    assert run(tmp_path / "whole", *words) == 0
    stop_in_step(3, lambda: run(tmp_path / "broken", *words), expected=130)
    assert run(tmp_path / "broken", *words, resume="latest") == 0
    assert ends_alike(tmp_path / "broken", tmp_path / "whole")
    whole = metrics(tmp_path / "whole")
    assert [line["entropy_coef"] for line in whole] == pytest.approx([0.0, 0.01, 0.02, 0.03])
    assert any(line["loss/right_nll"] > 0 for line in whole)
    checkpoints = list((tmp_path / "whole" / "checkpoints").glob("step-*"))
    assert all((folder / "reference").is_dir() for folder in checkpoints)
    assert run(tmp_path / "whole", *words, "steps=5", "loss.ref_sync_every=0", resume="latest") == 0
    assert (tmp_path / "whole" / "checkpoints" / "latest" / "reference").is_dir()  # it stays where it had moved to


def test_reference_that_follows_the_model_has_no_divergence(run: Run, tmp_path: Path) -> None:
    words = ["steps=3", "eval.enabled=false", "loss.kl_coef=0.1"]
    assert run(tmp_path / "still", *words) == 0
    assert run(tmp_path / "moved", *words, "loss.ref_sync_every=1", "loss.ref_sync_share=1.0") == 0
    still, moved = ([line["kl/ref"] for line in metrics(tmp_path / name)] for name in ("still", "moved"))
    assert moved == pytest.approx([0.0, 0.0, 0.0], abs=1e-9)
    assert still[0] == pytest.approx(0.0, abs=1e-9)
    assert 1e-6 < still[1] < still[2]


def test_ratio_to_the_sampler_reads_no_old_log_probs(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["steps=2", "eval.enabled=false", "passes=2", "gate.enabled=false"]
    assert run(tmp_path / "old", *words) == 0
    monkeypatch.delattr(ranks.Ranks, "read_log_probs")
    assert run(tmp_path / "sampler", *words, "loss.ratio_to=sampler") == 0
    for old, sampler in zip(metrics(tmp_path / "old"), metrics(tmp_path / "sampler"), strict=True):
        for name in ("loss/policy", "ess", "kl/sampler", "grad_norm"):  # the policy samples with the trainer's weights
            assert sampler[name] == pytest.approx(old[name], rel=1e-3, abs=1e-5)
    # the measured gap is the model's own change in the second pass, which no forward before it could tell apart
    assert metrics(tmp_path / "sampler")[0]["sampler/logprob_gap"] > metrics(tmp_path / "old")[0]["sampler/logprob_gap"]


def stop_in_step(step: int, work: Callable[[], int], expected: int, number: int = signal.SIGINT) -> None:
    """Send this process a signal while `step` is being done."""
    original = sampling.batch_metrics
    seen = []

    def counting(*args: Any) -> dict[str, float]:
        seen.append(None)
        if len(seen) == step:
            os.kill(os.getpid(), number)
        return original(*args)

    assert threading.current_thread() is threading.main_thread()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "batch_metrics", counting)
        assert work() == expected


def test_sigterm_saves_and_gives_143(run: Run, tmp_path: Path) -> None:
    stop_in_step(1, lambda: run(tmp_path, "steps=9", "eval.enabled=false"), 143, signal.SIGTERM)
    assert (tmp_path / "checkpoints/latest").resolve().name == "step-000001"
    verify(tmp_path / "checkpoints/latest")


def test_schedule_ends_with_the_last_minibatch_of_all_passes(run: Run, tmp_path: Path) -> None:
    words = ["optim.schedule=linear", "passes=2", "minibatch_size=8", "steps=2", "eval.enabled=false"]
    assert run(tmp_path / "r", *words) == 0
    # 2 steps of 2 passes over 2 minibatches are 8 updates; a step reports the rate of its last one: 3, then 7, from 0
    assert [line["lr"] / 1e-3 for line in metrics(tmp_path / "r")] == pytest.approx([1 - 3 / 8, 1 - 7 / 8])


def test_step_without_spread_changes_no_weight(tmp_path: Path, tiny_folder: Path) -> None:
    words = ["model=tiny", *SMALL, "env.digits=4", "steps=1", "eval.enabled=false"]  # never right
    assert train_in(TRAIN_GRPO, tmp_path, words) == 0
    [line] = metrics(tmp_path)
    assert (line["reward/mean"], line["groups/zero_std"], line["tokens/trained"], line["grad_norm"]) == (0, 1, 0, 0)
    assert line["sampler/logprob_gap"] < 1e-5
    assert line["ess"] is None
    before, after = load_file(tiny_folder / "model.safetensors"), weights(tmp_path)
    assert all(after[name].equal(before[name]) for name in before)


def test_run_that_stands_still_says_why_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=tiny", *SMALL, "env.digits=4", "steps=9", "eval.enabled=false"]  # never right
    assert train_in(TRAIN_GRPO, tmp_path, words) == 0
    causes = ("nothing was learned in the first", "dead reward", "no spread", "truncation")
    assert [line.startswith(causes) for line in capsys.readouterr().out.splitlines()].count(True) == 1
    assert "dead reward" in load_checkpoint(tmp_path / "checkpoints/latest")[1]["progress"]["symptoms"]


def test_cores_that_others_use_are_recorded_and_printed_twice(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(CoresWatch, "of_others", lambda self: 0.75 * len(self.cores))
    assert run(tmp_path, "steps=2", "eval.enabled=false") == 0
    cores = len(CoresWatch().cores)
    assert [line["time/others_cores"] for line in metrics(tmp_path)] == [0.75 * cores] * 2
    said = [line for line in capsys.readouterr().out.splitlines() if "other programs" in line]
    assert f"{0.75 * cores:.1f} of {cores}" in said[0]
    assert len(said) == 2  # at the first step and at the end


def test_infinite_loss_stops_the_run_with_its_minibatch(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = PolicyObjective.__call__

    def poisoned(self: PolicyObjective, model: Any, microbatch: Any, normaliser: float) -> Any:
        output = original(self, model, microbatch, normaliser)
        output.loss = output.loss * float("nan")
        return output

    monkeypatch.setattr(PolicyObjective, "__call__", poisoned)
    with pytest.raises(DivergedError, match=r"step 1: .*nan") as caught:
        run(tmp_path / "r", "steps=3", "eval.enabled=false")
    assert caught.value.exit_code == 4
    folder = tmp_path / "r/diverged-step-000001"
    rows = [json.loads(line) for line in (folder / "minibatch.jsonl").read_text().splitlines()]
    assert len(rows) == 16
    assert all(len(row["response"]) == len(row["sampled"]) for row in rows)
    assert any(row["advantage"] for row in rows)
    report = json.loads((folder / "report.json").read_text())
    assert "model.embed_tokens.weight" in report["parameters_with_bad_gradient"]
    AutoModelForCausalLM.from_pretrained(folder / "model")


def test_incident_file_keeps_what_was_in_flight(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = TransformersWrapper.generate

    def failing(self: Any, requests: Any, sampling: Any) -> Any:
        if self.version == 1:
            raise PolicyError("waited 600 s for the engine at http://me:s3cret@host")
        return generate(self, requests, sampling)

    monkeypatch.setattr(TransformersWrapper, "generate", failing)
    with pytest.raises(PolicyError, match="600 s"):
        run(tmp_path / "r", "steps=3", "eval.enabled=false")
    told = json.loads((tmp_path / "r/incident.json").read_text())
    assert (told["step"], told["exit_code"]) == (2, 5)
    assert told["error"].startswith("PolicyError: ")
    assert "http://me:***@host" in told["error"]
    assert told["doing"].startswith("sampling")
    assert any("collector.fill" in line for line in told["traceback"])
    assert "MainThread" in told["threads"]
    assert told["processes"][0]["pid"] == os.getpid()
    monkeypatch.setattr(TransformersWrapper, "generate", generate)
    assert run(tmp_path / "r", "steps=3", "eval.enabled=false", resume="auto") == 0


def test_diverged_run_names_its_last_checkpoint(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "r"
    assert run(folder, "steps=2", "checkpoint.every=1", "eval.enabled=false") == 0
    monkeypatch.setattr(update_module.nn.utils, "get_total_norm", lambda *_, **__: torch.tensor(float("inf")))
    last = folder / "checkpoints/step-000002"
    with pytest.raises(DivergedError, match=f"step 3: .*{re.escape(str(last))}"):
        run(folder, "steps=4", "checkpoint.every=1", "eval.enabled=false", resume="auto")
    verify(last)
    check_resumable(last)


def test_out_of_memory_halves_the_microbatch_and_changes_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["steps=2", "eval.enabled=false", "deterministic=true"]
    assert run(tmp_path / "roomy", *words, "tokens_per_microbatch=512") == 0
    original = update_module.pack

    def tight(rows: Any, budget: int, device: Any, **shared: Any) -> Any:
        for microbatch in original(rows, budget, device, **shared):
            yield microbatch
            if budget > 256:
                raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 1 byte")

    monkeypatch.setattr(update_module, "pack", tight)
    assert run(tmp_path / "tight", *words, "tokens_per_microbatch=512") == 0
    for tight_line, roomy_line in zip(metrics(tmp_path / "tight"), metrics(tmp_path / "roomy"), strict=True):
        for name in ("loss/policy", "grad_norm", "tokens/trained"):
            assert tight_line[name] == pytest.approx(roomy_line[name], rel=1e-3, abs=1e-6)
    roomy = weights(tmp_path / "roomy")
    # AdamW moves a weight whose gradient is nothing but rounding as far as any other, so not each weight is compared
    assert all((weight - roomy[name]).abs().mean() < 1e-6 for name, weight in weights(tmp_path / "tight").items())


@pytest.mark.parametrize("has_to_spare", [False, True])
def test_short_memory_is_freed_before_training_and_saving(
    has_to_spare: bool, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def noted(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            done.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    monkeypatch.setattr(Needs, "has_to_spare", has_to_spare)
    noted(TransformersWrapper, "generate")
    noted(TransformersWrapper, "rest")
    noted(ranks, "update")
    noted(run_module, "give_back_freed_memory")
    noted(watchers, "save_checkpoint")
    assert run(tmp_path / "r", "steps=2", "eval.enabled=false", "gate.enabled=false", "checkpoint.every=1") == 0
    given_back = {"rest", "give_back_freed_memory"}
    step = ["generate", "rest", "update", "give_back_freed_memory", "save_checkpoint"]
    assert done == [name for name in step * 2 if not has_to_spare or name not in given_back]
    assert [line["memory/peak_gb"] > 0 for line in metrics(tmp_path / "r")] == [True, True]


@pytest.mark.first
@pytest.mark.vllm
def test_the_same_training_runs_on_vllm(run: Run, tmp_path: Path) -> None:
    assert run(tmp_path, "policy=vllm", "policy.dtype=float32", "steps=3") == 0
    lines = metrics(tmp_path)[1:]
    assert [line["policy/version"] for line in lines] == [0, 1, 2]
    assert all(0 < line["reward/mean"] < 1 for line in lines)
    assert all(line["sampler/logprob_gap"] < 1e-3 for line in lines)  # after each push, too
    assert all(line["time/sync"] > 0 for line in lines)
    assert lines[-1]["eval/prompts"] == 4


@pytest.mark.vllm
def test_engine_started_from_a_removed_checkpoint_takes_weights(run: Run, tmp_path: Path) -> None:
    words = ["policy=vllm", "checkpoint.every=1", "checkpoint.keep_last=1", "eval.enabled=false"]
    assert run(tmp_path, *words, "steps=1") == 0
    assert run(tmp_path, *words, "steps=4", resume="auto") == 0
    assert [line["policy/version"] for line in metrics(tmp_path)] == [0, 1, 2, 3]
