from itertools import product
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from rlpost.collectors import Collector
from rlpost.data.ragged import strings
from rlpost.envs import LLMHashingEnv
from rlpost.envs.transforms import Transform


def act(shown: TensorDictBase, tokens: list[int]) -> TensorDictBase:
    return shown.set("action", torch.tensor(tokens))


def test_a_step_appends_a_token_and_chains_the_hash() -> None:
    env = LLMHashingEnv(10)
    shown = env.reset(TensorDict({"observation": torch.tensor([[1, 2], [3, 4]])}, batch_size=[2]))
    following = env.step(act(shown, [5, 6]))["next"]
    assert [row.tolist() for row in following["observation"].unbind()] == [[1, 2, 5], [3, 4, 6]]
    assert following["hashing"].dtype == torch.int64
    assert following["hashing"].tolist() == [[env.hash_of([1, 2, 5])], [env.hash_of([3, 4, 6])]]
    assert not following["done"].any()


def test_different_sequences_have_different_hashes() -> None:
    env = LLMHashingEnv(6)
    every = [list(ids) for length in range(6) for ids in product(range(6), repeat=length)]
    assert len({env.hash_of(ids) for ids in every}) == len(every) == 9331
    assert env.hash_of([]) == env.reset()["hashing"].item() == 0


def test_texts_come_with_a_tokenizer(tiny_tokenizer: Any) -> None:
    env = LLMHashingEnv(tokenizer=tiny_tokenizer, batch_size=2)
    assert env.vocab_size == len(tiny_tokenizer)
    shown = env.reset(TensorDict({"text": strings(["ab", "c"])}, batch_size=[2]))
    ids = [tiny_tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("ab", "c")]
    assert [row.tolist() for row in shown["observation"].unbind()] == ids
    [d] = tiny_tokenizer("d", add_special_tokens=False)["input_ids"]
    assert env.step(act(shown, [d, d]))["next", "text"] == ["abd", "cd"]
    assert env.reset()["text"] == ["", ""]


def test_it_is_an_environment_like_any_other_to_a_collector() -> None:
    class Count(Transform):
        closed = 0

        def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
            return tensordict.set("length", torch.tensor([len(row) for row in tensordict["observation"].unbind()]))

        def close(self) -> None:
            self.closed += 1

    env = LLMHashingEnv(5, batch_size=2).append_transform(count := Count())
    torch.manual_seed(0)
    with Collector(lambda: env, frames_per_batch=6, total_frames=12) as collector:
        assert collector.set_seed(3) == 4
        first, second = (batch for batch in collector if batch is not None)
    assert first.batch_size == (2, 3)
    assert [first[0, t]["next", "length"].item() for t in range(3)] == [1, 2, 3]
    assert second[1, 2]["next", "length"].item() == 6  # it goes on in the next batch
    ids = [first[1, t]["action"].item() for t in range(3)]
    assert first[1, 2]["next", "hashing"].item() == env.hash_of(ids)
    assert count.closed == 1
