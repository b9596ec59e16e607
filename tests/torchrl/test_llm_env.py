# pyright: reportArgumentType=false
# TensorDict.set takes a list of str, which its annotation leaves out

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rlpost.data.conversation import Completion, Conversation
from rlpost.data.ragged import strings
from rlpost.envs import LLMEnv
from rlpost.envs.transforms import Transform
from rlpost.errors import DataError
from rlpost.model.conversion import tiny_tokenizer
from rlpost.policies import ScriptedPolicy
from rlpost.settings import SamplingSettings
from rlpost.testing import DummyTensorDataLoader

PROMPTS = [{"text": "once"}, {"text": "twice"}, {"text": "thrice"}]

tokenizer = tiny_tokenizer()


def ids_of(text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def turn(text: str) -> list[int]:
    return [*ids_of(text), tokenizer.eos_token_id]


def scripted(*replies: str) -> ScriptedPolicy:
    return ScriptedPolicy(replies, tokenizer, sampling=SamplingSettings())


def say(env: LLMEnv, conversations: list[Conversation], text: str, *, stop: bool = True) -> None:
    for conversation in conversations:
        ids = turn(text) if stop else ids_of(text)
        conversation.add_completion(Completion(ids, [0.0] * len(ids), text, "stop" if stop else "length", 0))
    env.advance(conversations)


def test_prompts_are_padded_on_the_left_responses_on_the_right() -> None:
    env = LLMEnv.from_dataloader(PROMPTS, tokenizer=tokenizer, batch_size=2)
    drawn = env.draw()
    scripted("a", "bcd").reply(drawn)
    env.advance(drawn)
    batch = env.build_batch(drawn)
    assert batch["tokens"].tolist() == [
        [0, *ids_of("once"), *turn("a"), 0, 0],
        [*ids_of("twice"), *turn("bcd")],
    ]
    assert batch["attention_mask"].tolist() == [[0, 1, 1, 1, 1, 1, 1, 0, 0], [1] * 9]
    assert batch["attention_mask"].dtype == torch.int64
    assert (batch["text"], batch["text_response"]) == (["once", "twice"], ["a", "bcd"])
    assert torch.equal(batch["tokens"][:, 5:], batch["tokens_response"])
    assert batch["log_probs"].shape == (2, 4)


def test_each_turn_goes_on_from_all_before() -> None:
    env = LLMEnv(tokenizer=tokenizer, max_steps=3)
    played = env.rollout(5, scripted("ab"), tensordict=TensorDict(text="x", batch_size=[1]))
    assert played.batch_size == torch.Size([1, 3])
    texts = ["x" + f"ab{tokenizer.eos_token}" * turns for turns in range(4)]
    assert [played[:, i]["text", "prompt"] for i in range(3)] == [[text] for text in texts[:3]]
    assert [played[:, i]["next", "text", "prompt"] for i in range(3)] == [[text] for text in texts[1:]]
    [conversation] = played[:, -1]["next", "conversation"]
    assert conversation.response_ids == turn("ab") * 3
    assert env.build_batch([conversation])["text_response"] == ["ababab"]


@pytest.mark.parametrize("with_tokenizer", [False, True])
def test_prompts_may_be_ids(with_tokenizer: bool) -> None:
    known: dict[str, Any] = {"tokenizer": tokenizer} if with_tokenizer else {}
    env = LLMEnv(2, from_text=False, max_steps=2, **known)
    given = torch.tensor([[0, 0, 7, 8], [1, 2, 3, 4]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    shown = env.reset(TensorDict({"tokens": given, "attention_mask": mask}, batch_size=[2]))
    assert [row.tolist() for row in shown["tokens", "prompt"].unbind()] == [[7, 8], [1, 2, 3, 4]]
    shown["tokens_response"] = torch.tensor([[70], [71]])
    stepped = env.step(shown)
    assert [row.tolist() for row in stepped["next", "tokens", "prompt"].unbind()] == [[7, 8, 70], [1, 2, 3, 4, 71]]
    texts = [c.response_text for c in stepped["next", "conversation"]]
    assert texts == ([tokenizer.decode([70]), tokenizer.decode([71])] if with_tokenizer else ["", ""])


@pytest.mark.parametrize("padding", [False, True])
def test_a_dataloader_may_give_ids(padding: bool) -> None:
    wanted = next(iter(DummyTensorDataLoader(2)))["tokens"]
    for group_repeats, prompts in {True: [0, 0, 1, 1], False: [0, 0]}.items():
        loader = DummyTensorDataLoader(2, padding=padding)
        env = LLMEnv.from_dataloader(loader, from_text=False, repeats=2, group_repeats=group_repeats)
        assert env.batch_size == (len(prompts),)
        assert [c.prompt_ids for c in env.draw()] == [wanted[i].tolist() for i in prompts]


@pytest.mark.parametrize(
    ("stop", "assign_done", "max_steps", "ended"),
    [
        (True, False, 1, (True, False)),
        (False, False, 1, (False, True)),
        (True, False, 2, (False, False)),
        (True, True, 2, (True, False)),
        (False, True, 2, (False, False)),
        (True, False, None, (False, False)),
        (True, True, None, (True, False)),
    ],
)
def test_when_a_conversation_is_over(
    stop: bool, assign_done: bool, max_steps: int | None, ended: tuple[bool, bool]
) -> None:
    env = LLMEnv.from_dataloader(PROMPTS, assign_done=assign_done, max_steps=max_steps)
    drawn = env.draw()
    say(env, drawn, "ab", stop=stop)
    assert (drawn[0].terminated, drawn[0].truncated) == ended


def test_another_token_may_end_a_conversation() -> None:
    env = LLMEnv.from_dataloader(PROMPTS, assign_done=True, max_steps=None, eos_token_id=ids_of(".")[0])
    drawn = env.draw()
    say(env, drawn, "ab")
    assert not drawn[0].done
    say(env, drawn, "cd.", stop=False)
    assert drawn[0].terminated


def test_a_transform_may_give_the_reward() -> None:
    class Length(Transform):
        def on_reply(self, conversations: Any) -> None:
            for conversation in conversations:
                conversation.reward = float(len(conversation.response_text))

    env = LLMEnv.from_dataloader(PROMPTS, assign_reward=True, batch_size=3).append_transform(Length())
    stepped = env.step(env.reset().set("text_response", ["a", "bb", "ccc"]))
    assert stepped["next", "reward"].tolist() == [[1.0], [2.0], [3.0]]


def test_three_turns_are_rewarded_one_by_one() -> None:
    env = LLMEnv.from_dataloader(PROMPTS, tokenizer=tokenizer, batch_size=2, max_steps=3, assign_reward=True)
    played = env.rollout(3, scripted("ab"))
    assert played["next", "reward"].tolist() == [[[0.0]] * 3] * 2
    assert played["next", "done"].tolist() == [[[False], [False], [True]]] * 2


def test_a_missing_prompt_is_a_missing_key() -> None:
    for env, given, error in [
        (LLMEnv(), None, KeyError),
        (LLMEnv(), {"other": torch.zeros(1)}, KeyError),
        (LLMEnv(from_text=False), {"text": strings(["a"])}, DataError),
    ]:
        with pytest.raises(error, match="'text'" if error is KeyError else r"'tokens'.*from_text=False"):
            env.reset(None if given is None else TensorDict(given, batch_size=[1]))
