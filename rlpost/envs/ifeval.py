"""IFEval and IFBench: prompts with instructions that a program can check, one turn each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorClass, TensorDictBase

from rlpost.data.conversation import Conversation, strip_end_of_turn
from rlpost.data.datasets import LocatedRows, located_rows
from rlpost.data.demonstrations import Demonstration
from rlpost.data.faults import FormatError
from rlpost.data.ragged import column, ragged
from rlpost.data.rows import Row, text_in
from rlpost.envs.base import Transform
from rlpost.envs.chat import DatasetChatEnv, record_score
from rlpost.errors import ConfigError, DataError
from rlpost.rewards.ifbench import IFBENCH
from rlpost.rewards.ifeval import (
    IFEVAL,
    WEIGHTS,
    InstructionSet,
    Judged,
    best_reward,
    require_checkers,
    score,
)
from rlpost.rewards.score import Score
from rlpost.text import counted, did_you_mean, nearest

IFEVAL_HUB_ID = "google/IFEval"
IFBENCH_HUB_ID = "allenai/IFBench_test"
ANSWER_PROMPT = (
    "Think first, between <think> and </think>. Then write your whole reply to the user, and nothing else, between "
    "<answer> and </answer>: only what stands there is read."
)

Aggregate = Callable[..., torch.Tensor | float]


class IFEvalScoreData(TensorClass):
    """Verdicts of a batch of replies, 1 or 0; NaN where a reply has none: not finished, or its check failed.

    `prompt_level_*`, (*B, 1), is whether all instructions are followed, `inst_level_*`, (*B, N),
    whether each is: ragged where rows have different numbers of them.
    """

    prompt_level_strict_acc: torch.Tensor
    inst_level_strict_acc: torch.Tensor
    prompt_level_loose_acc: torch.Tensor
    inst_level_loose_acc: torch.Tensor

    @classmethod
    def of_reply(cls, judged: Judged) -> IFEvalScoreData:
        """The verdicts on one reply, without batch dimension."""
        measures: Any = {name: value for name, [value] in _measures([judged], [0]).items()}
        return cls(**measures)

    @classmethod
    def of_batch(cls, rows: Sequence[Judged | None], counts: Sequence[int]) -> IFEvalScoreData:
        """The verdicts on B replies with `counts` instructions each; None: a reply without verdict."""
        measures: Any = {
            name: torch.stack(values) if name.startswith("prompt") else ragged(values)
            for name, values in _measures(rows, counts).items()
        }
        return cls(**measures, batch_size=[len(rows)])


def _measures(rows: Sequence[Judged | None], counts: Sequence[int]) -> dict[str, list[torch.Tensor]]:
    """The fields of `IFEvalScoreData`, each as a list of one tensor a reply."""
    measures: dict[str, list[torch.Tensor]] = {}
    for kind in ("strict", "loose"):
        verdicts = [
            [math.nan] * count if row is None else getattr(row, kind) for row, count in zip(rows, counts, strict=True)
        ]
        each = [torch.tensor(row, dtype=torch.float32) for row in verdicts]
        whole = [
            torch.tensor([math.nan]) if row is None else own.prod()[None] for row, own in zip(rows, each, strict=True)
        ]
        measures |= {f"inst_level_{kind}_acc": each, f"prompt_level_{kind}_acc": whole}
    return measures


class IfEvalScorer(Transform):
    """Scores replies by the instructions of their task.

    With `answer_only`, as in the reference, the first `<answer>` block alone is judged (a reply
    without one follows nothing) and the form earns up to 0.15 more; otherwise the whole reply is.
    `format_weights` weigh the four measures of `IFEvalScoreData`, in its order. `aggregate_reward`
    is whether to give a reward, or a function that does: of an IFEvalScoreData without batch
    dimension, and by keyword `think_blocks`, `answer_blocks` and `complete` (False for a reply that
    was cut), to a number. `instructions` is the set of kinds: IFEVAL, IFBENCH.

    Appended to an environment it scores and ends each conversation, on top of a reward that is
    there already; its task holds the instructions' names under `instruction_ids_key` and their
    arguments under `keyword_args_key`, as many. Raises MissingExtraError.
    """

    def __init__(
        self,
        *,
        instruction_ids_key: str = "instruction_id_list",
        prompt_key: str = "text",
        keyword_args_key: str = "kwargs",
        response_column: str = "text_response",
        score_key: str = "ifeval_score",
        aggregate_reward: bool | Aggregate = True,
        format_weights: Sequence[float] | None = None,
        answer_only: bool = True,
        instructions: InstructionSet = IFEVAL,
    ) -> None:
        require_checkers(instructions.name)
        self.instruction_ids_key = instruction_ids_key
        self.prompt_key = prompt_key
        self.keyword_args_key = keyword_args_key
        self.response_column = response_column
        self.score_key = score_key
        self.aggregate_reward = aggregate_reward
        self.format_weights = WEIGHTS if format_weights is None else tuple(format_weights)
        self.answer_only = answer_only
        self.instructions = instructions

    def judge(self, task: Mapping[str, Any], reply: str, prompt: str = "") -> Judged:
        """The verdicts on `reply`; `prompt` says in an error which it was. Raises DataError, RewardError."""
        ids, arguments = task[self.instruction_ids_key], task[self.keyword_args_key]
        return self.instructions.judge(ids, arguments, prompt, strip_end_of_turn(reply), answer_only=self.answer_only)

    def score(self, judged: Judged, *, complete: bool = True) -> Score | None:
        """The reward of verdicts, or None with `aggregate_reward=False`."""
        if self.aggregate_reward is False:
            return None
        scored = score(judged, answer_only=self.answer_only, weights=self.format_weights)
        if callable(self.aggregate_reward):
            scored.reward = float(
                self.aggregate_reward(
                    IFEvalScoreData.of_reply(judged),
                    think_blocks=judged.think_blocks,
                    answer_blocks=judged.answer_blocks,
                    complete=complete,
                )
            )
            scored.parts = {}
        return scored

    def score_conversation(self, conversation: Conversation) -> Score | None:
        """The score of the last reply of a conversation; see `score`."""
        judged = self.judge(conversation.task, conversation.reply, conversation.query)
        return self.score(judged, complete=conversation.finish_reason == "stop")

    def on_reply(self, conversations: Sequence[Conversation]) -> None:
        """Score and end each conversation: `truncated` where the reply was cut, else `terminated`."""
        for conversation in conversations:
            record_score(conversation, self.score_conversation)
            conversation.truncated = conversation.finish_reason != "stop"
            conversation.terminated = not conversation.truncated

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write `score_key`, an IFEvalScoreData, if there are replies, as in the result of `step`.

        A TensorDict of one's own, (B,), with `instruction_ids_key`, `keyword_args_key` and
        `response_column` (or `("text", "response")`) is scored too: `reward` (B, 1) on top of a
        reward there is, and `done`.
        """
        if "conversation" in tensordict:
            return self.show(tensordict)
        if self.instruction_ids_key not in tensordict:
            return tensordict
        replies = self.response_column if self.response_column in tensordict else ("text", "response")
        names = (self.instruction_ids_key, self.keyword_args_key)
        tasks = [
            dict(zip(names, row, strict=True)) for row in zip(*(_lists(tensordict, n) for n in names), strict=True)
        ]
        prompts = column(tensordict, self.prompt_key) if self.prompt_key in tensordict else [""] * len(tasks)
        rows = [
            self.judge(task, reply, str(prompt))
            for task, reply, prompt in zip(tasks, column(tensordict, replies), prompts, strict=True)
        ]
        verdicts: Any = IFEvalScoreData.of_batch(rows, [len(row.strict) for row in rows])
        tensordict.set(self.score_key, verdicts)
        scores = [scored for row in rows if (scored := self.score(row)) is not None]
        if scores:
            reward = torch.tensor([[scored.reward] for scored in scores])  # (B, 1)
            tensordict.set("reward", reward + tensordict["reward"] if "reward" in tensordict else reward)
        return tensordict.set("done", torch.ones(len(rows), 1, dtype=torch.bool))

    def show(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the verdicts on conversations that are over beside what `step` returns of them."""
        conversations: list[Conversation] = column(tensordict, "conversation")
        if not any(conversation.done for conversation in conversations):
            return tensordict
        rows = [self.judge(c.task, c.reply, c.query) if c.done and c.valid else None for c in conversations]
        counts = [len(c.task[self.instruction_ids_key]) for c in conversations]
        verdicts: Any = IFEvalScoreData.of_batch(rows, counts)
        return tensordict.set(self.score_key, verdicts)


class _ShownVerdicts(Transform):
    """Writes the verdicts into what `step` returns, where the environment itself does the scoring."""

    def __init__(self, scorer: IfEvalScorer) -> None:
        self.show = scorer.show

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self.show(tensordict)


class IFEvalEnv(DatasetChatEnv):
    """One turn on each IFEval prompt.

    `dataset` is the hub's id, a folder with train.jsonl (and test.jsonl), one file, or a sequence of
    rows with `prompt`, `instruction_id_list` and `kwargs`; of a path without a file for test a
    share `held_out` of the prompts is the split test, and `held_out=1` makes all of them test, as
    the benchmark counts. The whole reply is judged, as the benchmark does; with `answer_only` its
    first `<answer>` block, which the system prompt then asks for: see `IfEvalScorer`. Rows with an
    instruction of a kind in `leave_out` are left out. With `compute_reward=False` replies are not
    scored. Accuracy is whether all instructions are followed: strictly, and loosely. Other
    arguments are `DatasetChatEnv`'s. Raises MissingExtraError.
    """

    instructions = IFEVAL

    def __init__(
        self,
        dataset: str | Sequence[Mapping[str, Any]] = IFEVAL_HUB_ID,
        *,
        system_prompt: str | None = None,
        answer_only: bool = False,
        leave_out: Sequence[str] = (),
        format_weights: Sequence[float] | None = None,
        compute_reward: bool = True,
        data_key: str = "prompt",
        **chat: Any,
    ) -> None:
        if system_prompt is None and answer_only:
            system_prompt = ANSWER_PROMPT
        super().__init__(dataset, system_prompt=system_prompt, data_key=data_key, **chat)
        self.scorer = IfEvalScorer(
            answer_only=answer_only, format_weights=format_weights, instructions=self.instructions
        )
        self.leave_out = list(leave_out)
        self.compute_reward = compute_reward
        self.max_reward = best_reward(answer_only=answer_only, weights=self.scorer.format_weights)
        if compute_reward:
            self.append_transform(_ShownVerdicts(self.scorer))

    def load(self, split: str) -> LocatedRows:
        """See `DatasetChatEnv.load`: each instruction is set up once, so that none fails in training.

        Raises DataError naming file, row and field, ConfigError for an unknown kind in `leave_out`.
        """
        for kind in self.leave_out:
            if kind not in (known := self.instructions.checkers()):
                near = did_you_mean(nearest(kind, known), "name kinds that the rows use")
                raise ConfigError(
                    f"env.leave_out names {kind!r}, which is not an instruction of {self.instructions.name}{near}"
                )
        rows = located_rows(self.dataset, split, self._read, held_out=self.held_out)
        kept = [number for number, row in enumerate(rows) if not self._is_left_out(row)]
        if not kept:
            raise DataError(f"env.leave_out={self.leave_out} leaves none of {len(rows)} rows: name fewer kinds")
        return rows.only(kept[: self.limit])

    def score(self, conversation: Conversation) -> Score | None:
        """See `ChatEnv.score`."""
        return self.scorer.score_conversation(conversation) if self.compute_reward else None

    @property
    def has_gold(self) -> bool:
        """See `DatasetChatEnv.has_gold`: neither benchmark has replies that follow its instructions."""
        return False

    def rehearse(self) -> list[str]:
        """See `EnvBase.rehearse`: reading the rows has tried the check of each instruction."""
        self.start()
        return [f"the instructions of {counted(self.num_tasks, 'row')} can be checked; no reply is known to be right"]

    def demonstrations(self) -> Iterator[Demonstration]:
        """See `EnvBase.demonstrations`: the field `completion` of each row, which the benchmark's own have not.

        Raises DataError for a row without one.
        """
        for where, row in self.load(self.split).located():
            answer = row.get("completion")
            if not isinstance(answer, str) or not answer.strip():
                raise DataError(
                    f"{where} has no answer to learn from, nor has any of {self.instructions.name}: "
                    "add a field 'completion' to each row"
                )
            reply = {"role": self.policy_role, "content": answer}
            yield Demonstration(where, messages=[*self.opening_messages(row), reply])

    def _read(self, row: Row) -> str:
        prompt = text_in(row, self.data_key)
        if not self._is_left_out(row) and (complaint := self.instructions.complaint(row)):
            raise FormatError(*complaint)
        return prompt

    def _is_left_out(self, row: Row) -> bool:
        kinds = row.get("instruction_id_list")
        return isinstance(kinds, list | tuple) and any(kind in kinds for kind in self.leave_out)


class IFBenchEnv(IFEvalEnv):
    """One turn on each IFBench prompt: `IFEvalEnv` with that benchmark's kinds of instructions."""

    instructions = IFBENCH

    def __init__(self, dataset: str | Sequence[Mapping[str, Any]] = IFBENCH_HUB_ID, **others: Any) -> None:
        super().__init__(dataset, **others)


def _lists(tensordict: TensorDictBase, key: str) -> list[Any]:
    """The entry `key`, a list a row."""
    return [getattr(row, "tolist", lambda row=row: row)() for row in column(tensordict, key)]
