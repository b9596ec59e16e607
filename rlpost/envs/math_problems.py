r"""MATH and its like: competition problems, one turn each, answered in `\boxed{}`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlpost.data.conversation import Conversation
from rlpost.data.datasets import LocatedRows
from rlpost.data.rows import Row
from rlpost.envs.chat import DatasetChatEnv, record
from rlpost.envs.row_checks import math_answer, question_column, read_math
from rlpost.rewards import math_answers

HUB_ID = "DigitalLearningGmbH/MATH-lighteval"
SYSTEM_PROMPT = (
    "You solve mathematics problems. Reason step by step, then write the final answer, and nothing else, "
    "within \\boxed{}."
)


class MathEnv(DatasetChatEnv):
    r"""One turn on each problem.

    `dataset` is a hub id, a folder with train.jsonl and test.jsonl, one file, or a sequence of rows. A
    row has its text under `problem` or `question`, and its right answer under `answer` (after "#### ",
    where that is in it) or in the last `\boxed{}` of `solution`. A task has the row's fields, with
    `question`, `solution` and `answer`, the right answer alone. Rewards and accuracies are those of
    `rlpost.rewards.math_answers`, `tiers` the rewards of a right box, another box, and none; a
    comparison may take `verify_seconds`. Other arguments are `DatasetChatEnv`'s.
    """

    def __init__(
        self,
        dataset: str | Sequence[Mapping[str, Any]] = HUB_ID,
        *,
        config: str | None = None,
        system_prompt: str | None = SYSTEM_PROMPT,
        tiers: tuple[float, float, float] = math_answers.TIERS,
        verify_seconds: float = 5.0,
        **chat: Any,
    ) -> None:
        super().__init__(dataset, system_prompt=system_prompt, **chat)
        self.config = config
        self.tiers = tiers
        self.max_reward = tiers[0]
        self.verifier = math_answers.Verifier(verify_seconds)

    def start(self) -> None:
        """See `DatasetChatEnv.start`; raises MissingExtraError without math-verify."""
        self.verifier.start()
        super().start()

    def close(self) -> None:
        """See `EnvBase.close`: ends the processes that compare."""
        super().close()
        self.verifier.close()

    def load(self, split: str) -> LocatedRows:
        """See `DatasetChatEnv.load`; raises DataError for a row without a problem or a right answer."""
        return self.located(split, read_math, _task)

    def score_finished(self, conversations: Sequence[Conversation]) -> None:
        """See `ChatEnv.score_finished`: all of them at once."""
        pairs = [(conversation.reply, conversation.task["answer"]) for conversation in conversations]
        for conversation, score in zip(conversations, self.verifier.score(pairs, self.tiers), strict=True):
            record(conversation, score)

    def gold_reply(self, task: Mapping[str, Any]) -> str:
        """See `EnvBase.gold_reply`: the dataset's solution, if it ends in the right answer."""
        solution, answer = task["solution"], task["answer"]
        return solution if math_answers.last_box(solution) == answer else f"{solution}\n\\boxed{{{answer}}}".strip()

    def corrupted_replies(self, task: Mapping[str, Any]) -> list[str]:
        """See `EnvBase.corrupted_replies`: no box, an empty one, and wrong ones."""
        boxes = ["", "\\text{unknown}", "-98765432.1", "\\left\\{98765, 43210\\right\\}"]
        after = f"\\boxed{{{task['answer']}}} is wrong: it is \\boxed{{-98765432.1}}"
        return ["", "I do not know.", after, *(f"\\boxed{{{box}}}" for box in boxes)]


def _task(row: Row) -> Row:
    return {
        **row,
        "question": row[question_column(row)],
        "answer": math_answer(row),
        "solution": str(row.get("solution", "")),
    }
