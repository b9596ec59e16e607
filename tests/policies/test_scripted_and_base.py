"""What every policy does with conversations, shown on the scripted one."""

from __future__ import annotations

from typing import Any

from rlpost.data.conversation import Conversation
from rlpost.errors import DataError
from rlpost.policies import ScriptedPolicy
from rlpost.policies.base import request_seed
from rlpost.settings import SamplingSettings
from tests.says import Says


def asked(question: str, group: int = 0, sample: int = 0, **kwargs: Any) -> Conversation:
    kwargs = {"max_completion_tokens": 20, **kwargs}
    return Conversation({}, [{"role": "user", "content": question}], group, sample, **kwargs)


def test_a_reply_is_its_ids_with_the_end_of_turn(tiny_tokenizer: Any) -> None:
    policy = ScriptedPolicy(["ab", "abc"], tiny_tokenizer, sampling=SamplingSettings())
    conversations = [asked("1"), asked("2"), asked("3")]
    policy.reply(conversations)
    eos = tiny_tokenizer.eos_token_id
    first = conversations[0]
    assert first.response_ids == [*tiny_tokenizer("ab")["input_ids"], eos]
    assert first.mask == [1, 1, 1]
    assert [c.response_text for c in conversations] == ["ab", "abc", "ab"]
    assert first.messages[-1] == {"role": "assistant", "content": "ab"}
    assert tiny_tokenizer.decode(first.prompt_ids) == "<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\n"


def test_a_reply_that_is_too_long_is_cut_and_says_so(tiny_tokenizer: Any) -> None:
    policy = ScriptedPolicy(["abcdef"], tiny_tokenizer, sampling=SamplingSettings())
    conversation = asked("1", max_completion_tokens=3)
    policy.reply([conversation])
    assert (conversation.response_text, conversation.finish_reason) == ("abc", "length")


def test_a_prompt_longer_than_allowed_is_named(tiny_tokenizer: Any, says: Says) -> None:
    policy = ScriptedPolicy(["x"], tiny_tokenizer, sampling=SamplingSettings())
    with says.refused("policies", DataError, "env.max_prompt_tokens=10"):
        policy.reply([asked("a long question", group=7, max_prompt_tokens=10)])
    policy.max_model_len = 50
    with says.refused("policies", DataError, "env.max_completion_tokens="):
        policy.reply([asked("a long question", group=7)])


def test_request_seeds_differ_in_each_of_their_parts_and_repeat() -> None:
    seeds = {request_seed(*key) for key in [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]}
    assert len(seeds) == 5
    assert request_seed(3, 1, 4) == request_seed(3, 1, 4)
    assert all(0 <= seed < 2**63 for seed in seeds)
