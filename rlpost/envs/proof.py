"""Does an environment score correctly? Every gold answer earns full marks, and no corrupted one does.

The same rows are the cases that a reward function is attacked with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, repeat
from statistics import fmean
from typing import Any

from rlpost.data.conversation import Completion, Conversation, Message
from rlpost.data.faults import BadRows
from rlpost.envs.base import EnvBase
from rlpost.envs.chat import DatasetChatEnv
from rlpost.envs.dataset import DatasetEnv
from rlpost.errors import DataError
from rlpost.rewards.attacks import STAND_IN, Attack, Case
from rlpost.rewards.functions import WorkerReward

MOST_TURNS = 100  # that repeat a single reply


def prove(env: EnvBase, most: int | None = None) -> Proof:
    """Score the gold reply and the corrupted replies of every task of the environment's split, or the first `most`.

    Gold has to earn `max_reward` and both accuracies, corrupted less and neither; where `max_reward`
    is not known, every reply has to be scored, none to earn more than the gold one, and the gold ones
    more than the others on average. Raises DataError where the environment's data cannot be read.
    """
    env.start()
    proof = Proof()
    for where, task in islice(env.all_tasks(), most):
        proof.checked += 1
        gold = env.gold_reply(task)
        right = played(env, task, gold)
        best = right.reward if env.max_reward is None else env.max_reward
        if not _is_gold(env, right):
            proof.failures.append(f"{where}: the gold reply {_short(gold)} got {_marks(right)}")
        corrupted = env.corrupted_replies(task)
        for reply in corrupted:
            other = played(env, task, reply)
            if not _is_corrupted(env, other, best):
                proof.failures.append(f"{where}: the corrupted reply {_short(reply)} got {_marks(other)}")
            if env.max_reward is None and other.reward is not None:
                proof.corrupted.append(other.reward)
        proof.replies += 1 + len(corrupted)
        if env.max_reward is None and right.reward is not None:
            proof.gold.append(right.reward)
    return proof


@dataclass(slots=True)
class Proof:
    """The findings of `prove`: tasks and replies tried, and one line for each reply scored wrongly.

    If the reward of a perfect reply is unknown, `gold` and `corrupted` are the rewards of the replies.
    """

    checked: int = 0
    replies: int = 0
    failures: list[str] = field(default_factory=list)
    gold: list[float] = field(default_factory=list)
    corrupted: list[float] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether something was checked and nothing failed."""
        return self.checked > 0 and not self.failures and self.tells_apart

    @property
    def tells_apart(self) -> bool:
        """Whether gold replies earn more than the others on average, if that is not known anyway."""
        return not (self.gold and self.corrupted) or fmean(self.gold) > fmean(self.corrupted)

    def lines(self) -> list[str]:
        """The findings for a person: the verdict, and failures of one cause in a line."""
        causes = BadRows()
        for failure in self.failures:
            where, _, reason = failure.partition(": ")
            causes.add(where, reason)
        details = [f"  {line}" for line in causes.lines(unit="wrong score")]
        rightly = "no corrupted one earns more than its gold answer" if self.gold else "all scored rightly"
        verdict = rightly if self.holds else f"{len(self.failures)} scored wrongly"
        if not self.failures and not self.tells_apart:
            verdict = "the reward does not tell them apart"
        if not self.checked:
            verdict = "there is no gold answer to check"
        if self.gold and self.corrupted:
            details.append(
                f"  on average the gold answers earn {fmean(self.gold):g}, the others {fmean(self.corrupted):g}"
            )
        return [
            f"{self.checked} gold answers and {self.replies - self.checked} corrupted ones: {verdict}",
            *details,
        ]


def played(env: EnvBase, task: Mapping[str, Any], reply: str | Sequence[str]) -> Conversation:
    """A conversation in which the policy said `reply`, advanced by the environment as in training.

    A single text is repeated in every turn; a list gives one text for each turn.
    """
    conversation = Conversation(task=task, messages=[{"role": "user", "content": ""}])
    for text in repeat(reply, MOST_TURNS) if isinstance(reply, str) else reply:
        conversation.add_completion(Completion([], [], text, "stop", 0))
        env.advance([conversation])
        if conversation.done:
            break
    return conversation


def cases_of(env: DatasetChatEnv, count: int) -> list[Case]:
    """The first `count` rows of the environment's split, with its gold answers where it has any.

    Raises DataError where it has none and the environment's replies are right or wrong.
    """
    env.start()
    if not env.has_gold:
        rows: Sequence[Mapping[str, Any]] = env.rows[:count]
        return [Case(env.where(number), _prompt(env, row), *STAND_IN, row, []) for number, row in enumerate(rows)]
    cases = [_case(env, where, task) for where, task in islice(env.all_tasks(), count)]
    if not cases:
        raise DataError(f"{type(env).__name__} has no row with a gold answer to attack with")
    return cases


def attack_of(reward: WorkerReward, env: DatasetChatEnv, count: int, seconds: float) -> Attack:
    """The attack on `reward` with the first `count` rows of the environment's split. Raises what `cases_of` raises."""
    cases = cases_of(env, count)
    columns = list(dict.fromkeys(str(column) for case in cases for column in case.columns))
    return Attack(reward, cases, columns, seconds, env.has_gold)


def _is_gold(env: EnvBase, played: Conversation) -> bool:
    if env.max_reward is None:
        return played.valid
    strict, lenient = played.accuracy_strict, played.accuracy_lenient
    worked = isinstance(env, DatasetEnv)  # an answer with its working is not the number alone
    measured = not env.has_accuracy or (lenient == 1.0 and (strict == 1.0 or worked))
    return played.valid and played.reward == env.max_reward and measured


def _is_corrupted(env: EnvBase, played: Conversation, best: float | None) -> bool:
    if not played.valid or played.reward is None:
        return False
    if env.max_reward is None:
        return best is None or played.reward <= best
    return played.reward < env.max_reward and not (played.accuracy_strict or played.accuracy_lenient)


def _marks(played: Conversation) -> str:
    if not played.valid:
        return f"an error: {played.error}"
    return (
        f"reward {played.reward}, strict accuracy {played.accuracy_strict}, lenient accuracy {played.accuracy_lenient}"
    )


def _short(reply: str | Sequence[str]) -> str:
    if not isinstance(reply, str):
        return ", ".join(map(_short, reply))
    return repr(reply if len(reply) <= 80 else f"{reply[:30]}...{reply[-45:]}")


def _case(env: DatasetChatEnv, where: str, task: Mapping[str, Any]) -> Case:
    gold, *corrupted = map(_last, (env.gold_reply(task), *env.corrupted_replies(task)))
    answers = env.answers_of(task) if isinstance(env, DatasetEnv) else [str(task.get("answer", gold))]
    return Case(where, _prompt(env, task), gold, corrupted, task, answers or [gold])


def _prompt(env: DatasetChatEnv, task: Mapping[str, Any]) -> str | list[Message]:
    return env.prompt_of(task) if isinstance(env, DatasetEnv) else env.user_message(task)


def _last(reply: str | Sequence[str]) -> str:
    """The part of a reply that a reward reads: the text of the last turn."""
    return reply if isinstance(reply, str) else reply[-1]
