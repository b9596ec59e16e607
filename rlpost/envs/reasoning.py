"""Problems of reasoning-gym and reasoning-core, one turn each, scored by the package."""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlpost.config.paths import cache_folder
from rlpost.data.conversation import Conversation
from rlpost.envs.chat import DatasetChatEnv, Task, record
from rlpost.envs.endless import EndlessEnv, EndlessProblems
from rlpost.errors import DataError
from rlpost.files import expanded
from rlpost.imports import installed_version, require
from rlpost.rewards.reasoning_core_tasks import SCORER, Drawn, check_drawn, draw_into
from rlpost.rewards.reasoning_tasks import MAX_CHARACTERS, Generator, Problem, may_be_scored
from rlpost.rewards.score import Score
from rlpost.rewards.workers import Workers
from rlpost.settings import AnswerPlace, EnvSettings
from rlpost.settings.env import named_values

IN_TAGS = (
    "Answer the question. You may reason first; then write the final answer, in the form the question asks for and "
    "without anything else, between <answer> and </answer>."
)
IN_REPLY = "Answer the question with the final answer alone, in the form the question asks for."
PROCESSES = 2


class AnsweredEnv(DatasetChatEnv):
    """Problems whose answers a package scores, in `workers`; `answer_in_tags` says which part of a reply counts.

    Other arguments are `DatasetChatEnv`'s.
    """

    def __init__(
        self, *, answer_in_tags: bool = True, system_prompt: str | None = None, workers: Workers, **chat: Any
    ) -> None:
        instruction = IN_TAGS if answer_in_tags else IN_REPLY
        super().__init__(system_prompt=instruction if system_prompt is None else system_prompt, **chat)
        self.answer_in_tags = answer_in_tags
        self.workers = workers

    @classmethod
    def arguments_of(cls, settings: EnvSettings) -> dict[str, Any]:
        """See `DatasetChatEnv.arguments_of`."""
        own = super().arguments_of(settings)
        own["task_config"] = named_values("env.task_config", own["task_config"])
        own["answer_in_tags"] = own.pop("answer_in") == AnswerPlace.tags.value
        return own

    def close(self) -> None:
        """See `EnvBase.close`: ends the processes that score answers."""
        super().close()
        self.workers.close()

    @abstractmethod
    def entry_of(self, task: Mapping[str, Any]) -> str:
        """Everything about a problem that its scorer reads. Raises DataError for a prompt from outside."""

    @abstractmethod
    def may_be_scored(self, answer: str) -> bool:
        """Whether an answer may be given to the scorer."""

    def score_finished(self, conversations: Sequence[Conversation]) -> None:
        """See `ChatEnv.score_finished`: all of them at once. Raises DataError for a prompt from outside."""
        self.start()
        entries = [self.entry_of(conversation.task) for conversation in conversations]
        answers = [self._answers_in(conversation.reply) for conversation in conversations]
        strict = self._scores([(answer, entry) for (answer, _), entry in zip(answers, entries, strict=True)])
        unsettled = [None if one == 1.0 else other for one, (_, other) in zip(strict, answers, strict=True)]
        lenient = self._scores(list(zip(unsettled, entries, strict=True)))
        for place, conversation in enumerate(conversations):
            record(conversation, _score(answers[place][0], strict[place], lenient[place]))

    def _answers_in(self, reply: str) -> tuple[str | None, str | None]:
        """The answer of a reply, and what lenient accuracy tries besides."""
        block, last_line = _last_block(reply), reply.strip().rpartition("\n")[2].strip()
        if self.answer_in_tags:
            return block, last_line
        return reply.strip(), last_line if block is None else block

    def _scores(self, items: Sequence[tuple[str | None, str]]) -> list[float | None]:
        """The score of each answer to its problem; 0 for none (None), None where it cannot be found out."""
        given = [place for place, (answer, _) in enumerate(items) if answer and self.may_be_scored(answer)]
        outcomes = self.workers.map([items[place] for place in given])
        found = {place: outcome.value for place, outcome in zip(given, outcomes, strict=True)}
        return [found.get(place) if answer else 0.0 for place, (answer, _) in enumerate(items)]

    # What `rlpost env test` needs

    def gold_reply(self, task: Mapping[str, Any]) -> str:
        """See `EnvBase.gold_reply`."""
        return f"<answer>{task['answer']}</answer>" if self.answer_in_tags else str(task["answer"])

    def corrupted_replies(self, task: Mapping[str, Any]) -> list[str]:
        """See `EnvBase.corrupted_replies`."""
        wrong = ["", "zzz", "-98765"]
        return ["", "I do not know.", *([f"<answer>{a}</answer>" for a in wrong] if self.answer_in_tags else wrong)]


class ReasoningGymEnv(AnsweredEnv, EndlessEnv):
    """One turn on each problem of the generator `task`; `task_config` are settings of the generator's own.

    The answer is the text in the last `<answer>` tags of a reply or, with `answer_in_tags=False`, all of
    it. The reward is the generator's score of it, partial credit included, 0 without tags; strict
    accuracy asks for a full score, lenient accuracy for one of the tags' content, or of the reply's last
    line. An answer that takes longer than `score_seconds`, or that a scorer which evaluates its answers is
    not given since it is not a plain list or expression, earns 0 and counts as `unverified`. A task has
    `question`, `answer` (None where the generator names none), `seed` and `number`. Other arguments are
    `DatasetChatEnv`'s.
    """

    def __init__(
        self,
        task: str,
        *,
        task_config: Mapping[str, Any] | None = None,
        score_seconds: float = 5.0,
        **chat: Any,
    ) -> None:
        self.task = task
        self.task_config = dict(task_config or {})
        self.generator: Any = None  # a `Generator`, once the rows are opened
        workers = Workers(
            "rlpost.rewards.reasoning_tasks:scorer", PROCESSES, score_seconds, arguments=[task, self.task_config]
        )
        super().__init__(workers=workers, **chat)

    def open_rows(self, seed: int) -> ReasoningProblems:
        """See `DatasetChatEnv.open_rows`.

        Raises MissingExtraError without reasoning-gym, ConfigError for a task or setting it has not.
        """
        if self.generator is None:
            self.generator = Generator(self.task, self.task_config)
        return ReasoningProblems(self, seed)

    def close(self) -> None:
        """See `EnvBase.close`: ends the process that makes problems too."""
        super().close()
        if self.generator is not None:
            self.generator.close()

    def entry_of(self, task: Mapping[str, Any]) -> str:
        """See `AnsweredEnv.entry_of`."""
        return self._problem(task).entry

    def may_be_scored(self, answer: str) -> bool:
        """See `AnsweredEnv.may_be_scored`."""
        return may_be_scored(self.task, answer)

    def _problem(self, task: Mapping[str, Any]) -> Problem:
        """The problem of a task. Raises DataError where it came from outside, or is made otherwise by now."""
        problem = self.generator.problem(task["seed"], task["number"])
        if problem.question != task["question"]:
            raise DataError(
                f"env.task={self.task} asks another question under number {task['number']} than the one that was "
                "answered: begin a new run, since reasoning-gym or its settings have changed"
            )
        return problem

    # What `rlpost env test` needs

    def all_tasks(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """See `EndlessEnv.all_tasks`; raises DataError where the generator names no right answers."""
        for where, task in super().all_tasks():
            if task["answer"] is None:
                raise DataError(
                    f"env.task={self.task} names no right answer, since several are: there is nothing to test with"
                )
            yield where, task


class ReasoningProblems(EndlessProblems):
    """A generator's problems; two with the same question are the same."""

    def make(self, number: int) -> Task:
        """See `EndlessProblems.make`."""
        problem = self.env.generator.problem(self.seed, number)
        return {"question": problem.question, "answer": problem.answer, "seed": self.seed, "number": number}

    def identity(self, task: Task) -> str:
        """See `EndlessProblems.identity`."""
        return task["question"]

    def describe(self) -> str:
        """See `EndlessProblems.describe`."""
        return self.env.generator.describe()


class ReasoningCoreEnv(AnsweredEnv):
    """One turn on each of `num_problems` problems of the task `task` of reasoning-core, at difficulty `level`.

    The problems are drawn once and kept in the file `problems`, by default in rlpost's cache: a seed does not fix a
    problem of this package. Every run that reads the file has the same rows, and the same share of them held out.
    `task_config` are settings of the task's own; a problem that takes longer than `draw_seconds` is an error.
    Replies are scored as `ReasoningGymEnv` does. Other arguments are `DatasetChatEnv`'s.
    """

    def __init__(
        self,
        task: str,
        *,
        level: int = 0,
        task_config: Mapping[str, Any] | None = None,
        num_problems: int = 500,
        problems: str | None = None,
        draw_seconds: float = 60.0,
        score_seconds: float = 5.0,
        **chat: Any,
    ) -> None:
        workers = Workers(SCORER, PROCESSES, score_seconds, arguments=[task])
        super().__init__(dataset=(), workers=workers, **chat)
        self.task, self.level, self.task_config = task, level, dict(task_config or {})
        self.num_problems, self.problems, self.draw_seconds = num_problems, problems, draw_seconds

    @property
    def file(self) -> Path:
        """The file of the problems."""
        if self.problems is not None:
            return expanded(self.problems)
        drawn = [installed_version("reasoning-core"), self.task_config, self.num_problems]
        digest = hashlib.sha256(json.dumps(drawn, sort_keys=True).encode()).hexdigest()[:12]
        return cache_folder() / "reasoning-core" / f"{self.task}-level-{self.level}-{digest}.jsonl"

    def start(self) -> None:
        """See `DatasetChatEnv.start`; draws the problems where there are none yet.

        Raises MissingExtraError without reasoning-core, ConfigError for a task or setting it has not, DataError if the
        problems cannot be drawn or written, or the task does not score its own answer.
        """
        if self._rows is not None:
            return
        require("reasoning_core", "reasoning-core", "env=reasoning_core")
        file, wanted = self.file, Drawn(self.task, self.level, self.task_config, self.num_problems)
        draw_into(file, wanted, self.draw_seconds)
        self.dataset = str(file)
        super().start()
        first = self.rows[0]
        check_drawn(first, file, wanted)
        [outcome] = self.workers.map([(first["answer"], self.entry_of(first))])
        if outcome.error is not None or outcome.value < 1:
            found = outcome.error or f"the score {outcome.value:g}"
            raise DataError(f"env.task={self.task} does not score its own answer {first['answer']!r:.80}: {found}")

    def entry_of(self, task: Mapping[str, Any]) -> str:
        """See `AnsweredEnv.entry_of`."""
        if "entry" not in task:
            raise DataError("env=reasoning_core scores replies to its own problems alone: use env=dataset for others")
        return task["entry"]

    def may_be_scored(self, answer: str) -> bool:
        """See `AnsweredEnv.may_be_scored`."""
        return len(answer) <= MAX_CHARACTERS and "\0" not in answer


def _score(answer: str | None, strict: float | None, lenient: float | None) -> Score:
    reward = strict or 0.0
    return Score(
        reward=reward,
        parts={"score": reward, "unverified": float(strict is None)},
        weights={"unverified": 0.0},
        accuracy_strict=float(strict == 1.0),
        accuracy_lenient=float(1.0 in (strict, lenient)),
        answer=" ".join((answer or "").split()),
    )


def _last_block(reply: str) -> str | None:
    """The text of the last closed `<answer>` block, or None."""
    before, closed, _ = reply.rpartition("</answer>")
    _, opened, inside = before.rpartition("<answer>")
    return inside.strip() if closed and opened else None
