"""Policies called on a TensorDict: what is read in each mode, and what is written, ragged and padded."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, lazy_stack
from transformers import PreTrainedModel

from rlpost.data import History
from rlpost.data.conversation import Completion
from rlpost.data.ragged import ragged, ragged_rows, strings
from rlpost.envs import ChatEnv
from rlpost.errors import ConfigError, DataError, PolicyError
from rlpost.model.load import load_model
from rlpost.model.tokenizer import load_tokenizer
from rlpost.policies import Policy, Request, ScriptedPolicy, TransformersWrapper
from rlpost.settings import ModelSettings, SamplingSettings

QUESTIONS = ["hi", "a longer question"]
CHATS = [[{"role": "user", "content": question}] for question in QUESTIONS]


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> PreTrainedModel:
    return load_model(tiny_folder, ModelSettings(path=str(tiny_folder)))


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Any:
    return load_tokenizer(tiny_folder)


def rendered(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def asked(mode: str, tokenizer: Any) -> TensorDict:
    """The same two prompts in each mode."""
    texts = [rendered(question) for question in QUESTIONS]
    prompt: Any = {
        "history": lambda: History.from_chats(CHATS),
        "text": lambda: strings(texts),
        "tokens": lambda: ragged([torch.tensor(tokenizer(text)["input_ids"]) for text in texts]),
    }[mode]()
    return TensorDict({mode: {"prompt": prompt}}, batch_size=[2])


def listed(tensor: torch.Tensor) -> list[list[Any]]:
    return [row.tolist() for row in ragged_rows(tensor)]


def whole(mode: str, entry: Any, size: int = 2) -> TensorDict:
    """Whole sequences, to be scored."""
    return TensorDict({mode: {"full": entry}}, batch_size=[size])


def with_end(tokenizer: Any, text: str) -> list[int]:
    """The ids of a turn of the assistant."""
    return [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]


class Asking(ChatEnv):
    """Asks for more after each reply."""

    def next_message(self, conversation: Any) -> str:
        return "more"


def sampler(model: PreTrainedModel, *, max_new_tokens: int = 6, **options: Any) -> TransformersWrapper:
    kwargs = {"max_new_tokens": max_new_tokens, **options.pop("generate_kwargs", {})}
    return TransformersWrapper(model, generate_kwargs=kwargs, seed=3, **options)


# A turn of the model


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_every_mode_asks_the_model_the_same_and_full_is_prompt_and_response(
    model: PreTrainedModel, tokenizer: Any, mode: str
) -> None:
    answered = sampler(model, input_mode=mode)(asked(mode, tokenizer))
    by_history = sampler(model)(asked("history", tokenizer))
    prompts, responses, full = (listed(answered["tokens", part]) for part in ("prompt", "response", "full"))
    assert prompts == [tokenizer(rendered(question))["input_ids"] for question in QUESTIONS]
    assert responses == listed(by_history["tokens", "response"])
    assert full == [p + r for p, r in zip(prompts, responses, strict=True)]
    texts = zip(answered["text", "prompt"], answered["text", "response"], strict=True)
    assert list(answered["text", "full"]) == [prompt + response for prompt, response in texts]
    assert list(answered["text", "prompt"]) == [rendered(question) for question in QUESTIONS]
    said = [tokenizer.decode(ids, skip_special_tokens=True) for ids in responses]
    assert list(answered["text", "response"]) == said
    assert [[True] * len(row) for row in full] == listed(answered["masks", "all_attention_mask"])
    sampled = [[False] * len(p) + [True] * len(r) for p, r in zip(prompts, responses, strict=True)]
    assert listed(answered["masks", "all_assistant_mask"]) == sampled
    log_probs = {part: listed(answered["log_probs", part]) for part in ("prompt", "response", "full")}
    assert log_probs["prompt"] == [[0.0] * len(row) for row in prompts]
    assert log_probs["full"] == [p + r for p, r in zip(log_probs["prompt"], log_probs["response"], strict=True)]
    assert all(value < 0 for row in log_probs["response"] for value in row)
    assert answered["policy_version"].tolist() == [0, 0]


def test_padded_prompts_end_and_responses_begin_where_they_meet(tokenizer: Any) -> None:
    policy = ScriptedPolicy(["yes", "no, never"], tokenizer, pad_output=True)
    answered = policy(asked("history", tokenizer))
    pad = tokenizer.pad_token_id
    prompts = [tokenizer(rendered(question))["input_ids"] for question in QUESTIONS]
    replies = [with_end(tokenizer, text) for text in ("yes", "no, never")]
    width, longest = len(prompts[1]), len(replies[1])
    before, behind = width - len(prompts[0]), longest - len(replies[0])
    assert (before, behind) == (15, 6)
    assert answered["tokens", "prompt"].tolist() == [[pad] * before + prompts[0], prompts[1]]
    assert answered["tokens", "response"].tolist() == [replies[0] + [pad] * behind, replies[1]]
    both = torch.cat([answered["tokens", "prompt"], answered["tokens", "response"]], 1)
    assert torch.equal(answered["tokens", "full"], both)
    first = [False] * before + [True] * (width + longest - before - behind) + [False] * behind
    assert answered["masks", "all_attention_mask"].tolist() == [first, [True] * (width + longest)]
    assert answered["masks", "all_assistant_mask"].sum(1).tolist() == [4, 10]
    assert answered["log_probs", "full"].shape == (2, width + longest)


def test_padding_changes_no_number(model: PreTrainedModel, tokenizer: Any) -> None:
    loose = sampler(model)(asked("history", tokenizer))
    padded = sampler(model, pad_output=True)(asked("history", tokenizer))
    there = padded["masks", "all_attention_mask"]
    for group in ("tokens", "log_probs"):
        rows = [row[mask].tolist() for row, mask in zip(padded[group, "full"], there, strict=True)]
        assert rows == listed(loose[group, "full"])
    assert padded["log_probs", "full"][~there].tolist() == [0.0] * int((~there).sum())


# Conversations under way


def test_a_conversation_goes_on_from_the_ids_that_were_sampled(tokenizer: Any) -> None:
    class Odd(ScriptedPolicy):
        """Says two bytes that are no character, so that no text gives its ids back."""

        def generate(self, requests: Sequence[Request], sampling: SamplingSettings) -> list[Completion]:
            ids = [*tokenizer("é")["input_ids"][:1] * 2, tokenizer.eos_token_id]
            assert tokenizer(tokenizer.decode(ids))["input_ids"] != ids
            return [Completion(ids, [-0.5, -1.0, -2.0 - i], "��", "stop", 0) for i, _ in enumerate(requests)]

    env = Asking(2, tokenizer=tokenizer)
    policy = Odd([""], tokenizer)
    before = policy(env.reset(TensorDict({"query": strings(QUESTIONS)}, batch_size=[2])))
    following = env.step(before)["next"]
    after = policy(following)
    opening = tokenizer("\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    assert listed(after["tokens", "prompt"]) == [row + opening for row in listed(before["tokens", "full"])]
    assert listed(after["masks", "all_assistant_mask"]) == [
        [False] * len(prompt) + [True] * 3 + [False] * len(opening) + [True] * 3
        for prompt in listed(before["tokens", "prompt"])
    ]
    log_probs = [row + [0.0] * len(opening) for row in listed(before["log_probs", "full"])]
    assert listed(after["log_probs", "prompt"]) == log_probs
    # and an environment that is stepped once more holds exactly these ids
    rows = env.step(after)["next", "conversation"]
    assert [c.prompt_ids + c.response_ids for c in rows] == listed(after["tokens", "full"])


@pytest.mark.parametrize("env_mode", ["history", "text", "tokens"])
@pytest.mark.parametrize("policy_mode", ["history", "text", "tokens"])
@pytest.mark.parametrize("pad_output", [False, True])
def test_several_turns_are_the_same_ids_in_every_mode(
    tokenizer: Any, env_mode: str, policy_mode: str, pad_output: bool
) -> None:
    env = Asking(2, tokenizer=tokenizer, input_mode=env_mode, max_steps=3)
    policy = ScriptedPolicy(["x", "yes"], tokenizer, input_mode=policy_mode, pad_output=pad_output)
    current = env.reset(TensorDict({"query": strings(QUESTIONS)}, batch_size=[2]))
    for _ in range(3):
        current = env.step(policy(current))["next"]
    asked_again = "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    for conversation, question, reply in zip(current["conversation"], QUESTIONS, ("x", "yes"), strict=True):
        assert tokenizer.decode(conversation.prompt_ids) == rendered(question)
        said = f"{reply}<|im_end|>"
        assert tokenizer.decode(conversation.response_ids) == asked_again.join([said] * 3)
        sampled = [token for token, mask in zip(conversation.response_ids, conversation.mask, strict=True) if mask]
        assert tokenizer.decode(sampled) == said * 3


def test_another_template_may_be_named(tokenizer: Any) -> None:
    answered = ScriptedPolicy(["a"], tokenizer, chat_template_name="gemma")(asked("history", tokenizer))
    assert answered["text", "prompt"][0] == "<bos><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n"
    assert "gemma" not in (tokenizer.chat_template or "")
    with pytest.raises(ConfigError, match=r"'gema': .* gemma"):
        ScriptedPolicy(["a"], tokenizer, chat_template_name="gema")


def test_ids_that_are_there_are_used_and_must_say_the_messages(tokenizer: Any) -> None:
    prompts = asked("history", tokenizer)
    # "hi" in another tokenisation than the tokenizer's own: the ids are the truth
    prompts["tokens"] = asked("tokens", tokenizer)["tokens"]
    policy = ScriptedPolicy(["yes"], tokenizer)
    assert listed(policy(prompts)["tokens", "prompt"]) == listed(prompts["tokens", "prompt"])
    prompts["history", "prompt"] = History.from_chats([[{"role": "user", "content": "else"}], CHATS[1]])
    with pytest.raises(DataError, match=r"row 0: \('tokens', 'prompt'\)"):
        policy(prompts)
    by_name = ScriptedPolicy(["yes"], tokenizer, input_key=("history", "prompt"))(prompts)
    assert by_name["text", "prompt"][0] == rendered("else")


# Shapes


def test_several_samples_are_another_dimension(model: PreTrainedModel, tokenizer: Any) -> None:
    answered = sampler(model, num_samples=3)(asked("history", tokenizer).set("query", strings(QUESTIONS)))
    assert (answered.batch_size, type(answered)) == (torch.Size([2, 3]), LazyStackedTensorDict)
    for row, question in enumerate(QUESTIONS):
        samples = [answered[row, i] for i in range(3)]
        assert {sample["text", "prompt"] for sample in samples} == {rendered(question)}
        assert {sample["query"] for sample in samples} == {question}
        assert len({tuple(sample["tokens", "response"].tolist()) for sample in samples}) == 3


@pytest.mark.parametrize("pad_output", [False, True])
@pytest.mark.parametrize("shape", [(), (1,), (2,), (2, 2)])
def test_a_batch_keeps_its_shape(tokenizer: Any, shape: tuple[int, ...], pad_output: bool) -> None:
    prompts: TensorDictBase = asked("text", tokenizer)
    if len(shape) < 2:
        prompts = prompts[0] if not shape else prompts[: shape[0]].clone()
    else:
        prompts = lazy_stack([prompts, prompts.clone()], 0)
    answered = ScriptedPolicy(["a", "b"], tokenizer, input_mode="text", pad_output=pad_output)(prompts)
    assert answered.batch_size == torch.Size(shape)
    last, reply = (answered[1, 1], "b") if len(shape) == 2 else (answered[0] if shape else answered, "a")
    assert last["text", "response"] == reply
    assert last["tokens", "response"].tolist() == with_end(tokenizer, reply)


@pytest.mark.parametrize("inplace", [None, True, False, "empty"])
def test_answers_are_written_into_the_prompts_or_beside(tokenizer: Any, inplace: Any) -> None:
    prompts = asked("text", tokenizer).set("more", torch.tensor([1, 2]))
    answered = ScriptedPolicy(["a"], tokenizer, input_mode="text", inplace=inplace)(prompts)
    assert (answered is prompts) == (inplace in (None, True))
    assert (("text", "response") in prompts.keys(True)) == (inplace in (None, True))
    assert ("more" in answered) == (inplace != "empty")
    assert list(answered["text", "response"]) == ["a", "a"]


def test_groups_may_be_renamed_and_left_out(tokenizer: Any) -> None:
    policy = ScriptedPolicy(
        ["a"], tokenizer, input_mode="text", masks_key=None, log_probs_key="lp", text_key=None, input_key="question"
    )
    answered = policy(TensorDict({"question": strings(["x", "yy"])}, batch_size=[2]))
    assert set(answered.keys()) == {"question", "tokens", "lp", "policy_version", "finish_reason"}
    silent = ScriptedPolicy(["a"], tokenizer, return_log_probs=False)(asked("history", tokenizer))
    assert "log_probs" not in silent
    with pytest.raises(DataError, match=r"\('text', 'prompt'\)"):
        ScriptedPolicy(["a"], tokenizer, input_mode="text")(TensorDict({"x": torch.zeros(2)}, batch_size=[2]))


# Log-probs of whole sequences


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_log_probs_of_a_turn_are_those_of_its_whole_sequence(
    model: PreTrainedModel, tokenizer: Any, temperature: float
) -> None:
    drawn = sampler(model, max_new_tokens=8, generate_kwargs={"temperature": temperature})
    answered = drawn(asked("history", tokenizer))
    reading = TransformersWrapper(model, generate=False, generate_kwargs={"temperature": temperature})
    with torch.no_grad():
        read = reading(TensorDict({"tokens": answered["tokens"]}, batch_size=[2]))
    told, again = (ragged_rows(each["log_probs", "full"]) for each in (answered, read))
    for row, mask in enumerate(ragged_rows(answered["masks", "all_assistant_mask"])):
        torch.testing.assert_close(again[row][mask], told[row][mask], atol=1e-5, rtol=0)
        assert again[row][0] == 0  # nothing predicts the first


def test_packed_sequences_have_the_log_probs_of_padded_ones(model: PreTrainedModel) -> None:
    torch.manual_seed(0)
    rows = [torch.randint(3, 90, (length,)) for length in (2, 9, 30, 1)]
    packed = TransformersWrapper(model, input_mode="tokens", generate=False, pad_output=True)
    answered = packed(whole("tokens", ragged(rows), 4))
    ids, mask = answered["tokens", "full"], answered["masks", "all_attention_mask"]
    assert mask.sum(1).tolist() == [2, 9, 30, 1]
    with torch.no_grad():  # transformers' own forward on the padded batch
        logits = model(input_ids=ids, attention_mask=mask.long()).logits.float().log_softmax(-1)
    expected = torch.zeros(ids.shape)
    expected[:, 1:] = logits[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    torch.testing.assert_close(answered["log_probs", "full"], expected * mask, atol=1e-5, rtol=0)
    assert answered["log_probs", "full"].requires_grad  # a loss may be made of them


def test_a_turn_scored_keeps_its_sampled_ids_and_is_never_tokenised_again(
    model: PreTrainedModel, tokenizer: Any
) -> None:
    answered = sampler(model, max_new_tokens=12)(asked("history", tokenizer))
    before = listed(answered["tokens", "full"])
    assert any(tokenizer(tokenizer.decode(ids))["input_ids"] != ids for ids in before), "these ids would survive"
    scored = TransformersWrapper(model, generate=False)(answered)
    assert listed(scored["tokens", "full"]) == before


def test_text_and_ids_and_messages_say_the_same(model: PreTrainedModel, tokenizer: Any) -> None:
    chats = [[*chat, {"role": "assistant", "content": "yes"}] for chat in CHATS]
    texts = [f"{rendered(question)}yes<|im_end|>\n" for question in QUESTIONS]
    full: dict[str, Any] = {
        "history": History.from_chats(chats),
        "text": strings(texts),
        "tokens": ragged([torch.tensor(tokenizer(text)["input_ids"]) for text in texts]),
    }
    read = {m: TransformersWrapper(model, input_mode=m, generate=False)(whole(m, entry)) for m, entry in full.items()}
    for answered in read.values():
        assert listed(answered["tokens", "full"]) == listed(read["history"]["tokens", "full"])
        assert list(answered["text", "full"]) == texts
        assert list(answered["log_probs"].keys()) == ["full"]
    masks = read["history"]["masks", "all_assistant_mask"]
    rows = zip(ragged_rows(read["history"]["tokens", "full"]), ragged_rows(masks), strict=True)
    assert [tokenizer.decode(ids[mask]) for ids, mask in rows] == ["yes<|im_end|>"] * 2


def test_padded_ids_are_read_with_their_mask_and_refused_without(tokenizer: Any) -> None:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.pad_token = "<|im_start|>"  # not its end of turn, which ids may end with
    padded = ScriptedPolicy(["a"], tokenizer, pad_output=True)(asked("history", tokenizer))
    policy = ScriptedPolicy(["a"], tokenizer, input_mode="tokens")
    tokens = TensorDict({"tokens": {"prompt": padded["tokens", "prompt"]}}, batch_size=[2])
    with pytest.raises(DataError, match=r"row 0 of \('tokens', 'prompt'\)"):
        policy(tokens.clone())
    tokens["masks"] = padded["masks"]
    assert list(policy(tokens)["text", "prompt"]) == [rendered(question) for question in QUESTIONS]


# What cannot be


@pytest.mark.parametrize(
    ("named", "options"),
    [
        ("input_mode=texts", {"input_mode": "texts"}),
        ("temperature", {"generate_kwargs": {"temperature": -0.1}}),
        ("top_p", {"generate_kwargs": {"top_p": 1.5}}),
        ("top_k", {"generate_kwargs": {"top_k": -1}}),
        ("temprature.* temperature", {"generate_kwargs": {"temprature": 1}}),
    ],
)
def test_options_that_cannot_be_are_refused_in_one_line(tokenizer: Any, named: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=named) as raised:
        ScriptedPolicy(["a"], tokenizer, **options)
    assert "\n" not in str(raised.value)
    assert isinstance(raised.value, ValueError)


def test_words_for_sampling_are_what_the_policy_samples_with(tokenizer: Any) -> None:
    given = SamplingSettings(temperature=0.5, top_p=0.9)
    changed = ScriptedPolicy(["a"], tokenizer, sampling=given, generate_kwargs={"temperature": 2.0})
    assert changed.sampling == SamplingSettings(temperature=2.0, top_p=0.9)
    assert ScriptedPolicy(["a"], tokenizer, generate_kwargs={"do_sample": False}).sampling.temperature == 0
    words = {"top_k": 3, "min_p": 0.1, "stop_strings": "END"}
    filtered = ScriptedPolicy(["a"], tokenizer, generate_kwargs=words)
    assert filtered.sampling == SamplingSettings(top_k=3, min_p=0.1, stop=["END"])
    several = ScriptedPolicy(["a", "b"], tokenizer, generate_kwargs={"n": 2})(asked("history", tokenizer))
    assert several.batch_size == torch.Size([2, 2])


def test_a_prompt_that_leaves_no_room_is_refused(model: PreTrainedModel, tokenizer: Any) -> None:
    longest = model.config.max_position_embeddings
    long = TensorDict({("text", "prompt"): strings(["a" * (longest - 3)])}, batch_size=[1])
    assert len(sampler(model, input_mode="text", max_new_tokens=3)(long.clone())["tokens", "full"][0]) <= longest
    with pytest.raises(DataError, match=f"4 .* {longest} "):
        sampler(model, input_mode="text", max_new_tokens=4)(long.clone())
    # without a number, a completion has the room there is
    policy = TransformersWrapper(model, input_mode="text", seed=1)
    assert policy(long)["tokens", "response"][0].numel() <= 3


def test_only_some_policies_give_log_probs_of_sequences(model: PreTrainedModel, tokenizer: Any) -> None:
    class Sampling(ScriptedPolicy):
        token_log_probs: Any = Policy.token_log_probs

    nucleus = TransformersWrapper(model, input_mode="text", generate=False, generate_kwargs={"top_p": 0.9})
    with pytest.raises(ConfigError, match=r"top_p=0\.9"):
        nucleus(whole("text", strings(["abc"]), 1))
    with pytest.raises(PolicyError, match="Sampling"):
        Sampling(["a"], tokenizer, input_mode="text", generate=False)(whole("text", strings(["abc"]), 1))
