"""GSM8K put together from transforms: a prompt to complete, and a parser that scores replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from rlpost.data.conversation import Conversation, strip_end_of_turn
from rlpost.data.ragged import column, strings
from rlpost.envs.dataset_chat import DatasetChatEnv
from rlpost.envs.gsm8k import HUB_ID, GSM8KEnv
from rlpost.envs.scoring import check_tiers, record_score
from rlpost.envs.transforms.base import Transform
from rlpost.errors import ConfigError
from rlpost.rewards import gsm8k
from rlpost.rewards.score import Score

COMPLETION_PROMPT = (
    "User asks a math question and Assistant solves it: the reasoning stands between <think> and </think>, "
    "the final number between <answer> and </answer>.\n\nUser: {question}\n\nAssistant: <think>"
)


class GSM8KPrepareQuestion(Transform):
    """Turns a question into a prompt that the model completes from inside its reasoning.

    `template` is formatted with `question`. Appended to an environment it rewrites the user's
    message; called on a TensorDict it rewrites the entry `in_key` into `out_key`.
    """

    def __init__(self, template: str = COMPLETION_PROMPT, in_key: str = "text", out_key: str | None = None) -> None:
        if "{question}" not in template:
            raise ConfigError(f"template={template!r} has no {{question}}: every prompt would be the same")
        self.template = template
        self.in_key = in_key
        self.out_key = in_key if out_key is None else out_key

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
        return tensordict.set(self.out_key, strings(prepared))


class GSM8KRewardParser(Transform):
    """Scores replies: `tiers` are the rewards of a right answer, of another answer, and of none.

    Only the reply is read, never the prompt, whose own tags would count. Appended to an
    environment it scores and ends each conversation, on top of a reward that is there already; the
    task's `answer` is the truth, alone or after the solution and "#### ".
    """

    def __init__(self, tiers: tuple[float, float, float] = gsm8k.TIERS) -> None:
        check_tiers(tiers)
        self.tiers = tiers

    def score(self, reply: str, truth: str) -> Score:
        """The score of `reply`, an end-of-turn marker at its end left out."""
        return gsm8k.score(strip_end_of_turn(reply), final_answer(truth), self.tiers)

    def on_reply(self, conversations: Sequence[Conversation]) -> None:
        """Score and end each conversation: `truncated` where the reply was cut, else `terminated`."""
        for conversation in conversations:
            record_score(conversation, lambda c: self.score(c.response_text, c.task["answer"]))
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
        scores = [self.score(reply, truth) for reply, truth in zip(replies, truths, strict=True)]

        def cube(values: Sequence[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype).view(-1, 1, 1)  # (B, 1, 1)

        reward = cube([score.reward for score in scores])
        if "reward" in tensordict:
            reward = reward + tensordict["reward"].view(-1, 1, 1)
        tensordict.set("reward_answer", cube([float(bool(v.answer)) for v in verdicts]))
        tensordict.set("reward_think", cube([float(v.think is not None) for v in verdicts]))
        tensordict.set("reward_right", cube([float(v.right) for v in verdicts]))
        tensordict.set("reward", reward)
        tensordict.set("success", cube([v.right for v in verdicts], torch.bool))
        return tensordict.set("done", cube([bool(v.answer) for v in verdicts], torch.bool))


def make_gsm8k_env(dataset: str | Sequence[Mapping[str, Any]] = HUB_ID, **chat: Any) -> DatasetChatEnv:
    """GSM8K put together from its transforms: no system prompt, and a prompt to complete.

    `GSM8KEnv` asks the same questions with a system prompt instead, as instruct models expect. Other
    arguments are `DatasetChatEnv`'s, such as `num_envs`, `repeats` and `tokenizer`.
    """
    env = GSM8KEnv(dataset, system_prompt=None, compute_reward=False, **chat)
    return env.append_transform(GSM8KPrepareQuestion()).append_transform(GSM8KRewardParser())


def final_answer(truth: str) -> str:
    """What stands after "#### " in the dataset's `answer`, or all of it where there is no such mark."""
    return truth.rpartition("####")[2].strip()
