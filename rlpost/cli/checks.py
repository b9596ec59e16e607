"""Everything that can be checked before anything heavy is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from rlpost.cli.terminal import stdout_on_stderr
from rlpost.config.registry import Command, S
from rlpost.extras import require_vllm

if TYPE_CHECKING:
    from rlpost.config.compose import Composed
    from rlpost.config.overrides import Override


def compose_and_check(
    command: Command[S], words: Sequence[str], kept: Sequence[Override] = (), *, as_json: bool
) -> Composed[S]:
    """The configuration, its files of rewards imported, its engine and tracker looked for.

    `kept` is what a run was asked that is to go on.
    What the user's files print while they are imported goes to stderr where stdout is for JSON.
    Raises what `compose` raises, and MissingExtraError for what is not installed.
    """
    from rlpost.config.compose import compose
    from rlpost.rewards.functions import load_rewards
    from rlpost.settings import GRPOSettings, VLLMSettings
    from rlpost.tracking.choice import chosen_tracker

    with stdout_on_stderr() if as_json else nullcontext():
        composed = compose(command, words, kept)
        load_rewards(composed.settings.env)
    if isinstance(composed.settings.policy, VLLMSettings):
        require_vllm()
    if isinstance(composed.settings, GRPOSettings):
        chosen_tracker(composed.settings.tracking)
    return composed
