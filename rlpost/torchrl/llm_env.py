"""Plain text that a model goes on from: no messages, no chat template."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import torch
from tensordict import TensorDictBase

from rlpost.data.conversation import Conversation, Message, Ticket
from rlpost.data.input_mode import InputMode
from rlpost.data.ragged import column
from rlpost.envs.chat import ChatEnv
from rlpost.envs.transforms.dataloading import DataLoadingPrimer
from rlpost.errors import DataError
from rlpost.rewards.score import Score
from rlpost.torchrl.flat import flat_batch


class NoPromptError(DataError, KeyError):
    """A task or TensorDict without the entry that a prompt is read from."""

    def __str__(self) -> str:
        return str(self.args[0])  # a KeyError would show the repr of it


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
    `tokens_response`, `attention_mask`: see `rlpost.torchrl.flat`), or with `flat_names=False` those that
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
        max_completion_tokens: int = 256,
        max_prompt_tokens: int | None = None,
        tokenizer: Any = None,
    ) -> None:
        super().__init__(
            batch_size,
            data_key=str_key if from_text else token_key,
            max_steps=max_steps,
            max_completion_tokens=max_completion_tokens,
            max_prompt_tokens=max_prompt_tokens,
            tokenizer=tokenizer,
            input_mode=InputMode.text if from_text else InputMode.tokens,
        )
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

        `batch_size` prompts, by default as many as the dataloader gives at a time, are under way at once:
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
        """Draw again from the first prompt on. Raises DataError without a dataloader."""
        if self.primer is None:
            raise DataError("this LLMEnv has no dataloader to begin again: make it with LLMEnv.from_dataloader")
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
            raise NoPromptError(f"reset was given {_listed(names)} and no {self._wanted()}")
        columns = {name: column(tensordict, name) for name in names}
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]

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
        if self.data_key not in task:
            raise NoPromptError(f"a task has {_listed(list(task))} and no {self._wanted()}")
        prompt = task[self.data_key]
        if self.from_text:
            if not isinstance(prompt, str):
                raise DataError(
                    f"{self.data_key!r} of a task is a {type(prompt).__name__} and no str: give a str a row"
                )
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
        """The ids of a prompt of ids, without its pads. Raises DataError for none, or for what are no ids."""
        ids = torch.as_tensor(task[self.data_key])
        if ids.ndim != 1 or ids.is_floating_point():
            raise DataError(f"{self.data_key!r} of a task is no row of token ids: {ids.dtype} of {tuple(ids.shape)}")
        kept = task.get(self.attention_key)
        ids = ids if kept is None else ids[torch.as_tensor(kept).bool()]
        if not ids.numel():
            raise DataError(f"{self.data_key!r} of a task is an empty prompt: give it at least one token")
        return ids.tolist()

    def _wanted(self) -> str:
        kind = "a str a row" if self.from_text else "token ids a row"
        return f"{self.data_key!r}, which a prompt is read from: give {kind} (from_text={self.from_text})"

    # Going on

    def respond(self, conversations: Sequence[Conversation]) -> None:
        """See `EnvBase.respond`."""
        for transform in self.transforms:
            self._in_turn(transform.on_reply, conversations)
        for conversation in conversations:
            if not conversation.done:
                self._end(conversation)

    def _end(self, conversation: Conversation) -> None:
        """End the conversation if this was its last turn."""
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
        """See `EnvBase.build_batch`; with `flat_names` the keys are those of `rlpost.torchrl.flat`."""
        return self._played(flat_batch(conversations)) if self.flat_names else super().build_batch(conversations)


def _listed(names: Sequence[Any]) -> str:
    return ", ".join(map(str, names)) or "nothing"
