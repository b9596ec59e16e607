# pyright: reportArgumentType=false
# TensorDict.set takes a list of str, which its annotation leaves out

"""The same conversations in the three input modes: what is shown, what is taken, and what it is worth."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from rlpost.data.conversation import Conversation
from rlpost.data.history import History
from rlpost.data.ragged import ragged, strings
from rlpost.envs import ArithmeticEnv, ChatEnv, EnvBase, GSM8KEnv
from rlpost.errors import ConfigError, DataError
from rlpost.model.conversion import tiny_tokenizer
from rlpost.policies import ScriptedPolicy
from rlpost.settings import SamplingSettings

MODES = ("history", "text", "tokens")
OPENING = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\none?<|im_end|>\n<|im_start|>assistant\n"
SAID = f"{OPENING}1<|im_end|>\n<|im_start|>user\nand then?<|im_end|>\n<|im_start|>assistant\n"
GSM8K = [{"question": "What is 6 times 7?", "answer": "6*7=42\n#### 42"}]

tokenizer = tiny_tokenizer()


def ids_of(text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def answered(env: EnvBase, shown: TensorDictBase, replies: Sequence[str]) -> TensorDictBase:
    """`shown` with the replies written as a policy of the environment's mode writes them."""
    if env.input_mode.value == "tokens":
        # the end-of-turn token is sampled too
        sampled = [[*ids_of(reply), tokenizer.eos_token_id] for reply in replies]
        shown["tokens", "response"] = ragged([torch.tensor(row) for row in sampled])
        return shown
    if env.input_mode.value == "text":
        shown["text", "response"] = strings(list(replies))
        return shown
    return shown.set("text_response", strings(list(replies)))


class Counting(ChatEnv):
    """Asks "and then?" until it has had two replies."""

    def next_message(self, conversation: Conversation) -> str | None:
        return None if conversation.turns == 2 else "and then?"


def counting(mode: str, **more: Any) -> Counting:
    return Counting(1, input_mode=mode, tokenizer=tokenizer, system_prompt="Be brief.", max_steps=3, **more)


def asked(env: EnvBase) -> TensorDictBase:
    return env.reset(TensorDict(text="one?", batch_size=[1]))


def test_what_is_shown_has_the_form_of_the_mode() -> None:
    shown = {mode: asked(counting(mode)) for mode in MODES}
    assert shown["history"]["history"].to_chats() == [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one?"}]
    ]
    assert shown["text"]["text", "prompt"] == [OPENING]
    assert [row.tolist() for row in shown["tokens"]["tokens", "prompt"].unbind()] == [ids_of(OPENING)]
    forms = {mode: {"history", "text", "tokens"} & set(shown[mode].keys()) for mode in MODES}
    assert forms == {"history": {"history", "text", "tokens"}, "text": {"text"}, "tokens": {"tokens"}}


@pytest.mark.parametrize("mode", MODES)
def test_the_next_prompt_is_all_that_was_said(mode: str) -> None:
    env = counting(mode)
    stepped, following = env.step_and_maybe_reset(answered(env, asked(env), ["1"]))
    for shown in (stepped["next"], following):
        if mode == "tokens":
            [row] = shown["tokens", "prompt"].unbind()
            assert tokenizer.decode(row) == SAID
            carried = [*ids_of(OPENING), *ids_of("1"), tokenizer.eos_token_id]
            assert row.tolist()[: len(carried)] == carried
        else:
            assert shown["text", "prompt"] == [SAID]
    last = env.step(answered(env, following, ["2"]))
    assert last["next", "terminated"].tolist() == [[True]]
    [conversation] = last["next", "conversation"]
    assert [m["content"] for m in conversation.messages] == ["Be brief.", "one?", "1", "and then?", "2"]


def test_ids_are_carried_forward_though_their_text_would_be_tokenised_otherwise() -> None:
    """A tokenizer that knows "ab" as one token, and a policy that sampled "a" and "b"."""

    class Merging:
        eos_token = "<|im_end|>"
        name_or_path = "merging"

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def __call__(self, text: str, add_special_tokens: bool = True, **more: Any) -> Any:
            encoded = tokenizer(text, add_special_tokens=add_special_tokens, **more)
            a, b = ids_of("a"), ids_of("b")
            merged: list[int] = []
            for token in encoded["input_ids"]:
                if merged[-1:] == a and [token] == b:
                    merged[-1] = 100_000  # "ab"
                else:
                    merged.append(token)
            return {**encoded, "input_ids": merged}

    env = Counting(1, input_mode="tokens", tokenizer=Merging(), max_steps=3)
    shown = asked(env)
    sampled = [*ids_of("a"), *ids_of("b"), tokenizer.eos_token_id]
    assert Merging()("ab")["input_ids"] == [100_000]
    shown["tokens", "response"] = ragged([torch.tensor(sampled)])
    _, following = env.step_and_maybe_reset(shown)
    [prompt], [first] = following["tokens", "prompt"].unbind(), shown["tokens", "prompt"].unbind()
    assert prompt.tolist()[: first.numel() + 3] == first.tolist() + sampled


REPLIES = {
    "<think>6*7</think><answer>42</answer>": (1.0, 1.0),
    "<answer>43</answer>": (0.1, 0.0),
    "no idea": (0.0, 0.0),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("reply", "worth"), REPLIES.items())
def test_gsm8k_is_worth_the_same_in_each_mode(mode: str, reply: str, worth: tuple[float, float]) -> None:
    env = GSM8KEnv(GSM8K, input_mode=mode, tokenizer=tokenizer)
    stepped = env.step(answered(env, env.reset(), [reply]))
    assert stepped["next", "reward"].flatten().tolist() == pytest.approx([worth[0]])
    assert stepped["next", "accuracy_strict"].tolist() == [[worth[1]]]
    assert stepped["next", "done"].tolist() == [[True]]


@pytest.mark.parametrize("mode", MODES)
def test_arithmetic_is_worth_the_same_in_each_mode(mode: str) -> None:
    env = ArithmeticEnv(input_mode=mode, tokenizer=tokenizer, num_envs=3, seed=5)
    shown = env.reset()
    truths = [conversation.task["answer"] for conversation in shown["conversation"]]
    replies = [truths[0], f"It is {truths[1]}1.", "no number"]
    stepped = env.step(answered(env, shown, replies))
    scores = [
        env.score(Conversation({"answer": truth}, [], response_text=reply))
        for truth, reply in zip(truths, replies, strict=True)
    ]
    assert stepped["next", "reward"].squeeze(-1).tolist() == pytest.approx([score.reward for score in scores])
    assert scores[0].reward == 1.0 > scores[1].reward
    assert stepped["next", "accuracy_lenient"].tolist() == [[1.0], [0.0], [0.0]]


def written(shown: TensorDictBase, place: str, text: str) -> TensorDictBase:
    """`shown` with a reply written in another place that a reply may have."""
    end = "<|im_end|>\n"
    ids = torch.tensor(ids_of(text))
    match place:
        case "text_response":
            return shown.set("text_response", [text + end])
        case "text.response":
            return shown.set(("text", "response"), [text + end])
        case "text.full":
            return shown.set(("text", "full"), [shown["text", "prompt"][0] + text])
        case "tokens_response":
            return shown.set("tokens_response", ids[None])
        case "tokens.response":
            return shown.set(("tokens", "response"), ids[None])
        case "tokens.full":
            [prompt] = shown["tokens", "prompt"].unbind()
            return shown.set(("tokens", "full"), ragged([torch.cat([prompt, ids])]))
    answer = History.from_chats([[{"role": "assistant", "content": text}]])
    return shown.set("history", shown["history"].extend(answer))


@pytest.mark.parametrize(
    ("mode", "place"),
    [
        ("text", "text_response"),
        ("text", "text.full"),
        ("tokens", "tokens_response"),
        ("tokens", "tokens.full"),
        ("history", "tokens.response"),
    ],
)
def test_a_reply_may_be_written_in_other_places(mode: str, place: str) -> None:
    env = GSM8KEnv(GSM8K, input_mode=mode, tokenizer=tokenizer)
    right = "<answer>42</answer>"
    stepped = env.step(written(env.reset(), place, right))
    [conversation] = stepped["next", "conversation"]
    assert conversation.response_text == right
    assert stepped["next", "reward"].tolist() == [[1.0]]


@pytest.mark.parametrize(
    ("mode", "place"),
    [
        ("history", "text_response"),
        ("history", "text.response"),
        ("history", "history"),
        ("text", "text.response"),
    ],
)
def test_a_policy_reads_a_turn_given_as_text(mode: str, place: str) -> None:
    env = counting(mode)
    _, following = env.step_and_maybe_reset(written(asked(env), place, "1"))
    assert following["text", "prompt"] == [SAID]
    policy = ScriptedPolicy(["2"], tokenizer, sampling=SamplingSettings())
    [conversation] = env.step(policy(following))["next", "conversation"]
    assert tokenizer.decode(conversation.prompt_ids) == OPENING
    assert tokenizer.decode(conversation.response_ids) == f"{SAID.removeprefix(OPENING)}2<|im_end|>"
    between = len(SAID.removeprefix(OPENING)) - 2 * len("<|im_end|>") - 2 * len("<|im_start|>") + 4  # a byte an id
    assert conversation.mask == [0] * between + [1, 1]


def test_a_tokenizer_without_a_template_gets_the_one_of_its_name() -> None:
    bare = tiny_tokenizer()
    bare.chat_template, bare.name_or_path = None, "models/gemma-base"
    gemma = "<bos><start_of_turn>user\none?<end_of_turn>\n<start_of_turn>model\n"
    policy = ScriptedPolicy(["2"], bare, sampling=SamplingSettings())
    for mode in MODES:
        assert policy(asked(ChatEnv(1, input_mode=mode, tokenizer=bare)))["text", "prompt"] == [gemma]


def test_a_policy_that_read_other_ids_is_found_out() -> None:
    env = counting("tokens")
    _, second = env.step_and_maybe_reset(answered(env, asked(env), ["1"]))
    again = [*ids_of(SAID)]
    again[3] += 1
    second["tokens", "prompt"] = ragged([torch.tensor(again)])
    with pytest.raises(DataError, match="turn 2"):
        env.step(answered(env, second, ["2"]))


def test_modes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="input_mode=speech"):
        ChatEnv(input_mode="speech")
    for mode in ("text", "tokens"):
        with pytest.raises(ConfigError, match=f"input_mode='{mode}'"):
            ChatEnv(input_mode=mode)


def test_a_template_that_drops_earlier_turns_is_refused() -> None:
    forgetful = tiny_tokenizer()
    forgetful.chat_template = (
        "{% for m in messages %}{% if m.role != 'assistant' or loop.last %}<|im_start|>{{ m.role }}\n"
        "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    for mode in ("text", "tokens"):
        env = Counting(1, input_mode=mode, tokenizer=forgetful, max_steps=3)
        with pytest.raises(DataError, match="template"):
            env.step(answered(env, asked(env), ["1"]))
