"""On-policy distillation on the tiny model: what the teacher reads, and that a run is the same however it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch

from rlpost.catalog import TRAIN_DISTILL
from rlpost.cli.plan import compose_and_check, resolved
from rlpost.config.compose import compose
from rlpost.data.chat import Continuation
from rlpost.data.conversation import Conversation
from rlpost.errors import ConfigError
from rlpost.model.conversion import tiny_tokenizer
from rlpost.model.load import load_model, save_model
from rlpost.model.locate import locate_model
from rlpost.model.packing import Row, as_reference_reads, rows_of
from rlpost.model.tokenizer import load_tokenizer
from rlpost.objectives.distillation import DistillationObjective
from rlpost.settings import Autocast, DistillationLossSettings, JSDLossSettings, OPDLossSettings, OptimSettings
from rlpost.train.distill import assemble as assemble_distill
from rlpost.train.ranks import Rank
from rlpost.train.update import Microbatches, gradient_of
from tests.says import Says
from tests.trainings import ends_alike, metrics, train_in, train_in_parts

pytestmark = pytest.mark.thorough

HINT = "hint=The answer is {answer}."
TEMPERATURE = 0.8
WORDS = [
    *["model=tiny", "model.autocast=none", "policy=transformers", "env.digits=1", "env.max_completion_tokens=8"],
    *["prompts_per_step=4", "group_size=2", "optim.lr=1e-3", "optim.schedule=constant", "eval.limit=4"],
]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of other weights."""
    start, folder = locate_model("builtin:tiny"), tmp_path_factory.mktemp("teacher")
    model = load_model(start)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    save_model(model, load_tokenizer(start), folder)
    return folder


# The gradient


def random_rows(hinted: bool) -> list[Row]:
    """Three groups of different shapes; `hinted`: the reference reads other prompts."""
    generator = torch.Generator().manual_seed(1)

    def ids(length: int) -> torch.Tensor:
        return torch.randint(0, 259, (length,), generator=generator)

    rows = []
    for prompt, lengths in ((ids(7), [3, 9, 1]), (ids(4), [5]), (ids(11), [2, 8])):
        other = ids(prompt.numel() + 5) if hinted else None
        for length in lengths:
            sampled = torch.rand(length, generator=generator) < 0.8
            row = Row(prompt, ids(length), sampled | (torch.arange(length) == 0), torch.zeros(length), ref_prompt=other)
            row.sampler_log_probs = -5.6 + 0.3 * torch.randn(length, generator=generator)
            rows.append(row)
    return rows


def gradients(
    settings: DistillationLossSettings, rows: Sequence[Row], folder: Path, tokens: int
) -> tuple[float, list[torch.Tensor]]:
    """The loss and the gradient of `rows` in microbatches of at most `tokens`, in float64."""
    model, frozen = (load_model(each).double() for each in (locate_model("builtin:tiny"), folder))
    objective = DistillationObjective(settings, temperature=TEMPERATURE)
    microbatches = Microbatches(tokens, torch.device("cpu"), Autocast.none)
    optimizer = torch.optim.SGD(model.parameters())
    reference = partial(nullcontext, frozen)
    rank = Rank(model, optimizer, objective, OptimSettings(), reference, microbatches)
    for row, log_probs in zip(rows, rank.read_reference(rows, TEMPERATURE), strict=True):
        row.ref_log_probs = log_probs
    update = gradient_of(rank, microbatches, rows)
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return sum(output.loss.item() for output in update.outputs), found


def plain(settings: DistillationLossSettings, rows: Sequence[Row], folder: Path) -> tuple[float, list[torch.Tensor]]:
    """The same from whole logits, one row at a time."""
    model, frozen = (load_model(each).double() for each in (locate_model("builtin:tiny"), folder))
    losses = []
    for row, seen in zip(rows, as_reference_reads(rows), strict=True):
        log_p, log_q = (
            (m(torch.cat([r.prompt, r.response])[None]).logits[0] / TEMPERATURE).log_softmax(-1)[
                r.prompt.numel() - 1 : -1
            ]
            for m, r in ((model, row), (frozen, seen))
        )
        log_q = log_q.detach()
        if isinstance(settings, JSDLossSettings):
            each = (log_p.exp() * (log_p - log_q)).sum(-1)
        else:
            own, of_teacher = (x.gather(-1, row.response[:, None]).squeeze(-1) for x in (log_p, log_q))
            log_ratio = own - row.sampler_log_probs.double()
            each = -log_ratio.exp() * (of_teacher - own.detach()) + 1e-3 * log_ratio.square()
        losses.append(each[row.sampled])
    loss = torch.cat(losses).mean()
    loss.backward()
    return loss.item(), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("hinted", [False, True], ids=["one prompt", "hinted prompts"])
@pytest.mark.parametrize("settings", [OPDLossSettings(), JSDLossSettings()], ids=["opd", "jsd"])
def test_gradient_is_that_of_whole_logits_however_rows_are_split(
    settings: DistillationLossSettings, hinted: bool, teacher: Path
) -> None:
    rows = random_rows(hinted)
    loss, expected = plain(settings, rows, teacher)
    for tokens in (1, 20, 1000):
        value, found = gradients(settings, rows, teacher, tokens)
        assert value == pytest.approx(loss, rel=1e-6)
        assert len(found) == len(expected)
        for one, two in zip(found, expected, strict=True):
            torch.testing.assert_close(one, two, atol=1e-7, rtol=1e-5)


# What the teacher reads


@pytest.mark.parametrize("system", [None, "Be exact."])
def test_hint_is_a_system_message_for_the_teacher_alone(system: str | None) -> None:
    words = [*WORDS, HINT, *([] if system is None else [f"env.system_prompt={system}"])]
    parts = assemble_distill(compose(TRAIN_DISTILL, words).settings)
    with parts.opened:
        parts.policy.start()
        parts.collector.fill(4)
        rows = rows_of(parts.buffer.take(4))
        tasks = [task for task, _ in zip(parts.env.order.iter_from(0), range(4), strict=False)]
    told = [parts.tokenizer.decode(row.ref_prompt) for row in rows]
    asked = [parts.tokenizer.decode(row.prompt) for row in rows]
    before = "" if system is None else f"{system}\n\n"
    for number, (with_hint, without) in enumerate(zip(told, asked, strict=True)):
        hint = f"<|im_start|>system\n{before}The answer is {tasks[number // 2]['answer']}.<|im_end|>\n"
        assert with_hint.startswith(hint)
        assert without.endswith(with_hint.removeprefix(hint))
        assert "The answer" not in without
    assert parts.reference is not None
    with parts.reference() as live:
        assert live is parts.model


def test_row_without_a_hint_has_one_prompt(conversation: Callable[..., Conversation]) -> None:
    opened = Continuation(load_tokenizer(locate_model("builtin:tiny")))
    asked, told = conversation(hint=""), conversation(hint="Four.")
    for each in (asked, told):
        opened.begin(each)
    assert asked.hinted_ids == asked.prompt_ids == told.prompt_ids != told.hinted_ids


def test_hint_with_a_missing_field_is_refused(says: Says) -> None:
    settings = compose(TRAIN_DISTILL, [*WORDS, "hint=It is {solution}."]).settings
    with says.refused("train", ConfigError, "{solution}"):
        assemble_distill(settings)


def test_teacher_of_other_tokens_is_refused(tmp_path: Path, says: Says) -> None:
    save_model(load_model(locate_model("builtin:tiny")), tiny_tokenizer(size=300), tmp_path / "other")
    settings = compose(TRAIN_DISTILL, [*WORDS, f"teacher={tmp_path / 'other'}"]).settings
    with says.refused("train", ConfigError, "259"):
        assemble_distill(settings)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["steps=3"], "teacher=runs/NAME"),
        ([HINT, "teacher=builtin:tiny"], "teacher and hint"),
        (["teacher=smollm2"], "teacher=packaged:smollm2"),
        ([HINT, "cluster.sharding=full"], "cluster.sharding=full"),
        ([HINT, "loss=opd", "sampling.top_p=0.9"], "sampling.top_p=0.9"),
        ([HINT, "group_size=0"], "group_size=0"),
    ],
    ids=["no teacher", "two teachers", "a name", "divided head", "a filter", "no samples"],
)
def test_settings_that_cannot_teach_are_refused(words: list[str], key: str, says: Says) -> None:
    with says.refused("train", ConfigError, key):
        compose(TRAIN_DISTILL, [*WORDS, *words])


def test_run_as_a_teacher_stands_for_its_newest_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert train_in(TRAIN_DISTILL, Path("runs/first"), [*WORDS, HINT, "steps=1", "eval.enabled=false"]) == 0
    for name in ("first", "runs/first"):
        settings = compose(TRAIN_DISTILL, [*WORDS, f"teacher={name}", f"model={name}"]).settings
        assert settings.teacher == settings.model.path == "runs/first/checkpoints/step-000001"


# Whole runs


def check_near(one: Path, other: Path) -> None:
    """The figures of two runs are equal up to the rounding of float32 sums."""
    for row, its in zip(metrics(one), metrics(other), strict=True):
        for name in ("loss/distill", "kl/teacher", "grad_norm", "entropy", "tokens/trained", "reward/mean"):
            assert row.get(name) == pytest.approx(its.get(name), rel=1e-3, abs=1e-6), (row["step"], name)


@pytest.mark.parametrize("loss", ["opd", "jsd"])
def test_model_comes_nearer_to_its_teacher(loss: str, teacher: Path, tmp_path: Path) -> None:
    words = [*WORDS, f"teacher={teacher}", f"loss={loss}", "steps=10", "prompts_per_step=64", "group_size=1"]
    assert train_in(TRAIN_DISTILL, tmp_path, [*words, "optim.lr=3e-3"]) == 0
    rows = metrics(tmp_path)[1:]
    first, last = (sum(row["kl/teacher"] for row in part) for part in (rows[:3], rows[-3:]))
    assert last < 0.7 * first
    assert ("ess" in rows[0]) == (loss == "opd")
    assert {"loss/distill", "entropy", "lr", "sampler/logprob_gap"} <= rows[0].keys()
    assert "groups/zero_std" not in rows[0]


@pytest.mark.parametrize(
    "more",
    [["loss=opd", "passes=2", HINT], ["loss=jsd", "lora.enabled=true", "minibatch_size=4"]],
    ids=["sampled, by a hint", "whole vocabulary, an adapter"],
)
def test_resumed_run_is_the_unbroken_one(more: list[str], teacher: Path, tmp_path: Path) -> None:
    words = [*WORDS, "deterministic=true", "eval.every=2", *more, *([] if HINT in more else [f"teacher={teacher}"])]
    whole, parted = train_in_parts(TRAIN_DISTILL, tmp_path, words)
    assert ends_alike(whole, parted)
    other = [word for word in words if not word.startswith(("hint", "teacher"))]
    with pytest.raises(ConfigError, match="--resume"):
        train_in(TRAIN_DISTILL, parted, [*other, "hint=No.", "steps=5"], resume="latest")


def test_two_ranks_and_a_sampler_of_its_own_make_the_same_run(teacher: Path, tmp_path: Path) -> None:
    words = [*WORDS, f"teacher={teacher}", "steps=2", "eval.enabled=false", "cluster.rank_seconds=60"]
    assert train_in(TRAIN_DISTILL, tmp_path / "one", words) == 0
    beside = ["cluster.trainer_ranks=2", "collector=async", "max_policy_lag=0"]
    threads = torch.get_num_threads()
    assert train_in(TRAIN_DISTILL, tmp_path / "two", [*words, *beside]) == 0
    check_near(tmp_path / "one", tmp_path / "two")
    assert torch.get_num_threads() == threads  # else the next training of this process rounds otherwise


def test_own_prompts_are_distilled_without_a_reward(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text("".join(f'{{"prompt": "Say {n}."}}\n' for n in range(20)))
    words = [f"teacher={teacher}", "model=tiny", "model.autocast=none", "policy=transformers", "steps=2", "loss=opd"]
    words += ["env=dataset", "env.path=prompts.jsonl", "env.max_completion_tokens=8", "prompts_per_step=2"]

    _, changes = resolved(compose_and_check(TRAIN_DISTILL, words, as_json=False))
    assert train_in(TRAIN_DISTILL, tmp_path / "run", words) == 0

    assert ("eval.enabled", False) in [(each.key, each.value) for each in changes]
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["kl/teacher"] > 0 for row in rows)
    assert not any(key.startswith(("reward/mean", "reward/std", "eval/")) for row in rows for key in row)
