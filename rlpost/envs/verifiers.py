"""Tasks and rewards of a verifiers package: rlpost asks and samples, a child process scores.

The package stays in an interpreter of its own, see the program `verifiers_child`, since verifiers pins versions that do
not fit beside rlpost's. Environments of one process that name the same taskset share its child.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rlpost.data.conversation import Conversation, Message
from rlpost.data.order import held_out_of
from rlpost.data.rendering import filled
from rlpost.envs.chat import DatasetChatEnv, fail, record
from rlpost.errors import ConfigError, DataError, MissingExtraError
from rlpost.remote.lines import ChildError, Lines
from rlpost.rewards.score import Patience, Score, log_failures
from rlpost.settings import EnvSettings
from rlpost.settings.base import RESERVED_PARTS
from rlpost.settings.model import mapping_in
from rlpost.text import counted

if TYPE_CHECKING:
    from rlpost.data.demonstrations import Demonstration

GRACE_SECONDS = 2.0  # for the child to report a scoring that was late, before it is killed
Parts = Mapping[str, Sequence[float]]  # part of a reward -> its score and its weight
GOLD_TRIED = 3  # tasks whose answers are scored to see whether they are right replies
FORMS = ("{answer}", "\\boxed{{{answer}}}")  # in which an answer may be a right reply; also in each tag of the prompt
TAG = re.compile(r"<([a-zA-Z_]\w*)>")


class VerifiersEnv(DatasetChatEnv):
    """One turn on each task of the taskset `id`, scored by the package.

    `args` are the taskset's own arguments, `python` the interpreter that has verifiers (None: this one); `tasks` limits
    how many tasks are listed. Loading may take `start_seconds`, and scoring a reply `score_seconds`. The reward is the
    sum of the package's parts, each times its weight. A task has `messages`, `prompt` (the last one's text), `key` and
    the fields of the package's own, such as `answer`. The split test is a package's own rows for evaluation,
    unless it trains on them, otherwise `held_out` of the prompts. Other arguments are `DatasetChatEnv`'s.
    """

    has_accuracy = False
    max_reward = None

    def __init__(
        self,
        id: str,
        *,
        args: Mapping[str, Any] | None = None,
        python: str | None = None,
        tasks: int | None = None,
        start_seconds: float = 300.0,
        score_seconds: float = 60.0,
        **chat: Any,
    ) -> None:
        super().__init__((), data_key="prompt", **chat)
        self.id = id
        self.score_seconds = score_seconds
        self._key = (id, json.dumps(dict(args or {}), default=str), tasks, python or sys.executable, start_seconds)
        self._taskset: Taskset | None = None

    @classmethod
    def arguments_of(cls, settings: EnvSettings) -> dict[str, Any]:
        """See `DatasetChatEnv.arguments_of`."""
        own = super().arguments_of(settings)
        return {**own, "args": mapping_in("env.args", own["args"], "{num_tasks: 100}")}

    @property
    def taskset(self) -> Taskset:
        """The taskset, loaded when it is first needed. Raises what `Taskset.load` raises."""
        if self._taskset is None:
            self._taskset = Taskset.shared(*self._key)
        return self._taskset

    def close(self) -> None:
        """See `EnvBase.close`; the child ends, unless another environment uses it."""
        super().close()
        taskset, self._taskset = self._taskset, None
        if taskset is not None:
            taskset.release()

    def load(self, split: str) -> list[dict[str, Any]]:
        """See `DatasetChatEnv.load`. Raises DataError if the split has no task."""
        rows = self.taskset.rows
        own = [row["split"] for row in rows]
        if None in own:
            held_out = held_out_of([json.dumps(row["messages"]) for row in rows], self.held_out)
            own = ["test" if held else "train" for held in held_out]
        found = [_task(row) for row, of in zip(rows, own, strict=True) if of == split]
        if not found:
            raise DataError(
                f"env.id={self.id} has {counted(len(rows), 'task')}, and none of them is in the split {split}: change "
                f"env.held_out={self.held_out:g}"
            )
        return found[: self.limit]

    def opening_messages(self, task: Mapping[str, Any]) -> list[Message]:
        """See `ChatEnv.opening_messages`: the task's own, with the system prompt and the template that are set."""
        if "messages" not in task:  # a prompt from outside
            return super().opening_messages(task)
        messages = [dict(message) for message in task["messages"]]
        if self.prompt_template is not None:
            messages[-1]["content"] = filled(self.prompt_template, task)
        if self.system_prompt is not None:
            messages = [m for m in messages if m["role"] != "system"]
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        return [{**m, "role": self.user_role if m["role"] == "user" else m["role"]} for m in messages]

    def score_finished(self, conversations: Sequence[Conversation]) -> None:
        """See `ChatEnv.score_finished`: all of them in one request. Raises DataError for a prompt from outside."""
        if not conversations:
            return
        answers = self.taskset.ask("score", [self._item(each) for each in conversations], self.score_seconds)
        for conversation, answer in zip(conversations, answers, strict=True):
            if "error" in answer:
                fail(conversation, f"env.id={self.id}: {answer['error']}")
            else:
                record(conversation, _score(answer["result"]))
        log_failures([each.error for each in conversations if not each.valid], len(conversations))

    def _item(self, conversation: Conversation) -> dict[str, Any]:
        task = conversation.task
        if "key" not in task:
            raise DataError(f"env.id={self.id} scores replies to its own tasks alone, not to a prompt from outside")
        return {
            "key": task["key"],
            "messages": self.opening_messages(task),
            "reply": conversation.reply,
            "tokens": len(conversation.response_ids),
            "prompt_tokens": len(conversation.prompt_ids),
            "truncated": conversation.truncated,
        }

    # What `rlpost env test` needs

    @property
    def has_gold(self) -> bool:
        """See `DatasetChatEnv.has_gold`: whether the tasks have an answer that earns full marks as a reply."""
        self.start()
        return self._gold_form is not None

    @cached_property
    def _gold_form(self) -> str | None:
        """The form in which the answers of the first tasks earn full marks, and an empty reply less; None if none."""
        tasks = self.rows[:GOLD_TRIED]
        if not all("answer" in task for task in tasks):
            return None
        tags = dict.fromkeys(TAG.findall(json.dumps([task["messages"] for task in tasks])))
        empty = self._earned(tasks, [""] * len(tasks))
        for form in (*FORMS, *(f"<{tag}>{{answer}}</{tag}>" for tag in tags)):
            full = self._earned(tasks, [form.format(answer=task["answer"]) for task in tasks])
            if all(_more(one, other) for one, other in zip(full, empty, strict=True)):
                return form
        return None

    def _earned(self, tasks: Sequence[Mapping[str, Any]], replies: Sequence[str]) -> list[Parts | str]:
        """The parts that each reply to its task earns, or why it could not be scored."""
        conversations = [Conversation(task, [], response_text=each) for task, each in zip(tasks, replies, strict=True)]
        answers = self.taskset.ask("score", [self._item(each) for each in conversations], self.score_seconds)
        return [answer["error"] if "error" in answer else answer["result"] for answer in answers]

    def gold_reply(self, task: Mapping[str, Any]) -> str:
        """See `EnvBase.gold_reply`: the task's answer. Raises DataError where no right replies are known."""
        if not self.has_gold:
            raise DataError(f"env.id={self.id} has no replies known to be right: train on its rewards, with train grpo")
        return str(self._gold_form).format(answer=task["answer"])

    def demonstrations(self) -> Iterator[Demonstration]:
        """See `EnvBase.demonstrations`: the right replies. Raises DataError for a task whose answer turns out wrong."""
        tasks = dict(self.all_tasks())
        earned = self._earned([*tasks.values()], [self.gold_reply(task) for task in tasks.values()])
        wrong = {where: str(each) for where, each in zip(tasks, earned, strict=True) if not _more(each, {})}
        self._refuse("the answer does not earn full marks in", wrong)
        return super().demonstrations()

    def rehearse(self) -> list[str] | None:
        """See `EnvBase.rehearse`: the package checks each task, and scores an empty reply where no right one is known.

        Raises DataError for a task that cannot be checked or scored.
        """
        named = dict(self.all_tasks())
        tasks = [*named.values()]
        answers = self.taskset.ask("validate", [task["key"] for task in tasks], self.score_seconds)
        checked = dict(zip(named, answers, strict=True))
        late = {where: answer["error"] for where, answer in checked.items() if answer.get("late")}
        failed = {
            where: answer.get("error", "it returns False")
            for where, answer in checked.items()
            if where not in late and answer.get("result", False) is False
        }
        self._refuse("the package's own check, validate(), fails", failed)
        self._refuse("the package's own check, validate(), does not end for", late)
        if self.has_gold:
            return None
        earned = self._earned(tasks, [""] * len(tasks))
        lost = {where: each for where, each in zip(named, earned, strict=True) if isinstance(each, str)}
        self._refuse("an empty reply cannot be scored in", lost)
        mean = fmean(_score(each).reward for each in earned if not isinstance(each, str))
        return [
            f"{counted(len(tasks), 'task')}, no reply is known to be right; an empty one is scored, and earns {mean:g}",
            "  the first prompt:",
            *(f"    {m['role']}: {m['content']}" for m in self.opening_messages(tasks[0])),
        ]

    def _refuse(self, how: str, wrong: Mapping[str, str]) -> None:
        """Raise DataError for tasks that are `wrong`, if there are some: where each stands -> why."""
        if wrong:
            where, why = next(iter(wrong.items()))
            count = f"{len(wrong)} of {counted(len(self.rows), 'task')}"
            raise DataError(f"env.id={self.id}: {how} {count}, such as {where}: {why}")


def _task(row: Mapping[str, Any]) -> dict[str, Any]:
    messages = row["messages"]
    return {**row["fields"], "messages": messages, "prompt": messages[-1]["content"], "key": row["key"]}


def _more(full: Parts | str, empty: Parts | str) -> bool:
    """Whether each weighed part of `full` is 1, and the other reply earns less."""
    if isinstance(full, str) or isinstance(empty, str):
        return False
    return all(score == 1.0 for score, weight in full.values() if weight > 0) and (
        _score(full).reward > _score(empty).reward
    )


def _score(parts: Parts) -> Score:
    """The score of the package's parts; a name that a figure of the step has gets an underscore."""
    named = {f"{name}_" if name in RESERVED_PARTS else name: pair for name, pair in parts.items()}
    return Score(
        sum(score * weight for score, weight in named.values()),
        parts={name: score for name, (score, _) in named.items()},
        weights={name: weight for name, (_, weight) in named.items()},
    )


# The child


class Taskset:
    """A taskset in its child process: the rows that it lists, and the scores of replies to them."""

    _shared: dict[tuple[Any, ...], Taskset] = {}  # noqa: RUF012  of this process
    _sharing = threading.Lock()

    def __init__(self, name: str, arguments: str, tasks: int | None, python: str, start_seconds: float) -> None:
        self.name = name
        self.start_seconds = start_seconds
        self._load_request = {"do": "load", "id": name, "args": json.loads(arguments), "tasks": tasks}
        program = [str(Path(python).expanduser()), str(Path(__file__).with_name("verifiers_child"))]
        self._lines = Lines(program, name=f"the process of env.id={name}")
        self._lock = threading.Lock()
        self._key: tuple[Any, ...] = ()
        self._users = 0
        self.rows = self._loaded()

    @classmethod
    def shared(cls, *key: Any) -> Taskset:
        """The taskset of these arguments; the one that this process has, if it has one. Raises as `_loaded` does."""
        with cls._sharing:
            taskset = cls._shared.get(key)
            if taskset is None:
                taskset = cls._shared[key] = cls(*key)
                taskset._key = key
            taskset._users += 1
            return taskset

    @property
    def pid(self) -> int | None:
        """The process id of the child; None before it starts, and after it ended."""
        return self._lines.pid

    def release(self) -> None:
        """End the child once nobody uses it."""
        with self._sharing:
            self._users -= 1
            if not self._users:
                del self._shared[self._key]
                self._lines.close()

    def ask(self, do: str, items: Sequence[Any], seconds: float) -> list[dict[str, Any]]:
        """Let the child `do` "score" or "validate" with each item: {"result": found} or {"error": why}.

        An item that is `late`, or lost with the child, is tried once more, alone. Raises as `_loaded` does, and
        DataError for other tasks, where the child is started again.
        """
        with self._lock:
            answers = self._carried_out(do, items, seconds)
            patience = Patience()
            for place in [place for place, answer in enumerate(answers) if answer.get("late")]:
                if patience.refusal:
                    answers[place] = {"error": patience.refusal, "late": True}
                    continue
                [answers[place]] = self._carried_out(do, [items[place]], seconds)
                patience.note(answers[place]["error"] if answers[place].get("late") else None)
            return answers

    def _loaded(self) -> list[dict[str, Any]]:
        """Start the child and list the tasks.

        Raises ConfigError for a taskset that cannot work, MissingExtraError without verifiers, ChildError where the
        child fails.
        """
        until = time.monotonic() + self.start_seconds
        rows: list[dict[str, Any]] = []

        def take(answer: Mapping[str, Any]) -> bool:
            if "row" in answer:
                rows.append(answer["row"])
            return "row" in answer

        try:
            self._exchange(self._load_request, lambda: until - time.monotonic(), take)
        except ChildError as error:
            if time.monotonic() < until:
                raise
            raise ChildError(f"{error}; loading may take env.start_seconds={self.start_seconds:g}") from error
        if not rows:
            raise DataError(f"env.id={self.name} has no tasks")
        return rows

    def _start_again(self) -> None:
        keys = {row["key"] for row in self._loaded()}
        gone = [row for row in self.rows if row["key"] not in keys]
        if gone:
            self._lines.close()
            raise DataError(
                f"env.id={self.name} lists other tasks each time: {len(gone)} of {counted(len(self.rows), 'task')} "
                "were gone when its process started again. Make it list the same ones, such as with a seed in env.args"
            )

    def _carried_out(self, do: str, items: Sequence[Any], seconds: float) -> list[dict[str, Any]]:
        """An answer of the child for each item; `late` where it took too long, or the child died."""
        if not self._lines.runs:
            self._start_again()
        answers: dict[int, dict[str, Any]] = {}

        def take(answer: dict[str, Any]) -> bool:
            place = answer.get("item", -1)
            if place not in range(len(items)) or place in answers or not _is_answer(do, answer):
                return False
            answers[place] = answer
            return True

        lost: dict[str, Any] = {}
        try:
            self._exchange({"do": do, "seconds": seconds, "items": items}, lambda: seconds + GRACE_SECONDS, take)
            if len(answers) < len(items):
                raise self._lines.fail("left items without an answer, and was killed")
        except ChildError as error:
            lost = {"error": str(error), "late": True}
        found = [answers.get(place, lost) for place in range(len(items))]
        if any(answer.get("late") for answer in found):
            self._lines.close()  # threads that still run would keep the next ones waiting
        return found

    def _exchange(
        self, request: Mapping[str, Any], left: Callable[[], float], take: Callable[[dict[str, Any]], bool]
    ) -> None:
        """Send a request and `take` its answers, one within `left()` seconds after the other.

        Raises ChildError for an answer that `take` does not expect, ConfigError where the child refuses.
        """
        complete = False
        try:
            self._lines.send(request, left())
            while (answer := self._lines.receive(max(0.0, left()))) != {"end": True}:
                found = answer if isinstance(answer, dict) else {}
                if found.get("missing"):
                    raise MissingExtraError(f"env=verifiers: {found['refused']}, or name another with env.python")
                if "refused" in found:
                    raise ConfigError(f"env.id={self.name}: {' '.join(found['refused'].split())}")
                if not take(found):
                    raise self._lines.fail(f"wrote an unexpected answer and was killed: {answer!r:.80}")
            complete = True
        finally:
            if not complete:  # the next request would read the rest of the answers as its own
                self._lines.close()


def _is_answer(do: str, answer: Mapping[str, Any]) -> bool:
    """Whether an answer to "score" or "validate" has an error, or a result of the right form."""
    if isinstance(answer.get("error"), str):
        return True
    if do == "validate":
        return "result" in answer
    parts = answer.get("result")
    return isinstance(parts, dict) and all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(number, int | float) for number in pair)
        for pair in parts.values()
    )
