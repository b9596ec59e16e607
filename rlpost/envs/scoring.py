"""How a score gets into a conversation, a failed one included."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rlpost.data.conversation import Conversation
from rlpost.errors import ConfigError, DataError
from rlpost.rewards.patience import Patience, TooLong, interrupted_after
from rlpost.rewards.score import Score, log_failures, why_untrainable

Scorer = Callable[[Conversation], Score | None]


def record_scores(conversations: Sequence[Conversation], scorer: Scorer, seconds: float) -> None:
    """`record_score` for each; a `scorer` that takes longer than `seconds` makes its conversation invalid too.

    It runs in this process, so it is interrupted where Python can be: in the main thread, and not while
    it waits in C. After some in a row that were late the rest is invalid without being tried.
    """
    patience = Patience()
    for conversation in conversations:
        if patience.refusal:
            fail(conversation, patience.refusal)
            continue
        try:
            with interrupted_after(seconds):
                record_score(conversation, scorer)
            patience.note(None)
        except TooLong:
            fail(conversation, f"{getattr(scorer, '__qualname__', 'score')} did not return within {seconds:g} s")
            patience.note(conversation.error)
    log_failures([c.error for c in conversations if not c.valid], len(conversations))


def check_tiers(tiers: Sequence[float]) -> None:
    """Raise ConfigError unless `tiers` are the rewards of a right answer, of another one and of none."""
    if len(tiers) != 3 or not tiers[0] > max(tiers[1:]):
        raise ConfigError(f"tiers={tiers} must be three rewards: right answer (the highest), other answer, none")


def fail(conversation: Conversation, error: str) -> None:
    """Make the conversation invalid: it keeps its place in its group, and has no reward."""
    conversation.valid, conversation.error, conversation.reward = False, error, None


def record_score(conversation: Conversation, scorer: Scorer) -> None:
    """Write what `scorer` says into `conversation`, on top of a reward it may have already.

    A scorer that raises or gives no finite number makes the conversation invalid, with the error
    and without a reward, never a 0; ConfigError and DataError, which no other reply would mend, are
    let through. None writes nothing.
    """
    try:
        score = scorer(conversation)
    except (ConfigError, DataError):
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001  whatever it raises is recorded, counted and excluded
        score = Score(math.nan, valid=False, error=f"{type(error).__name__}: {error}")
    if score is not None:
        record(conversation, score)


def record(conversation: Conversation, score: Score) -> None:
    """Write `score` into `conversation` as `record_score` does."""
    total = score.reward + (conversation.reward or 0.0)
    if score.valid and (wrong := why_untrainable(total)):
        score.valid, score.error = False, f"the reward is {total:g}, {wrong}"
    if not score.valid:
        fail(conversation, score.error or "the reward failed")
    elif conversation.valid:
        conversation.reward = total
        conversation.reward_parts |= score.parts
        conversation.accuracy_strict = score.accuracy_strict
        conversation.accuracy_lenient = score.accuracy_lenient
        conversation.answer = score.answer
        conversation.instructions = score.instructions
