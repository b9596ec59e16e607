# pyright: reportArgumentType=false
# TensorDict.set takes a list of str, which its annotation leaves out

import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import pytest
import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase

from rlpost.data.conversation import Conversation
from rlpost.data.ragged import ragged, strings
from rlpost.envs import ChatEnv, DatasetChatEnv
from rlpost.envs.chat import record_scores
from rlpost.envs.transforms import DataLoadingPrimer, Transform
from rlpost.errors import ConfigError, DataError
from rlpost.model.conversion import tiny_tokenizer
from rlpost.rewards.score import Score
from tests.envs.own_rows import answer, answered
from tests.says import Says

Make = Callable[..., Conversation]
ROWS = [{"question": f"q{i}", "answer": str(i)} for i in range(5)]


class Countdown(ChatEnv):
    """Asks for one more word until it has three; the reward is how often the policy said yes."""

    def next_message(self, conversation: Conversation) -> str | None:
        return None if conversation.turns == 3 else "more"

    def score(self, conversation: Conversation) -> Score:
        said_yes = [m["content"] for m in conversation.messages if m["role"] == "assistant"].count("yes")
        return Score(float(said_yes), {"yes": float(said_yes)}, accuracy_lenient=1.0)


def questions(conversations: Sequence[Conversation]) -> list[str]:
    return [conversation.query for conversation in conversations]


def test_a_group_is_drawn_whole_and_numbered() -> None:
    env = DatasetChatEnv(ROWS, shuffle=False, num_envs=2, repeats=3, group_repeats=True, system_prompt="Be brief.")
    assert env.batch_size == torch.Size([6])
    drawn = env.draw()
    assert questions(drawn) == ["q0", "q0", "q0", "q1", "q1", "q1"]
    assert [(c.group_id, c.sample) for c in drawn] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert drawn[0].messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "q0"}]
    assert [c.group_id for c in env.draw()] == [2, 2, 2, 3, 3, 3]


def test_without_group_repeats_they_go_on_in_the_next_draw() -> None:
    env = DatasetChatEnv(ROWS, shuffle=False, num_envs=2, repeats=3)
    assert env.numel() == 2
    assert questions(env.draw() + env.draw()) == ["q0", "q0", "q0", "q1"]


def test_conversations_carry_limits_and_no_system_message() -> None:
    env = DatasetChatEnv(ROWS, shuffle=False, max_prompt_tokens=9, max_completion_tokens=4)
    drawn = env.draw()[0]
    assert (drawn.max_prompt_tokens, drawn.max_completion_tokens) == (9, 4)
    assert [m["role"] for m in drawn.messages] == ["user"]


def test_every_epoch_is_a_permutation_of_its_own() -> None:
    drawn = questions(DatasetChatEnv(ROWS, seed=5).draw(10))
    first, second = drawn[:5], drawn[5:]
    assert sorted(first) == sorted(second) == ["q0", "q1", "q2", "q3", "q4"]
    assert first != second
    assert drawn == questions(DatasetChatEnv(ROWS, seed=5).draw(10))
    assert drawn != questions(DatasetChatEnv(ROWS, seed=4).draw(10))


@pytest.mark.parametrize("drawn_before", [0, 1, 4, 7, 29])
def test_drawing_resumes_exactly_even_inside_a_group(drawn_before: int) -> None:
    env = DatasetChatEnv(ROWS, repeats=3, seed=1)
    env.draw(drawn_before)
    saved = json.loads(json.dumps(env.state_dict()))
    resumed = DatasetChatEnv(ROWS, repeats=3, seed=1)
    resumed.load_state_dict(saved)
    assert env.draw(20) == resumed.draw(20)


@pytest.mark.parametrize("shuffle", [True, False])
def test_only_rows_that_were_not_drawn_may_go(shuffle: bool) -> None:
    env = DatasetChatEnv(ROWS, shuffle=shuffle, repeats=2)
    drawn = questions(env.draw(5))  # the third row once
    saved = json.loads(json.dumps(env.state_dict()))
    rest = questions(env.draw(1)) + questions(env.draw(4))
    for gone in range(5):
        fewer = DatasetChatEnv(ROWS[:gone] + ROWS[gone + 1 :], shuffle=shuffle, repeats=2)
        if ROWS[gone]["question"] in drawn:
            with pytest.raises(DataError, match="3 different"):
                fewer.load_state_dict(saved)
        else:
            fewer.load_state_dict(saved)
            assert questions(fewer.draw(3)) == [q for q in rest if q != ROWS[gone]["question"]]


def test_once_an_epoch_is_over_no_row_may_go() -> None:
    env = DatasetChatEnv(ROWS)
    env.draw(6)
    with pytest.raises(DataError, match=r"5 different .*4 different"):
        DatasetChatEnv(ROWS[:4]).load_state_dict(env.state_dict())


def test_rows_read_ahead_come_in_the_same_order() -> None:
    assert questions(DatasetChatEnv(ROWS, batch_size_dl=3).draw(12)) == questions(DatasetChatEnv(ROWS).draw(12))


def test_a_limit_keeps_the_first_rows() -> None:
    env = DatasetChatEnv(ROWS, limit=2)
    assert env.num_tasks == 2
    assert set(questions(env.draw(8))) == {"q0", "q1"}


def test_a_template_is_filled_with_the_fields_of_the_task() -> None:
    env = DatasetChatEnv(ROWS, shuffle=False, prompt_template="{question}/{answer} {{}}")
    assert questions(env.draw()) == ["q0/0 {}"]


@pytest.mark.parametrize("template", ["{question} {hint}", "{question} {}", "{question} {"])
def test_a_template_that_does_not_fit_names_the_fields(template: str, says: Says) -> None:
    with says.refused("env", ConfigError, "env.prompt_template"):
        DatasetChatEnv(ROWS, prompt_template=template).start()


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(DataError, match="empty"):
        DatasetChatEnv([]).draw()


def test_a_single_turn_ends_terminated_or_truncated_when_cut() -> None:
    env = DatasetChatEnv(ROWS)
    [ended], [cut] = answered(env, "yes"), answered(env, "ye", finish_reason="length")
    assert (ended.terminated, ended.truncated, cut.terminated, cut.truncated) == (True, False, False, True)
    assert ended.reward is None


def test_several_turns_go_on_with_the_environments_messages() -> None:
    env = Countdown(max_steps=5).append_transform(DataLoadingPrimer([{"query": "word?"}]))
    conversation = env.draw()[0]
    for turn, word in enumerate(["yes", "no", "yes"]):
        assert (conversation.done, conversation.turns) == (False, turn)
        answer(env, [conversation], word)
    assert [m["content"] for m in conversation.messages] == ["word?", "yes", "more", "no", "more", "yes"]
    assert (conversation.terminated, conversation.reward, conversation.reward_parts) == (True, 2.0, {"yes": 2.0})


def test_a_reward_that_fails_is_invalid_and_never_a_zero() -> None:
    class Broken(DatasetChatEnv):
        def score(self, conversation: Conversation) -> Score:
            raise ZeroDivisionError("oops")

    env = Broken(ROWS)
    stepped = env.step(env.reset().set("text_response", ["yes"]))["next"]
    assert (stepped["reward"].isnan().all(), stepped["done"].all()) == (True, True)
    [conversation] = stepped["conversation"]
    assert (conversation.valid, conversation.reward) == (False, None)


def test_a_transform_may_speak_for_the_environment() -> None:
    class Echo(Transform):
        def on_reply(self, conversations: Sequence[Conversation]) -> None:
            for conversation in conversations:
                if conversation.response_text == "tool":
                    conversation.messages.append({"role": "user", "content": "result"})

    env = DatasetChatEnv(ROWS, shuffle=False, max_steps=3).append_transform(Echo())
    [conversation] = answered(env, "tool")
    assert not conversation.done
    answer(env, [conversation], "bye")
    assert conversation.terminated
    assert [m["content"] for m in conversation.messages] == ["q0", "tool", "result", "bye"]


def test_a_plain_text_becomes_the_query_of_the_task() -> None:
    env = ChatEnv(2)
    texts = NonTensorStack("one", "two")
    start = env.reset(TensorDict({"text": texts, "level": torch.tensor([3, 4])}, batch_size=[2]))
    assert start["query"] == ["one", "two"]
    tasks = [c.task for c in start["conversation"]]
    assert [(t["query"], int(t["level"])) for t in tasks] == [("one", 3), ("two", 4)]
    assert start["group_id"].tolist() == [0, 1]
    assert env.reset(TensorDict({"query": texts}, batch_size=[2]))["group_id"].tolist() == [2, 3]


def test_a_reset_without_prompts_says_what_it_lacks(says: Says) -> None:
    env = ChatEnv(2)
    with says.refused("env", DataError, "'query'"):
        env.reset(TensorDict({"other": torch.zeros(2)}, batch_size=[2]))
    with says.refused("env", DataError, "DataLoadingPrimer"):
        env.reset()


def test_what_a_policy_writes_is_carried_into_the_conversation() -> None:
    tokenizer = tiny_tokenizer()
    env = DatasetChatEnv(ROWS, shuffle=False, tokenizer=tokenizer)
    start = env.reset()
    assert start["text", "prompt"] == ["<|im_start|>user\nq0<|im_end|>\n<|im_start|>assistant\n"]
    ids = torch.tensor(tokenizer("ok", add_special_tokens=False)["input_ids"])
    start["tokens", "response"] = ragged([ids])
    start["log_probs"] = TensorDict({"response": ragged([torch.tensor([-0.25, -0.5])])}, batch_size=[1])
    start["policy_version"] = torch.tensor([4])
    start["finish_reason"] = strings(["length"])
    stepped = env.step(start)
    conversation = stepped["next", "conversation"][0]
    assert (conversation.response_text, conversation.response_ids) == ("ok", ids.tolist())
    assert (conversation.log_probs, conversation.mask) == ([-0.25, -0.5], [1, 1])
    assert (conversation.policy_versions, conversation.finish_reason) == ([4], "length")
    assert tokenizer.decode(conversation.prompt_ids) == conversation.prompt_text == start["text", "prompt"][0]
    assert stepped["next", "truncated"].tolist() == [[True]]


def test_a_row_that_is_done_begins_afresh() -> None:
    env = DatasetChatEnv(ROWS, shuffle=False, num_envs=2)
    stepped, following = env.step_and_maybe_reset(env.reset().set("text_response", ["a", "b"]))
    assert stepped["next", "done"].tolist() == [[True], [True]]
    assert following["query"] == ["q2", "q3"]
    with pytest.raises(DataError, match="is over"):
        env.step(stepped["next"].set("text_response", ["a", "b"]))


def test_a_rollout_stops_with_the_first_end_or_goes_on() -> None:
    def policy(tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set("text_response", ["yes"])

    env = Countdown(1, max_steps=5).append_transform(DataLoadingPrimer([{"query": "word?"}]))
    assert env.rollout(10, policy)["next", "reward"].squeeze().tolist() == [0.0, 0.0, 3.0]
    longer = env.rollout(4, policy, break_when_any_done=False)
    assert longer.batch_size == torch.Size([1, 4])
    assert longer["next", "reward"].squeeze().tolist() == [0.0, 0.0, 3.0, 0.0]


# Scores: what raises, leaves or hangs is an error of its conversation


def scored(make: Make, texts: list[str], seconds: float = 0.2) -> list[Conversation]:
    conversations = [make(0, i, text=text, reward=None) for i, text in enumerate(texts)]
    record_scores(conversations, score, seconds)
    return conversations


RAISED: dict[str, BaseException] = {"raises": KeyError("x"), "leaves": SystemExit(3), "data": DataError("no answers")}


def score(conversation: Conversation) -> Score | None:
    text = conversation.response_text
    if text in RAISED:
        raise RAISED[text]
    if text == "hangs":
        with suppress(Exception):  # as a client that tries again does
            time.sleep(30)
    return Score({"nan": math.nan, "huge": 1e40}.get(text, float(len(text))))


@pytest.mark.parametrize("text", ["raises", "leaves", "nan", "huge", "hangs"])
def test_what_fails_is_no_reward_of_0(conversation: Make, text: str, says: Says) -> None:
    good, bad, other = scored(conversation, ["a", text, "abc"])
    assert (good.reward, good.valid, other.reward, other.valid) == (1.0, True, 3.0, True)
    assert (bad.reward, bad.valid) == (None, False)
    says("train", bad.error)


def test_a_score_that_always_hangs_is_given_up_soon(conversation: Make, says: Says) -> None:
    began = time.monotonic()
    played = scored(conversation, ["hangs"] * 150)
    assert time.monotonic() - began < 25.0  # three deadlines, not a hundred and fifty: 30 s
    assert not any(c.valid for c in played)
    [late], [not_tried] = ({c.error for c in part} for part in (played[:3], played[3:]))
    says("train", f"{late}\n{not_tried}")


def test_errors_of_data_pass_through(conversation: Make) -> None:
    with pytest.raises(DataError, match="no answers"):
        scored(conversation, ["a", "data"])


def test_failures_are_counted_and_named_in_the_log(conversation: Make, caplog: pytest.LogCaptureFixture) -> None:
    scored(conversation, ["a", "raises", "nan"])
    scored(conversation, ["a", "b"])
    [told] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert told.startswith("2 of 3 ")
    assert told.endswith("KeyError: 'x'")
