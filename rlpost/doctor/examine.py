"""The examination of a training: every check in its order, from the cheap ones to a step of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Any

from rlpost.assemble import resolve_numbers
from rlpost.data.demonstrations import Demonstration
from rlpost.doctor.findings import Findings
from rlpost.doctor.place import look_at_folder, look_at_rate, look_at_room, look_at_tracker, look_at_versions
from rlpost.doctor.practice import practise_grpo, practise_sft
from rlpost.doctor.rows import ROWS, attack_rewards, look_at_gold, look_at_held_out, look_at_rows
from rlpost.doctor.writing import look_at_masks, look_at_template
from rlpost.envs.build import build_env, build_training_env
from rlpost.envs.checks import check_rewards, check_template, look_at_lengths
from rlpost.envs.dataset_chat import DatasetChatEnv
from rlpost.errors import DataError
from rlpost.estimate.shape import shape_of_folder
from rlpost.model.load import context_length
from rlpost.model.trainable import starting_tokenizer
from rlpost.settings import GRPOSettings, SFTSettings
from rlpost.train.grpo import updates_per_step

Wait = Callable[[str], None]  # told what is under way


def examine(settings: GRPOSettings | SFTSettings, folder: Path, findings: Findings, wait: Wait) -> None:
    """Look at all that a training with `settings` in the run folder `folder` would do; nothing is kept."""
    wait("looking at the machine")
    look_at_versions(findings)
    with findings.looking("folder"):
        look_at_folder(findings, folder)
    with findings.looking("tracker"):
        look_at_tracker(findings, settings.tracking)
    wait("reading rows and tokenizer")
    good = _examine_grpo(findings, settings) if isinstance(settings, GRPOSettings) else _examine_sft(findings, settings)
    if not good:
        return
    with findings.looking("memory"):
        look_at_room(findings, settings, folder)
    if findings.failed:  # a step would only fail where that says
        return
    wait("a step on a few rows")
    with findings.looking("a step"):
        resolved, numbers = resolve_numbers(settings)
        findings.ok("formats", numbers.line.removeprefix("numbers").strip())
        if isinstance(resolved, GRPOSettings):
            practise_grpo(findings, resolved)
        else:
            practise_sft(findings, resolved)


def _examine_grpo(findings: Findings, settings: GRPOSettings) -> bool:
    """Rows, rewards and template; whether a model can be loaded for them."""
    look_at_rate(findings, settings, settings.steps * updates_per_step(settings))
    with contextlib.ExitStack() as opened:
        env = build_training_env(settings)
        opened.callback(env.close)
        with findings.looking("rows"):
            check_rewards(env)
            env.start()
            look_at_rows(findings, env, settings)
            if settings.eval.enabled:
                held_out = build_env(
                    settings.env.held_out_for(settings.eval.limit),
                    num_prompts=1,
                    group_size=1,
                    seed=0,
                    tools=settings.tools,
                )
                opened.callback(held_out.close)
                look_at_held_out(findings, env, held_out)
        if findings.failed:
            return False
        with findings.looking("rewards"):
            if attack_rewards(findings, env):
                look_at_gold(findings, env)
        return _look_at_writing(findings, settings, env, _answered(env))


def _examine_sft(findings: Findings, settings: SFTSettings) -> bool:
    """Rows and template; whether a model can be loaded for them."""
    with contextlib.closing(build_env(settings.env, num_prompts=1, group_size=1, seed=settings.seed)) as env:
        shown: list[Demonstration] = []
        with findings.looking("rows"):
            shown = list(islice(env.demonstrations(), ROWS))
            count = settings.steps or ceil((settings.epochs or 1) * env.num_tasks / settings.minibatch_size)
            look_at_rate(findings, settings, max(1, count))
        if not shown:
            if not findings.failed:
                findings.fail("rows", "there are no rows to train on", "give some")
            return False
        return _look_at_writing(findings, settings, env, shown, settings.max_tokens)


def _look_at_writing(
    findings: Findings, settings: Any, env: DatasetChatEnv, shown: list[Demonstration], max_tokens: int | None = None
) -> bool:
    before = findings.failed
    with findings.looking("model"):
        tokenizer, folder = starting_tokenizer(settings, None)
        shape = shape_of_folder(folder)
        with findings.looking("template"):
            look_at_template(findings, tokenizer, shape.vocab if shape else None)
            if isinstance(settings, GRPOSettings):
                check_template(env, tokenizer)
        with findings.looking("lengths"):
            if isinstance(settings, GRPOSettings):
                context = context_length(folder)
                if told := look_at_lengths(env, settings.env, tokenizer, context):
                    findings.warn("lengths", told, "ignore this if it is intended")
                else:
                    findings.ok("lengths", f"every prompt fits env.max_prompt_tokens={settings.env.max_prompt_tokens}")
        with findings.looking("mask"):
            look_at_masks(findings, tokenizer, shown, max_tokens)
    return before or not findings.failed


def _answered(env: DatasetChatEnv) -> list[Demonstration]:
    """A few prompts with their gold answers; none where nobody knows any."""
    try:
        return [
            Demonstration(where, messages=part.answered(task))
            for part in env.parts
            for where, task in islice(part.all_tasks(), ROWS)
        ]
    except DataError:  # which looking at the gold answers has told
        return []
