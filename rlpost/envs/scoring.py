"""How a score gets into a conversation, a failed one included."""

from __future__ import annotations

import math
from collections.abc import Callable

from rlpost.data.conversation import Conversation
from rlpost.errors import ConfigError, DataError
from rlpost.rewards.score import Score


def record_score(conversation: Conversation, scorer: Callable[[Conversation], Score | None]) -> None:
    """Write what `scorer` says into `conversation`, on top of a reward it may have already.

    A scorer that raises or gives no finite number makes the conversation invalid, with the error
    and without a reward, never a 0; ConfigError and DataError, which no other reply would mend, are
    let through. None writes nothing.
    """
    try:
        score = scorer(conversation)
    except (ConfigError, DataError):
        raise
    except Exception as error:  # noqa: BLE001  whatever a reward raises is recorded, counted and excluded
        score = Score(math.nan, valid=False, error=f"{type(error).__name__}: {error}")
    if score is None:
        return
    if score.valid and not math.isfinite(score.reward):
        score.valid, score.error = False, f"the reward is {score.reward}, which is no finite number"
    if not score.valid:
        conversation.valid, conversation.error, conversation.reward = False, score.error, None
    elif conversation.valid:
        conversation.reward = score.reward + (conversation.reward or 0.0)
        conversation.reward_parts |= score.parts
        conversation.accuracy_strict = score.accuracy_strict
        conversation.accuracy_lenient = score.accuracy_lenient
        conversation.answer = score.answer
