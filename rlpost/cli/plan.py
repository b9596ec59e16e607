"""The plan that `--dry-run` prints, and every check that loads nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpost.catalog import Command, S
from rlpost.cli.run_folder import point_of
from rlpost.cli.terminal import stdout_on_stderr
from rlpost.errors import ConfigError, DataError
from rlpost.imports import require_bitsandbytes, require_peft, require_vllm
from rlpost.record import Fact
from rlpost.runs.kept import environment_of_runs
from rlpost.runs.reader import read_run
from rlpost.settings import LoRASettings, ModelSettings, OwnRowsSettings, VLLMSettings
from rlpost.text import printable

if TYPE_CHECKING:
    from rlpost.config.compose import Composed
    from rlpost.config.overrides import Override
    from rlpost.envs.row_checks import Look
    from rlpost.estimate.machine import Room
    from rlpost.estimate.shape import Shape
    from rlpost.rewards.functions import Rewards
    from rlpost.train.facts import Seen
    from rlpost.train.resolve import Change


@dataclass(frozen=True)
class Plan:
    """The plan of a training: its configuration with the settings that will hold, and the facts of them."""

    composed: Composed[Any]
    folder: Path
    resume: str | None
    facts: list[Fact]
    seen: Seen

    def lines(self) -> list[str]:
        """The plan as `--dry-run` prints it."""
        lines = [str(fact) for fact in self.facts if fact.value]
        return [printable(line) for line in [*lines, *(f"note    {note}" for note in self.notes)]]

    @property
    def notes(self) -> list[str]:
        """Warnings for the user."""
        return [fact.note for fact in self.facts if fact.note]

    def as_dict(self) -> dict[str, Any]:
        """The plan for `--dry-run --json`."""
        composed, needs = self.composed, self.seen.needs
        return {
            "command": composed.command.verb,
            "folder": str(self.folder),
            "resume": self.resume,
            "choices": composed.choices,
            "overrides": composed.overrides,
            "settings": composed.as_dict(),
            "facts": [fact._asdict() for fact in self.facts if fact.value],
            "fetches": [asdict(each) for each in self.seen.fetches],
            "estimate": needs.as_dict() if needs is not None else None,
            "notes": self.notes,
        }


def plan(composed: Composed[Any], folder: Path, resume: str | None) -> Plan:
    """The plan of a training, which loads nothing."""
    from rlpost.estimate.needs import Machine, needs_of
    from rlpost.estimate.shape import fetches, parameters_text, shape_of_model
    from rlpost.model.tokenizer import notes_of_model
    from rlpost.train.facts import Seen, facts_of

    model = composed.settings.model
    shape, gpu = shape_of_model(model.path, model.revision), _gpu(model.device)
    composed, changes = _resolved(composed, shape, gpu)
    settings: Any = composed.settings
    look = composed.rows[0] if len(composed.rows) == 1 else None
    counts = look.counts if look is not None else {}
    size = "" if shape is None else f"{parameters_text(shape.parameters)}, "
    seen = Seen(
        model=f"{size}{model.dtype.value} weights, device {model.device}",
        writes=f"{folder}" + (f", {point_of(folder, resume)}" if resume is not None else ""),
        needs=None if shape is None else needs_of(settings, shape, Machine.here(folder, gpu)),
        unsized="" if shape is not None else model.path,
        fetches=fetches(model, getattr(settings, "reference_path", None), settings.env),
        ranks=settings.cluster.trainer_ranks or 1,
        steps=settings.steps,
        rows=counts.get(settings.env.split),
        bad_rows=look.bad if look is not None else 0,
        held_out=counts.get("test") if settings.eval.enabled else None,
        notes=[*composed.not_used, *notes_of_model(model, settings.lora.path)],
        is_resumed=resume is not None,
    )
    return Plan(composed, folder, resume, facts_of(settings, changes, seen), seen)


def resolved(composed: Composed[Any]) -> tuple[Composed[Any], list[Change]]:
    """`composed` with its open settings filled in, as far as that needs no torch, and the changes."""
    from rlpost.estimate.shape import shape_of_model

    model = composed.settings.model
    return _resolved(composed, shape_of_model(model.path, model.revision), _gpu(model.device))


def _resolved(composed: Composed[Any], shape: Shape | None, gpu: Room | None) -> tuple[Composed[Any], list[Change]]:
    from rlpost.estimate.machine import Device
    from rlpost.train.resolve import in_yaml, resolve

    settings, changes = resolve(composed.settings, Device(gpu), shape, composed.kept)
    return replace(composed, settings=settings, yaml=in_yaml(composed.yaml, changes)), changes


def _gpu(device: str) -> Room | None:
    """The room of the GPU that a training on `device` would take; None without one."""
    from rlpost.estimate.machine import gpu_memory

    return gpu_memory() if device == "auto" or device.startswith("cuda") else None


MOST_BAD = 0.999  # share of bad rows beyond which there is nothing to evaluate
_checked: list[Rewards | None] = []  # their processes stay warm for the environments that this command makes


def compose_and_check(
    command: Command[S],
    words: Sequence[str],
    kept: Sequence[Override] | None = None,
    *,
    as_json: bool,
    run: Path | None = None,
    typed: Sequence[str] = (),
) -> Composed[S]:
    """The checked configuration: reward files are imported, engine and tracker looked for. Open values stay open.

    `kept` are the overrides of the resumed `run`; the values that were chosen for it are kept too. Without them the
    environment may be that of another run, see `environment_of_runs`; `typed` is the command line for its errors.
    What the user's files print while they are imported goes to stderr where stdout is for JSON.
    Raises what `compose` raises, and MissingExtraError for what is not installed.
    """
    from rlpost.config.compose import compose, environments_of
    from rlpost.config.schema import flat
    from rlpost.data.template_choice import named_template
    from rlpost.estimate.machine import check_device, chosen_policy
    from rlpost.rewards.functions import load_rewards
    from rlpost.tracking.trackers import chosen_tracker

    with stdout_on_stderr() if as_json else nullcontext():
        from_runs = environment_of_runs(command, words, typed or ["rlpost", *command.verb.split(), *words])
        composed = compose(command, from_runs.words, from_runs.kept if kept is None else kept)
        settings: Any = composed.settings
        env = settings.env
        has_rewards = "env.reward" not in command.optional or getattr(env, "reward", None)
        _checked[:] = [load_rewards(each) for each in environments_of(env)] if has_rewards else []
        looks, unused = _look_at_rows(settings, _checked)
    trains, model = settings.trains, settings.model
    sampler = None if settings.sampler is None else chosen_policy(settings.sampler)
    check_device(model.device, sampler)
    if model.chat_template is not None:
        named_template(model.chat_template)
    if run is None:  # a run that goes on has its tokenizer in its checkpoint
        _check_model(model, settings.lora if trains else None, is_served=isinstance(sampler, VLLMSettings))
    if isinstance(settings.sampler, VLLMSettings):
        require_vllm()
    if trains:
        chosen_tracker(settings.tracking)
        if settings.lora.enabled:
            require_peft("lora.enabled=true")
        if settings.optim.eight_bit:
            require_bitsandbytes()
    note = from_runs.note if kept is None else ""
    values = flat(read_run(run).config) if run is not None else None
    return replace(composed, not_used=unused, rows=looks, environment_note=note, kept=values)


def _check_model(model: ModelSettings, lora: LoRASettings | None, *, is_served: bool) -> None:
    """Raise ConfigError for what the files of the model on this machine say against it, trained or served by vLLM."""
    from rlpost.estimate.shape import check_served
    from rlpost.model.tokenizer import facts_of_model

    facts = facts_of_model(model, None if lora is None else lora.path)
    if facts is not None and facts.problem:
        raise ConfigError(facts.problem)
    if is_served and _gpu(model.device) is None:
        check_served(model.path, model.revision)


def _look_at_rows(settings: Any, rewards: Sequence[Rewards | None]) -> tuple[list[Look], list[str]]:
    """A look at the rows of each environment on this machine; the columns and entries that nothing reads, in words.

    Raises DataError for rows that cannot be used, or lack a column that a reward takes.

    `rewards` are those of each environment, where they matter.
    """
    from rlpost.config.compose import environments_of
    from rlpost.data.formats import not_used
    from rlpost.envs.row_checks import look_at_rows

    looks, unread = [], []
    trains = settings.trains
    measures = trains and settings.eval.enabled
    shown = not settings.learns_from_own and (trains or not settings.env.scores)
    share = (settings.max_bad_share if trains else MOST_BAD) if shown else None
    for env, own in zip_longest(environments_of(settings.env), rewards):
        splits: list[str] = [env.split, *(["test"] if measures and env.split != "test" else [])]
        try:
            found = look_at_rows(
                env, splits, demonstrated=shown, paired=shown and settings.learns_from_pairs, max_bad_share=share
            )
        except DataError as error:
            if trains or not shown:
                raise
            raise DataError(
                f"{error}; without env.reward an evaluation measures the loss of demonstrated replies: add "
                "env.reward=FILE.py:FUNCTION to score sampled ones"
            ) from None
        looks.append(found)
        if found.columns is not None and own is not None and isinstance(env, OwnRowsSettings):
            own.offer_columns(found.columns, env.path)
        unread.append(not_used({n: count for n, count in found.unused.items() if own is None or not own.reads(n)}))
    return looks, list(filter(None, unread))
