"""Everything that can be checked before anything heavy is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from rlpost.catalog import Command, S
from rlpost.cli.terminal import stdout_on_stderr
from rlpost.extras import require_bitsandbytes, require_peft, require_vllm

if TYPE_CHECKING:
    from rlpost.config.compose import Composed
    from rlpost.config.overrides import Override
    from rlpost.rewards.functions import Rewards

_checked: list[Rewards | None] = []  # their processes stay warm for the environments that this command makes


def compose_and_check(
    command: Command[S], words: Sequence[str], kept: Sequence[Override] = (), *, as_json: bool
) -> Composed[S]:
    """The configuration, its files of rewards imported, its engine and tracker looked for.

    `kept` is what a run was asked that is to go on.
    What the user's files print while they are imported goes to stderr where stdout is for JSON.
    Raises what `compose` raises, and MissingExtraError for what is not installed.
    """
    from rlpost.config.compose import compose, environments_of
    from rlpost.config.device import check_device
    from rlpost.data.template_choice import named_template
    from rlpost.rewards.functions import load_rewards
    from rlpost.settings import AdamW8bitSettings, EvalSettings
    from rlpost.tracking.choice import chosen_tracker

    with stdout_on_stderr() if as_json else nullcontext():
        composed = compose(command, words, kept)
        settings: Any = composed.settings
        env = settings.env
        if "env.reward" not in command.optional or getattr(env, "reward", None):
            _checked[:] = [load_rewards(each) for each in environments_of(env)]
            _look_at_rows(settings, _checked)
        else:
            _look_at_rows(settings, [])
    check_device(settings.model.device)
    if settings.model.chat_template is not None:
        named_template(settings.model.chat_template)
    if settings.uses_policy and settings.policy.needs_vllm:
        require_vllm()
    if not isinstance(settings, EvalSettings):
        chosen_tracker(settings.tracking)
        if settings.lora.enabled:
            require_peft("lora.enabled=true")
        if isinstance(settings.optim, AdamW8bitSettings):
            require_bitsandbytes()
    return composed


def _look_at_rows(settings: Any, rewards: Sequence[Rewards | None]) -> None:
    """Raise DataError for rows on this machine that cannot be used, or lack a column that a reward takes.

    `rewards` are those of each environment, where they matter.
    """
    from rlpost.config.compose import environments_of
    from rlpost.envs.first_look import look_at_rows
    from rlpost.settings import DatasetSettings, EvalSettings, SFTSettings

    measures = not isinstance(settings, EvalSettings) and settings.eval.enabled
    shown = isinstance(settings, SFTSettings)
    share = settings.max_bad_share if shown else None
    for env, own in zip_longest(environments_of(settings.env), rewards):
        splits: list[str] = [env.split, *(["test"] if measures and env.split != "test" else [])]
        columns = look_at_rows(env, splits, demonstrated=shown, max_bad_share=share)
        if columns is not None and own is not None and isinstance(env, DatasetSettings):
            own.offer_columns(columns, env.path)
