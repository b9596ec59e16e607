"""Environments of TorchRL's first LLM interface: LLMEnv and its batches LLMData, GSM8K, and LLMHashingEnv.

In LLMEnv a model continues plain text: there are no messages and no chat template.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Self

import torch
from tensordict import NonTensorStack, TensorClass, TensorDict, TensorDictBase

from rlpost.data.conversation import Conversation, InputMode, Message, Ticket, strip_end_of_turn
from rlpost.data.ragged import column, fields_of, ragged, settle, strings
from rlpost.envs.base import Transform, one_dimension
from rlpost.envs.chat import ChatEnv, DatasetChatEnv, record_score
from rlpost.envs.gsm8k import HUB_ID, GSM8KEnv
from rlpost.envs.transforms.training import DataLoadingPrimer
from rlpost.errors import DataError
from rlpost.rewards import gsm8k
from rlpost.rewards.score import Score
from rlpost.torchrl.chat_envs import flat_batch, rows_as_dicts
from rlpost.torchrl.frames import Categorical, TensorDictEnv

COMPLETION_PROMPT = (
    "User asks a math question and Assistant solves it: the reasoning stands between <think> and </think>, "
    "the final number between <answer> and </answer>.\n\nUser: {question}\n\nAssistant: <think>"
)
_BYTES = 8  # of a hash, and of a token in it
_LISTS = ("token_list", "tokens_response_list")


class LLMEnv(ChatEnv):
    """Prompts that the model goes on from as they stand, each turn from all that was written before.

    With `from_text` a prompt is the str under `str_key`, else the ids under `token_key`, those where
    `attention_key`, if there, is not 0; the text of ids is there with a `tokenizer` alone. Prompts come
    with `reset`, or from an appended `DataLoadingPrimer`.

    A conversation is over with its `max_steps`-th turn: `terminated` where the model stopped there,
    else `truncated`. None: it has no end. With `assign_done` it is over, in any turn, once the model
    stops: with `eos_token_id` where that is given, else with whatever ends its turns. With
    `assign_reward` a finished conversation has the reward 0, which transforms add to, else none.

    A collector delivers the flat names of `LLMData` (`text`, `text_response`, `tokens`,
    `tokens_response`, `attention_mask`: see `rlpost.torchrl.chat_envs`), or with `flat_names=False` those that
    losses read, as every other environment has them. Other arguments are `ChatEnv`'s.

    Raises NoPromptError (a KeyError) for a task or TensorDict without its prompt.
    """

    max_reward = None
    has_accuracy = False
    takes_tools = False

    def __init__(
        self,
        batch_size: int | Sequence[int] = (1,),
        *,
        from_text: bool = True,
        str_key: str = "text",
        token_key: str = "tokens",
        attention_key: str = "attention_mask",
        eos_token_id: int | None = None,
        assign_reward: bool = False,
        assign_done: bool = False,
        flat_names: bool = True,
        max_steps: int | None = 1,
        **chat: Any,
    ) -> None:
        mode, key = (InputMode.text, str_key) if from_text else (InputMode.tokens, token_key)
        super().__init__(batch_size, data_key=key, input_mode=mode, max_steps=max_steps, **chat)
        self.from_text = from_text
        self.attention_key = attention_key
        self.eos_token_id = eos_token_id
        self.assign_reward = assign_reward
        self.assign_done = assign_done
        self.flat_names = flat_names

    @classmethod
    def from_dataloader(
        cls,
        dataloader: Iterable[Any] | None = None,
        *,
        dataloader_factory: Callable[[], Iterable[Any]] | None = None,
        batch_size: int | Sequence[int] | None = None,
        repeats: int | None = None,
        group_repeats: bool = True,
        **env: Any,
    ) -> Self:
        """An environment with the prompts of a dataloader, each given to `repeats` conversations in a row.

        `batch_size` prompts, by default those of one element of the dataloader, are in flight at once:
        with `group_repeats` in `batch_size * repeats` conversations, else in as many as there are prompts.
        Other arguments are those of the class, the dataloader and its factory those of `DataLoadingPrimer`.
        """
        size = (getattr(dataloader, "batch_size", None) or 1) if batch_size is None else batch_size
        primer = DataLoadingPrimer(
            dataloader,
            dataloader_factory=dataloader_factory,
            repeats=repeats,
            batch_size=size,
            group_repeats=group_repeats,
        )
        assert primer.batch_size is not None
        return cls(primer.batch_size, **env).append_transform(primer)

    def check_tokenizer(self) -> None:
        """See `EnvBase.check_tokenizer`: prompts are there as they are to be shown, and none is needed."""

    @property
    def answers(self) -> bool:
        """See `ChatEnv.answers`: all that is written is the model's."""
        return False

    def reset_dataloader(self) -> None:
        """Draw again from the first prompt on."""
        assert self.primer is not None  # from_dataloader made this environment
        self.primer.reset_dataloader()

    # Beginning

    def tickets(self, count: int | None = None) -> list[Ticket]:
        """See `EnvBase.tickets`; raises NoPromptError without a dataloader."""
        if self.primer is None:
            raise NoPromptError(
                f"this LLMEnv has no prompts of its own: reset it with a TensorDict that holds {self.data_key!r}, or "
                "make it with LLMEnv.from_dataloader"
            )
        return super().tickets(count)

    def rows_of(self, tensordict: TensorDictBase) -> list[dict[str, Any]]:
        """See `EnvBase.rows_of`; its prompt is under this environment's own key."""
        names = list(map(str, tensordict.keys()))
        if self.data_key not in names:
            raise NoPromptError(
                f"reset was given {', '.join(names) or 'nothing'} and no {self.data_key!r}, which a prompt is read "
                f"from (from_text={self.from_text})"
            )
        return rows_as_dicts(tensordict)

    def begin(self, rows: Sequence[Mapping[str, Any]]) -> list[Conversation]:
        """See `EnvBase.begin`."""
        first = self._begun
        self._begun += len(rows)
        return self._opened([self._conversation(row, first + i, 0) for i, row in enumerate(rows)])

    def opening_messages(self, task: Mapping[str, Any]) -> list[Message]:
        """See `ChatEnv.opening_messages`: the text of the prompt, which is rendered as it stands."""
        return [{"role": self.user_role, "content": self.user_message(task)}]

    def user_message(self, task: Mapping[str, Any]) -> str:
        """The text of the prompt; empty where it is ids and no tokenizer can tell."""
        prompt = task[self.data_key]
        if self.from_text:
            return prompt
        return "" if self.tokenizer is None else self.tokenizer.decode(self._ids(task))

    def _conversation(self, task: Mapping[str, Any], group: int, sample: int) -> Conversation:
        conversation = super()._conversation(task, group, sample)
        conversation.chat = False
        conversation.prompt_text = conversation.messages[0]["content"]
        if not self.from_text:
            conversation.prompt_ids = self._ids(task)
        return conversation

    def _ids(self, task: Mapping[str, Any]) -> list[int]:
        """The ids of a prompt of ids, without its pads."""
        ids = torch.as_tensor(task[self.data_key])
        kept = torch.as_tensor(task.get(self.attention_key, torch.ones_like(ids)))
        return ids[kept.bool()].tolist()

    # Going on

    def respond(self, conversations: Sequence[Conversation]) -> None:
        """See `EnvBase.respond`."""
        for transform in self.transforms:
            self._in_turn(transform.on_reply, conversations)
        for conversation in conversations:
            if not conversation.done:
                last = self._was_last(conversation)
                conversation.terminated = (last or self.assign_done) and self._stopped(conversation)
                no_more = last or conversation.finish_reason == "context"
                conversation.truncated = no_more and not conversation.terminated

    def _stopped(self, conversation: Conversation) -> bool:
        if self.eos_token_id is not None and conversation.response_ids:
            return conversation.response_ids[-1] == self.eos_token_id
        return conversation.finish_reason == "stop"

    def score(self, conversation: Conversation) -> Score | None:
        """See `ChatEnv.score`: 0 with `assign_reward`, else nothing."""
        return Score(0.0) if self.assign_reward else None

    def build_batch(self, conversations: Sequence[Conversation]) -> TensorDictBase:
        """See `EnvBase.build_batch`; with `flat_names` the keys are those of `rlpost.torchrl.chat_envs`."""
        return self.transformed(flat_batch(conversations)) if self.flat_names else super().build_batch(conversations)


class NoPromptError(DataError, KeyError):
    """A task or TensorDict without the entry that a prompt is read from."""

    def __str__(self) -> str:
        return str(self.args[0])  # a KeyError would show the repr of it


# GSM8K from transforms


def make_gsm8k_env(dataset: str | Sequence[Mapping[str, Any]] = HUB_ID, **chat: Any) -> DatasetChatEnv:
    """GSM8K put together from its transforms: no system prompt, and a prompt to complete.

    `GSM8KEnv` asks the same questions with a system prompt instead, as instruct models expect. Other
    arguments are `DatasetChatEnv`'s, such as `num_envs`, `repeats` and `tokenizer`.
    """
    env = GSM8KEnv(dataset, system_prompt=None, compute_reward=False, **chat)
    return env.append_transform(GSM8KPrepareQuestion()).append_transform(GSM8KRewardParser())


@dataclass(eq=False)
class GSM8KPrepareQuestion(Transform):
    """Turns a question into a prompt that the model completes from inside its reasoning.

    `template` is formatted with `question`. Appended to an environment it rewrites the user's
    message; called on a TensorDict it rewrites the entry `in_key` into `out_key`.
    """

    template: str = COMPLETION_PROMPT
    in_key: str = "text"
    out_key: str | None = None  # None: `in_key`

    def prepare(self, question: str) -> str:
        """The prompt for `question`."""
        return self.template.format(question=question)

    def on_begin(self, conversations: Sequence[Conversation]) -> None:
        """Rewrite the last message of each conversation; alone, it is the prompt as it stands, and no chat."""
        for conversation in conversations:
            last = conversation.messages[-1]
            conversation.messages[-1] = {**last, "content": self.prepare(last["content"])}
            conversation.chat = len(conversation.messages) > 1

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Rewrite `in_key` of a TensorDict that has it as plain text; what an environment returns has not."""
        if self.in_key not in tensordict or "conversation" in tensordict:
            return tensordict
        prepared = [self.prepare(question) for question in column(tensordict, self.in_key)]
        return tensordict.set(self.out_key or self.in_key, strings(prepared))


@dataclass(eq=False)
class GSM8KRewardParser(Transform):
    """Scores replies: `tiers` are the rewards of a right answer, of another answer, and of none.

    Only the reply is read, never the prompt, whose own tags would count. Appended to an
    environment it scores and ends each conversation, on top of a reward that is there already; the
    task's `answer` is the truth, alone or after the solution and "#### ".
    """

    tiers: tuple[float, float, float] = gsm8k.TIERS

    def score(self, reply: str, truth: str) -> Score:
        """The score of `reply`, an end-of-turn marker at its end left out."""
        return gsm8k.score(strip_end_of_turn(reply), final_answer(truth), self.tiers)

    def on_reply(self, conversations: Sequence[Conversation]) -> None:
        """Score and end each conversation: `truncated` where the reply was cut, else `terminated`."""
        for conversation in conversations:
            record_score(conversation, lambda c: self.score(c.reply, c.task["answer"]))
            conversation.truncated = conversation.finish_reason == "length"
            conversation.terminated = not conversation.truncated

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Score a TensorDict of batch size (B,) that holds `text_response` (or `("text", "response")`) and `answer`.

        Writes `reward_answer` (1 for a non-empty answer block), `reward_think` (1 for a think
        block), `reward_right` (1 if right), `reward` (the tier, on top of a reward there is) and
        `success`, (B, 1, 1) each, and sets `done` where there is an answer. What `step` returns is
        scored already and left as it is.
        """
        if "answer" not in tensordict or "conversation" in tensordict:
            return tensordict
        key = "text_response" if "text_response" in tensordict else ("text", "response")
        replies = [strip_end_of_turn(reply) for reply in column(tensordict, key)]
        truths = [final_answer(truth) for truth in column(tensordict, "answer")]
        verdicts = [gsm8k.judge(reply, truth) for reply, truth in zip(replies, truths, strict=True)]
        rewards = torch.tensor([self.score(*pair).reward for pair in zip(replies, truths, strict=True)])
        if "reward" in tensordict:
            rewards = rewards + tensordict["reward"].flatten()
        columns = {
            "reward_answer": torch.tensor([float(bool(v.answer)) for v in verdicts]),
            "reward_think": torch.tensor([float(v.think is not None) for v in verdicts]),
            "reward_right": torch.tensor([float(v.right) for v in verdicts]),
            "reward": rewards,
            "success": torch.tensor([v.right for v in verdicts]),
            "done": torch.tensor([bool(v.answer) for v in verdicts]),
        }
        return tensordict.update({name: values.view(-1, 1, 1) for name, values in columns.items()})


def final_answer(truth: str) -> str:
    """The part of the dataset's `answer` after "#### ", or all of it without that mark."""
    return truth.rpartition("####")[2].strip()


# Token sequences as the nodes of a search tree


class LLMHashingEnv(TensorDictEnv):
    """Appends one token a step to each of B sequences; a sequence's hash stands for all of it.

    The hash of a sequence is h(hash of the sequence without its last token, last token), with
    BLAKE2b of 64 bits keyed by `seed`: the same in every process, equal for equal sequences however
    they came about, and different for two different ones but for a chance of 2^-64. It does not
    score or end anything, and keeps no state: what a step needs travels in the TensorDict. A `Collector` plays it
    as it plays any other, with random tokens where it has no policy.

    Ids lie below `vocab_size`, by default the number of `tokenizer`'s tokens; with a tokenizer the text
    is written too. Raises TypeError where there is neither.
    """

    def __init__(
        self,
        vocab_size: int | None = None,
        *,
        tokenizer: Any = None,
        batch_size: int | Sequence[int] = (1,),
        seed: int = 0,
        observation_key: str = "observation",
        hashing_key: str = "hashing",
        action_key: str = "action",
        text_key: str = "text",
    ) -> None:
        self.vocab_size = len(tokenizer) if vocab_size is None else vocab_size
        self.batch_size = one_dimension(batch_size)
        self.tokenizer = tokenizer
        self.action_spec = Categorical(self.vocab_size)
        self.text_key = text_key
        self.observation_keys, self.action_keys = (observation_key, hashing_key), (action_key,)
        self.transforms: list[Transform] = []
        self._key = seed.to_bytes(_BYTES, "big", signed=True)

    def reset(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """The sequences to begin with: the ids or, with a tokenizer, the texts of `tensordict`; else empty ones.

        Returns a TensorDict (B,) with the ids, ragged (B, *), the hashes (B, 1) int64, the texts where there
        is a tokenizer, and `done`, `terminated` and `truncated` (B, 1), False. B is the rows given, else `batch_size`.
        """
        rows = [[]] * self.batch_size[0]
        if tensordict is not None and self.observation_keys[0] in tensordict:
            rows = [row.tolist() for row in column(tensordict, self.observation_keys[0])]
        elif tensordict is not None and self.text_key in tensordict:
            texts = column(tensordict, self.text_key)
            rows = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        return self._observed(rows, [self.hash_of(row) for row in rows])

    def begin(self, where: torch.Tensor) -> TensorDictBase:
        """See `TensorDictEnv.begin`: empty sequences."""
        return self.reset()

    def act(self, tensordict: TensorDictBase) -> TensorDictBase:
        """See `TensorDictEnv.act`: `action`, an id a row, (B,) or (B, 1), is appended."""
        ids, hashes = (column(tensordict, key) for key in self.observation_keys)
        tokens = tensordict.get(self.action_keys[0]).flatten().tolist()
        rows = [[*row.tolist(), token] for row, token in zip(ids, tokens, strict=True)]
        return self._observed(rows, [self._chained(int(h), token) for h, token in zip(hashes, tokens, strict=True)])

    def append_transform(self, transform: Transform) -> Self:
        """Let `transform` change what `reset` and `step` show, after those there are; returns this environment."""
        transform.start()
        self.transforms.append(transform)
        return self

    def close(self) -> None:
        """Release what transforms hold; a second call does nothing."""
        for transform in self.transforms:
            transform.close()

    def hash_of(self, ids: Sequence[int]) -> int:
        """The hash of a whole sequence: what `reset` and the steps of its ids give; signed, of 64 bits."""
        return reduce(self._chained, ids, 0)

    def _chained(self, hash_: int, token: int) -> int:
        pair = hash_.to_bytes(_BYTES, "big", signed=True) + token.to_bytes(_BYTES, "big")
        digest = hashlib.blake2b(pair, digest_size=_BYTES, key=self._key).digest()
        return int.from_bytes(digest, "big", signed=True)

    def _observed(self, rows: Sequence[list[int]], hashes: Sequence[int]) -> TensorDictBase:
        shown: Any = TensorDict(batch_size=[len(rows)])
        shown.set(self.observation_keys[0], ragged([torch.tensor(row, dtype=torch.int64) for row in rows]))
        shown.set(self.observation_keys[1], torch.tensor(hashes, dtype=torch.int64).unsqueeze(-1))
        for name in ("done", "terminated", "truncated"):
            shown.set(name, torch.zeros(len(rows), 1, dtype=torch.bool))
        if self.tokenizer is not None:
            shown.set(self.text_key, strings([self.tokenizer.decode(row) for row in rows]))
        for transform in self.transforms:
            shown = transform(shown)
        return shown


# Prompts and replies under flat names


class LLMData(TensorClass["nocast"]):
    """B prompts and the replies to them; what is not given is None.

    `tokens` are the prompts' ids (B, P), padded on the left, and `attention_mask` is 1 on those that
    are not padding; `tokens_response` the replies' (B, R), padded on the right, as are their
    `log_probs` (0.0) and `logits` (B, R, V). `token_list` and `tokens_response_list` are the same ids
    as lists, without padding. `text` is the prompts as they were rendered, `text_response` what the
    model said.
    """

    tokens: torch.Tensor | None = None
    tokens_response: torch.Tensor | None = None
    attention_mask: torch.Tensor | None = None
    token_list: Any = None
    tokens_response_list: Any = None
    logits: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None
    text: Any = None
    text_response: Any = None

    def __post_init__(self) -> None:
        fields = fields_of(self)
        settle(fields, (*_LISTS, "text", "text_response"))
        for name in _LISTS:
            rows = fields.get(name, None)
            values = rows.tolist() if isinstance(rows, NonTensorStack) else []
            if any(isinstance(row, torch.Tensor) for row in values):  # tensordict made tensors of uneven lists
                fields.set(name, strings([torch.as_tensor(row).tolist() for row in values]))
