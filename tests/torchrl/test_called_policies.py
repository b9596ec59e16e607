"""LLMCollector with callables and TensorDictModules in the place of a policy, and what it refuses by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule

from rlpost.envs import DatasetChatEnv
from rlpost.torchrl.chat_envs import CalledPolicy
from tests.collectors.talk import Talk, make, next_of, scripted, talk, tokenizer, told


def echo(tensordict: TensorDictBase) -> TensorDictBase:
    """Answers with how many messages it was shown."""
    shown = [str(len(chat)) for chat in tensordict["history"].to_chats()]
    return tensordict.set("text_response", NonTensorStack(*shown))


def test_a_function_of_tensordicts_plays_conversations() -> None:
    collector = make(talk(), policy=echo, dialog_turns_per_batch=4)
    batch = next_of(collector)
    assert [told(batch[:, turn]) for turn in range(2)] == [[("q0", 1), ("q1", 1)], [("q2", 1), ("q1", 2)]]
    assert batch["text", "response"] == [["1", "1"], ["1", "3"]]  # of q1's second turn it was shown three messages
    assert batch["next", "reward"].squeeze(-1).nan_to_num(-1).tolist() == [[1.0, -1], [-1, -1]]  # q0 alone is over


@pytest.mark.parametrize("returned", ["what it was shown", "a new TensorDict"])
def test_a_policy_reads_what_a_callable_said(returned: str) -> None:
    def says_a(shown: TensorDictBase) -> TensorDictBase:
        new = TensorDict(batch_size=shown.batch_size) if returned == "a new TensorDict" else shown
        return new.set(("text", "response"), NonTensorStack("a"))

    env = Talk([{"question": "q", "turns": 2}], num_envs=1, max_steps=3, tokenizer=tokenizer(), input_mode="text")
    [conversation] = env.draw()
    CalledPolicy(says_a, env).reply([conversation])
    env.advance([conversation])
    scripted("b").reply([conversation])
    opening, end = "<|im_start|>assistant\n", "<|im_end|>\n<|im_start|>user\n"
    assert tokenizer().decode(conversation.prompt_ids) == f"<|im_start|>user\nq<|im_end|>\n{opening}"
    more = f"a{end}more 1<|im_end|>\n{opening}"
    assert tokenizer().decode(conversation.response_ids) == f"{more}b<|im_end|>"
    assert conversation.mask[-3:] == [0, 1, 1]


class Fixed(torch.nn.Module):
    """Samples the same ids for each prompt, as many as its weight says."""

    def __init__(self) -> None:
        super().__init__()
        self.count = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, prompts: Any) -> torch.Tensor:
        return torch.full((len(prompts), int(self.count)), 7)


def test_a_module_samples_ids_under_a_version_that_pushes_raise() -> None:
    module = TensorDictModule(Fixed(), in_keys=["query"], out_keys=["tokens_response"])
    env = DatasetChatEnv(
        [{"question": "q"}], shuffle=False, num_envs=2, tokenizer=tokenizer(), input_mode="tokens", max_steps=1
    )
    collector = make(env, policy=module, dialog_turns_per_batch=2, flatten_data=True, track_policy_version=True)
    first = next_of(collector)
    assert [row.tolist() for row in first["tokens", "response"].unbind()] == [[7, 7], [7, 7]]
    assert first["policy_version"].tolist() == [0, 0]
    pushed = {name: torch.tensor(3.0) for name in module.state_dict()}
    collector.update_policy_weights_(pushed)
    following = next_of(collector)
    assert [row.tolist() for row in following["tokens", "response"].unbind()] == [[7, 7, 7], [7, 7, 7]]
    assert following["policy_version"].tolist() == [1, 1]
    assert torch.isnan(following["log_probs", "response"].values()).all()  # which nobody told
