import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from rlpost.collectors import LLMCollector
from rlpost.data.batch import batch_from_conversations
from rlpost.data.chat import ChatMask
from rlpost.data.conversation import Completion, Conversation
from rlpost.data.history import History
from rlpost.data.ragged import ragged, strings
from rlpost.envs import DatasetChatEnv
from rlpost.envs.checks import check_rewards
from rlpost.envs.transforms import KLRewardTransform, RetrieveLogProb
from rlpost.errors import ConfigError, DataError
from rlpost.model.load import load_model
from rlpost.objectives import SFTLoss
from rlpost.policies import TransformersWrapper
from rlpost.rewards.score import Score
from rlpost.settings import ModelSettings, SamplingSettings

PROMPTS = [[5, 6], [5, 6, 9]]
REPLIES = [[7, 8, 3], [4]]
SAMPLED_LOG_PROBS = [[-0.5, -0.25, -1.0], [-2.0]]
REWARDS = [1.0, 0.25]


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> nn.Module:
    loaded: Any = load_model(tiny_folder, ModelSettings())
    with torch.no_grad():  # further from uniform than a fresh one, so that a misplaced token shows
        loaded.get_output_embeddings().weight.mul_(30)
    return loaded.eval()


def row_by_row(model: nn.Module, ids: list[int], temperature: float = 1.0) -> list[float]:
    """Log-probs of each id given those before it, with the whole logits of this row alone; 0 for the first."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0]
    table = torch.log_softmax(logits / temperature, -1)
    return [0.0, *(table[place - 1, ids[place]].item() for place in range(1, len(ids)))]


def batch() -> TensorDict:
    conversations = [
        Conversation(
            task={},
            messages=[{"role": "user", "content": "q"}],
            prompt_ids=list(prompt),
            response_ids=list(reply),
            mask=[1] * len(reply),
            log_probs=list(log_probs),
            policy_versions=[0],
            reward=reward,
            terminated=True,
        )
        for prompt, reply, log_probs, reward in zip(PROMPTS, REPLIES, SAMPLED_LOG_PROBS, REWARDS, strict=True)
    ]
    return batch_from_conversations(conversations)


def padded(ragged_batch: TensorDict) -> TensorDict:
    """The same batch, prompts padded on the left and responses on the right."""
    longest = [max(map(len, PROMPTS)), max(map(len, REPLIES))]

    def pad(values: torch.Tensor, fill: float) -> torch.Tensor:
        rows = []
        for row, prompt, reply in zip(values.unbind(), PROMPTS, REPLIES, strict=True):
            before, behind = longest[0] - len(prompt), longest[1] - len(reply)
            rows.append(torch.nn.functional.pad(row, (before, behind), value=fill))
        return torch.stack(rows)

    return TensorDict(
        {
            "tokens": {"full": pad(ragged_batch["tokens", "full"], 99)},
            "masks": {
                name: pad(ragged_batch["masks", name], False) for name in ("all_attention_mask", "all_assistant_mask")
            },
            "log_probs": {"full": pad(ragged_batch["log_probs", "full"], -7.0)},
            "next": {"reward": ragged_batch["next", "reward"], "done": ragged_batch["next", "done"]},
        },
        batch_size=[2],
    )


def log_prob_policy(model: nn.Module) -> Callable[[TensorDictBase], TensorDictBase]:
    """A policy that writes the log-probs of the full ids, computed row by row."""

    def policy(seen: TensorDictBase) -> TensorDictBase:
        assert "log_probs" not in seen
        found = [torch.tensor(row_by_row(model, row.tolist())) for row in seen["tokens", "full"].unbind()]
        return seen.set(("log_probs", "full"), ragged(found))

    return policy


def expected(model: nn.Module, coef: float) -> tuple[list[list[float]], ...]:
    """(rewards, penalties, reference log-probs), worked out with plain loops."""
    rewards, penalties, references = [], [], []
    for prompt, reply, own, reward in zip(PROMPTS, REPLIES, SAMPLED_LOG_PROBS, REWARDS, strict=True):
        reference = row_by_row(model, prompt + reply)[len(prompt) :]
        before = [0.0] * len(prompt)
        kl = before + [coef * (o - r) for o, r in zip(own, reference, strict=True)]
        rewards.append([reward - k for k in kl])
        penalties.append(kl)
        references.append(before + reference)
    return rewards, penalties, references


def close(values: torch.Tensor, wanted: list[list[float]]) -> None:
    for row, want in zip(values.unbind(), wanted, strict=True):
        assert row.tolist() == pytest.approx(want, rel=1e-5, abs=2e-5)


@pytest.mark.parametrize("as_policy", [False, True])
def test_the_penalty_of_each_sampled_token_is_taken_off_the_reward(model: nn.Module, as_policy: bool) -> None:
    reference = log_prob_policy(model) if as_policy else model
    scored = KLRewardTransform(reference, coef=0.5)(batch())
    rewards, penalties, references = expected(model, 0.5)
    close(scored["next", "reward"], rewards)
    close(scored["next", "kl_penalty"], penalties)
    close(scored["next", "ref_log_probs", "full"], references)
    close(scored["log_probs", "full"], [[0.0] * len(p) + lp for p, lp in zip(PROMPTS, SAMPLED_LOG_PROBS, strict=True)])


def test_a_padded_batch_is_scored_as_a_ragged_one(model: nn.Module) -> None:
    scored = KLRewardTransform(model, coef=0.5)(padded(batch()))
    rewards, penalties, _ = expected(model, 0.5)
    assert scored["next", "reward"].shape == (2, 6, 1)
    assert scored["next", "kl_penalty"].shape == scored["next", "ref_log_probs", "full"].shape == (2, 6)
    attention = scored["masks", "all_attention_mask"]
    for row in range(2):
        kept = attention[row]
        assert scored["next", "reward"][row, kept, 0].tolist() == pytest.approx(rewards[row], abs=2e-5)
        assert scored["next", "kl_penalty"][row, kept].tolist() == pytest.approx(penalties[row], abs=2e-5)
        assert not scored["next", "reward"][row, ~kept].any()
    assert (~attention).sum() == 3


def test_every_tokens_log_probs_can_be_retrieved_and_compared(model: nn.Module) -> None:
    every = RetrieveLogProb(model, log_probs_full_key=("of_all", "full"), assistant_only=False, temperature=0.5)
    compared = KLRewardTransform(
        log_prob_policy(model), coef=2.0, log_prob_key=("of_all", "full"), assistant_only=False
    )(every(batch()))
    wanted = []
    for prompt, reply in zip(PROMPTS, REPLIES, strict=True):
        own, reference = row_by_row(model, prompt + reply, 0.5), row_by_row(model, prompt + reply)
        wanted.append([2.0 * (o - r) for o, r in zip(own, reference, strict=True)])
    close(compared["next", "kl_penalty"], wanted)
    with pytest.raises(DataError, match="0 at every"):  # the sampler's are there for the sampled tokens alone
        KLRewardTransform(model, assistant_only=False)(batch())


def test_the_reward_can_be_left_alone(model: nn.Module) -> None:
    scored = KLRewardTransform(ref_model_factory=lambda: model, add_to_reward=False)(batch())
    assert scored["next", "reward"].tolist() == [[1.0], [0.25]]
    close(scored["next", "kl_penalty"], expected(model, 1.0)[1])


def test_a_reward_per_token_keeps_its_shape(model: nn.Module) -> None:
    twice = batch()
    KLRewardTransform(model, coef=0.5)(twice)
    KLRewardTransform(model, coef=0.25)(twice)
    close(twice["next", "reward"], expected(model, 0.75)[0])


def test_a_failed_reward_stays_none(model: nn.Module) -> None:
    failed = batch()
    failed["next", "reward"][0] = float("nan")
    scored = KLRewardTransform(model)(failed)
    nans = [row.isnan() for row in scored["next", "reward"].unbind()]
    assert nans[0].all()
    assert not nans[1].any()


@pytest.mark.parametrize("key", [("next", "ref_log_probs", "full"), ("teacher", "full")])
def test_a_models_log_probs_are_written_under_the_chosen_key(model: nn.Module, key: tuple[str, ...]) -> None:
    written = RetrieveLogProb(model_factory=lambda: model, log_probs_full_key=key)(batch())
    close(written[key], expected(model, 1.0)[2])
    with_pads = RetrieveLogProb(model, log_probs_full_key=key)(padded(batch()))
    kept = with_pads["masks", "all_attention_mask"]
    assert with_pads[key][0, kept[0]].tolist() == pytest.approx(expected(model, 1.0)[2][0], abs=2e-5)
    assert not with_pads[key][~kept].any()


def test_conversations_are_rendered_for_a_loss_that_reads_messages(model: nn.Module, tiny_tokenizer: Any) -> None:
    chats = [
        [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}],
        [{"role": "user", "content": "Say yes."}, {"role": "assistant", "content": "yes, gladly"}],
    ]
    conversations = TensorDict({"history": {"full": History.from_chats(chats)}}, batch_size=[2])
    RetrieveLogProb(model, tokenizer=tiny_tokenizer)(conversations)
    encoded = [ChatMask(tiny_tokenizer).encode(chat) for chat in chats]
    wanted = [
        [value if trained else 0.0 for value, trained in zip(row_by_row(model, ids), mask, strict=True)]
        for ids, mask in encoded
    ]
    close(conversations["next", "ref_log_probs", "full"], wanted)
    output = SFTLoss(model, tiny_tokenizer, kl_to_ref_coeff=0.1, reduction="none")(conversations)
    assert output.kl_to_ref.item() == pytest.approx(0.0, abs=1e-6)  # of a model to itself


class Scored(DatasetChatEnv):
    def score(self, conversation: Conversation) -> Score:
        return Score(1.0, {})


def test_an_environment_penalises_what_it_played(model: nn.Module) -> None:
    env = Scored([{"question": "q"}], num_envs=2, repeats=2)
    assert env.append_transform(KLRewardTransform(model, coef=0.5)) is env
    shown = env.reset()
    assert "kl_penalty" not in shown
    tokens, log_probs = [[5, 6, 7], [5, 6, 8, 9]], [[0.0, 0.0, -0.5], [0.0, 0.0, -1.0, -2.0]]
    full = [torch.tensor(row) for row in tokens]
    acted = shown.update(
        {
            "text": {"response": strings(["a", "b"])},
            "tokens": {"response": ragged([row[2:] for row in full]), "full": ragged(full)},
            "masks": {"all_assistant_mask": ragged([torch.arange(row.numel()) >= 2 for row in full])},
            "log_probs": {"full": ragged([torch.tensor(row) for row in log_probs])},
        }
    )
    stepped = env.step(acted)
    wanted = []
    for ids, own in zip(tokens, log_probs, strict=True):
        reference = row_by_row(model, ids)
        kl = [o - r if i >= 2 else 0.0 for i, (o, r) in enumerate(zip(own, reference, strict=True))]
        wanted.append([1.0 - 0.5 * k for k in kl])
    close(stepped["next", "reward"], wanted)
    drawn = env.draw()
    for conversation in drawn:
        conversation.prompt_ids = [5, 6]
        conversation.add_completion(Completion([7], [-0.5], "a", "stop", 0))
    env.advance(drawn)
    close(env.build_batch(drawn)["next", "reward"], [wanted[0], wanted[0]])


def test_a_training_is_told_to_penalise_elsewhere(model: nn.Module) -> None:
    env = Scored([{"question": "q"}])
    check_rewards(env.append_transform(KLRewardTransform(model, add_to_reward=False)))
    with pytest.raises(ConfigError, match=r"loss\.kl_coef"):
        check_rewards(env.append_transform(KLRewardTransform(model)))


@pytest.mark.parametrize("in_env", [True, False])
def test_completions_are_compared_with_another_model(
    model: Any, tiny_folder: Path, tiny_tokenizer: Any, in_env: bool
) -> None:
    sampling = SamplingSettings(temperature=0.7)
    other: Any = load_model(tiny_folder, ModelSettings()).eval()
    scoring = TransformersWrapper(other, tiny_tokenizer, sampling=sampling, generate=False)
    penalty = KLRewardTransform(other, coef=0.5, temperature=0.7) if in_env else KLRewardTransform(scoring, coef=0.5)
    env = Scored([{"question": "q"}], num_envs=2, max_completion_tokens=5)
    compared = LLMCollector(
        env.append_transform(penalty) if in_env else env,
        policy=TransformersWrapper(model, tiny_tokenizer, sampling=sampling),
        yield_only_last_steps=True,
        postproc=None if in_env else penalty,
    ).rollout()
    prompt = compared["tokens", "prompt"][0].numel()
    for row in range(2):
        ids = compared["tokens", "full"][row].tolist()
        own, reference = row_by_row(model, ids, 0.7), row_by_row(other, ids, 0.7)
        kl = [o - r if i >= prompt else 0.0 for i, (o, r) in enumerate(zip(own, reference, strict=True))]
        assert compared["next", "kl_penalty"][row].tolist() == pytest.approx([0.5 * k for k in kl], abs=1e-4)
        assert compared["next", "reward"][row].tolist() == pytest.approx([1.0 - 0.5 * k for k in kl], abs=1e-4)
        assert max(map(abs, kl)) > 0.1


@pytest.mark.parametrize(
    ("transform", "missing"),
    [
        (RetrieveLogProb, ("masks", "all_assistant_mask")),
        (KLRewardTransform, ("log_probs", "full")),
        (KLRewardTransform, ("next", "reward")),
    ],
)
def test_what_lacks_something_is_refused(
    model: nn.Module, transform: Callable[..., Any], missing: tuple[str, str]
) -> None:
    with pytest.raises(DataError, match=re.escape(f"no {missing}")):
        transform(model)(batch().exclude(missing))


def test_a_reference_that_writes_no_log_probs_is_refused() -> None:
    with pytest.raises(DataError, match=r"no \('log_probs', 'full'\).* function"):
        KLRewardTransform(lambda seen: seen)(batch())
