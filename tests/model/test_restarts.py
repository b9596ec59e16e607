"""A row whose context begins anew: its gradient is that of its pieces, each read alone by transformers' own forward."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from tensordict import TensorDictBase
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlpost.data import ReplayBuffer
from rlpost.data.batch import batch_from_conversations
from rlpost.data.conversation import Completion, Conversation
from rlpost.data.demonstrations import Pair, Sample
from rlpost.data.encoding import PairEncoder
from rlpost.data.formats import RowReader, Wanted
from rlpost.errors import DataError
from rlpost.evaluation.pairs import groups_of_run, write_pairs
from rlpost.model.logprobs import READERS
from rlpost.model.packing import Row, as_reference_reads, filler, largest_group, pack, packed_tokens, shares_of
from rlpost.model.packing import rows_of as packed_rows
from rlpost.objectives import GRPOLoss
from rlpost.objectives.distillation import DistillationObjective
from rlpost.objectives.functional import policy_loss, sft_loss
from rlpost.objectives.policy_loss import PolicyObjective
from rlpost.objectives.preference import PreferenceObjective, pair_loss
from rlpost.objectives.supervised import SFTObjective
from rlpost.runs.rollout_table import write_rollouts
from rlpost.runs.rollouts import read_chosen, read_rollouts
from rlpost.settings import (
    Aggregation,
    Autocast,
    DatasetSettings,
    DPOLossSettings,
    GRPOLossSettings,
    GSPOLossSettings,
    KLEstimator,
    SFTLossSettings,
)
from rlpost.settings.loss import JSDLossSettings, SFTAggregation
from rlpost.torchrl.batches import concat_rows, select_rows
from rlpost.train.dpo import rows_of as rows_of_pair
from rlpost.train.replay import batch_of
from rlpost.train.rows import row_of
from rlpost.train.several_ranks import as_arrays, as_tensors
from rlpost.train.update import Microbatches, read_log_probs

CPU, WORDS, TEMPERATURE, BETA = torch.device("cpu"), 53, 0.9, 0.3
WHOLE = 10_000  # tokens: more than all rows have
# tokens of a microbatch, whether rows share their prompts, and ranks whose gradients are summed
SPLITS = (
    (WHOLE, True, 1),
    (1, True, 1),
    (25, True, 1),
    (WHOLE, False, 1),
    (45, False, 1),
    (WHOLE, True, 2),
    (25, True, 2),
)
# a new prompt or the number of its tokens, and + for each sampled id behind it, - for each other
Pieces = Sequence[tuple[int | torch.Tensor, str]]


def small_model(*, tied: bool) -> PreTrainedModel:
    """Hidden 24, 4 heads of 10, 53 words, in float64; its norms too, which transformers computes in float32."""
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 1, "head_dim": 10}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("qwen3", vocab_size=WORDS, tie_word_embeddings=tied, **sizes, **heads)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = lambda x, m=module: x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * m.weight
    return model


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return small_model(tied=request.param)


def ids(count: int) -> torch.Tensor:
    return torch.randint(0, WORDS, (count,))


def row(prompt: torch.Tensor, *pieces: tuple[int | torch.Tensor, str]) -> Row:
    """A row of pieces; the first one's prompt is `prompt`, and its number of tokens is 0."""
    response, sampled, restarts = [], [], []
    for number, (before, said) in enumerate(pieces):
        new = before if isinstance(before, torch.Tensor) else ids(before)
        if number:
            restarts.append(len(sampled))
        response += [new, ids(len(said))]
        sampled += [False] * len(new) + [sign == "+" for sign in said]
    tokens = torch.cat(response)
    return Row(prompt, tokens, torch.tensor(sampled), torch.zeros(len(tokens)), restarts=tuple(restarts))


def rows() -> list[Row]:
    """A group of three and one of two, whose second prompts are equal, and a row of one piece."""
    torch.manual_seed(4)
    first, second, later = ids(5), ids(3), ids(7)
    made = [
        row(first, (0, "++++"), (6, "+++")),
        row(first, (0, "+++--++")),  # the later prompt went on from its ids: no restart
        row(first, (0, "++"), (5, "++-++"), (9, "+")),
        row(second, (0, "+"), (later, "++++")),
        row(second, (0, "---"), (later, "+++"), (4, "")),  # its first turn is not trained, its third was never sampled
        row(ids(4), (0, "+-+")),
    ]
    for place, each in enumerate(made):
        each.advantage = (1.5, -0.7, 0.4, -1.1, 0.9, 0.6)[place]
    made[2].advantage = torch.linspace(-1, 2, made[2].response.numel())
    return made


def pair_rows() -> list[Row]:
    """Three pairs as DPO reads them: of one piece, of several, and with a prompt that itself begins anew."""
    torch.manual_seed(5)

    def pair(prompt: list[int], begins: list[int], *replies: Pieces) -> list[Row]:
        samples = []
        for pieces in replies:
            made = row(torch.tensor(prompt), *pieces)
            restarts = begins + [len(prompt) + each for each in made.restarts]
            mask = [False] * len(prompt) + made.sampled.tolist()
            samples.append(Sample("", [*prompt, *made.response.tolist()], mask, restarts=restarts))
        return rows_of_pair(Pair("", *samples))

    return [
        *pair([7, 8, 9, 10], [], [(0, "++")], [(0, "+-+")]),
        *pair([7, 8, 9, 10], [], [(0, "+++"), (5, "++")], [(0, "+"), (6, "+-+"), (8, "++")]),
        *pair([11, 12, 13, 14, 15, 16], [2], [(0, "++"), (3, "+")], [(0, "+++")]),
    ]


def distributions(model: PreTrainedModel, row: Row, temperature: float = 1.0) -> list[torch.Tensor]:
    """log π of every word in the places of the sampled ids, piece by piece: each is a forward of its own."""
    found = []
    for start, end in pairwise((0, *row.restarts, len(row.response))):
        before = row.prompt if start == 0 else row.prompt[:0]
        tokens = torch.cat([before, row.response[start:end]])
        places = len(before) + row.sampled[start:end].nonzero().squeeze(-1)
        found.append((model(input_ids=tokens[None]).logits[0, places - 1] / temperature).log_softmax(-1))
    return found


def plain(model: PreTrainedModel, row: Row, temperature: float = 1.0) -> torch.Tensor:
    """log π of the sampled ids of `row`."""
    return torch.cat(distributions(model, row, temperature)).gather(-1, row.response[row.sampled][:, None]).squeeze(-1)


def with_others(rows: list[Row], model: PreTrainedModel) -> list[Row]:
    """`rows` with log-probs of an old policy and of a reference near the model's own."""
    torch.manual_seed(6)
    for each in rows:
        own = plain(model, each).detach()
        for name, scale in (("old_log_probs", 0.3), ("ref_log_probs", 0.5)):
            values = torch.zeros(len(each.response), dtype=torch.float64)
            values[each.sampled] = own + scale * torch.randn(len(own), dtype=torch.float64)
            setattr(each, name, values)
    return rows


def of_sampled(rows: list[Row], name: str) -> torch.Tensor:
    """An attribute of all rows at their sampled tokens, (B, T)."""
    return pad_sequence([getattr(row, name)[row.sampled] for row in rows], batch_first=True)


def slow_loss(name: str, own: torch.Tensor, rows: list[Row]) -> torch.Tensor:
    """The loss of the whole minibatch as a function of the log-probs of its rows, (B, T)."""
    mask, given = of_sampled(rows, "sampled"), of_sampled(rows, "advantages")
    old, ref = of_sampled(rows, "old_log_probs"), of_sampled(rows, "ref_log_probs")
    kind, _, aggregation = name.partition(", ")
    if kind == "sft":
        return sft_loss(own, mask, aggregation=aggregation)[0]
    if kind == "dpo":
        return pair_loss("dpo", own, ref, mask, beta=BETA)[0]
    if kind == "gspo":  # one ratio a row: the geometric mean over the sampled tokens of all its pieces
        return policy_loss(kind, own, old, given, mask, clip_low=0.1, clip_high=0.1)[0]
    kl: dict[str, Any] = {"ref_log_probs": ref, "kl_coef": 0.1, "kl_estimator": "k3"}
    return policy_loss(kind, own, old, given, mask, aggregation=aggregation, **kl)[0]


def policy(settings: Any) -> PolicyObjective:
    return PolicyObjective(settings, temperature=TEMPERATURE, max_completion_tokens=9)


def grpo(aggregation: Aggregation) -> PolicyObjective:
    return policy(GRPOLossSettings(aggregation=aggregation, kl_coef=0.1, kl_estimator=KLEstimator.k3))


OBJECTIVES: dict[str, Any] = {
    "grpo, token_mean": grpo(Aggregation.token_mean),
    "grpo, sequence_mean": grpo(Aggregation.sequence_mean),
    "gspo": policy(GSPOLossSettings(clip_low=0.1, clip_high=0.1)),
    "sft, token_mean": SFTObjective(SFTLossSettings(aggregation=SFTAggregation.token_mean)),
    "sft, sequence_mean": SFTObjective(SFTLossSettings(aggregation=SFTAggregation.sequence_mean)),
    "dpo": PreferenceObjective(DPOLossSettings(beta=BETA)),
}


def rows_for(name: str, model: PreTrainedModel) -> list[Row]:
    made = with_others(pair_rows() if name == "dpo" else rows(), model)
    if name == "gspo":
        made[2].advantage = 0.4
    return made


def flat(model: PreTrainedModel) -> torch.Tensor:
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad(set_to_none=True)
    return found


def slow_gradient(model: PreTrainedModel, name: str, rows: list[Row]) -> torch.Tensor:
    temperature = TEMPERATURE if isinstance(OBJECTIVES[name], PolicyObjective) else 1.0
    own = pad_sequence([plain(model, row, temperature) for row in rows], batch_first=True)
    slow_loss(name, own, rows).backward()
    return flat(model)


def gradient(
    model: PreTrainedModel, name: str, rows: list[Row], tokens: int, *, share_prompts: bool = True, ranks: int = 1
) -> torch.Tensor:
    """The sum over ranks and microbatches."""
    objective = OBJECTIVES[name]
    normaliser, together = objective.normaliser(rows), getattr(objective, "rows_together", 1)
    for share in shares_of(rows, ranks, share_prompts=share_prompts):
        for part in pack([rows[p] for p in share], tokens, CPU, share_prompts=share_prompts, together=together):
            objective(model, part, normaliser).loss.backward()
    return flat(model)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradient_is_that_of_each_piece_read_alone(name: str, model: PreTrainedModel) -> None:
    made = rows_for(name, model)
    slow = slow_gradient(model, name, made)
    assert slow.norm() > 0.1
    for tokens, share_prompts, ranks in SPLITS:
        own = gradient(model, name, made, tokens, share_prompts=share_prompts, ranks=ranks)
        assert (own - slow).norm() < 1e-10 * slow.norm(), (tokens, share_prompts, ranks)


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_reads_the_pieces_apart(reader: str, model: PreTrainedModel) -> None:
    made = rows()
    right = torch.cat([plain(model, each, TEMPERATURE) for each in made])
    [whole] = pack(made, WHOLE, CPU, share_prompts=reader.startswith("packed"))
    read, _ = READERS[reader](model, whole, TEMPERATURE)
    assert (read - right).abs().max() < 1e-10
    weights = torch.linspace(-1, 2, len(right), dtype=torch.float64)
    (weights * right).sum().backward()
    slow = flat(model)
    (weights * read).sum().backward()
    assert (flat(model) - slow).norm() < 1e-10 * slow.norm()


def test_the_log_probs_of_a_row_stand_at_its_sampled_ids(model: PreTrainedModel) -> None:
    made = rows()
    for tokens in (WHOLE, 25):
        for read, each in zip(read_log_probs(model, Microbatches(tokens, CPU, Autocast.none), made), made, strict=True):
            assert (read[each.sampled] - plain(model, each)).abs().max() < 1e-10
            assert not read[~each.sampled].any()


def test_the_reference_reads_a_first_prompt_of_its_own(model: PreTrainedModel) -> None:
    made = rows()
    for each in made[:3]:
        each.ref_prompt = torch.cat([ids(4), each.prompt])
    own = as_reference_reads(made)
    for hinted, before in zip(own[:3], made, strict=False):
        assert [len(piece.prompt) for piece in hinted.pieces] == [9, *(len(p.prompt) for p in before.pieces[1:])]
    read = read_log_probs(model, Microbatches(25, CPU, Autocast.none), own)
    assert all((values[e.sampled] - plain(model, e)).abs().max() < 1e-10 for values, e in zip(read, own, strict=True))


def test_a_teacher_is_compared_piece_by_piece(model: PreTrainedModel) -> None:
    """KL(q || π) over the whole vocabulary; the teacher reads another first prompt."""
    made, teacher = rows(), small_model(tied=True)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter *= 1.1
    for each in made[:3]:
        each.ref_prompt = torch.cat([ids(4), made[0].prompt])
    divergences = []
    for each, seen in zip(made, as_reference_reads(made), strict=True):
        log_q, log_p = (torch.cat(distributions(*pair)) for pair in ((teacher, seen), (model, each)))
        log_q = log_q.detach()
        divergences.append((log_q.exp() * (log_q - log_p)).sum(-1))
    torch.cat(divergences).mean().backward()
    slow = flat(model)
    objective = DistillationObjective(JSDLossSettings(beta=0.0), temperature=1.0)
    for part in pack(made, 40, CPU):
        part.reference = lambda: nullcontext(teacher)
        objective(model, part, objective.normaliser(made)).loss.backward()
    assert (flat(model) - slow).norm() < 1e-10 * slow.norm()


# Pieces, budgets and shares


def test_the_pieces_of_a_row() -> None:
    prompt, response = torch.tensor([50, 51]), torch.arange(12)
    sampled = torch.tensor([1, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0]) > 0
    made = Row(prompt, response, sampled, torch.zeros(12), restarts=(3, 7, 9))
    assert [(p.prompt.tolist(), p.response.tolist(), p.sampled.tolist()) for p in made.pieces] == [
        ([50, 51], [0, 1, 2], [True, False, True]),
        ([3, 4], [5, 6], [True, True]),
    ]
    made.restarts = ()
    assert made.pieces == [made]
    nothing = Row(prompt, response, sampled & False, torch.zeros(12), restarts=(3,))
    assert nothing.pieces == [nothing]  # as a filler is read


def test_every_piece_is_in_a_microbatch_and_its_positions_begin_at_0() -> None:
    [whole] = pack(rows(), WHOLE, CPU)
    # 5 + 4 + 7 + 2 | 3 + 1 (of the fifth row's first piece nothing is trained, and its second one comes to be its
    # first) | 7 + 3 | 4 + 3 | second pieces: 6 + 3 | 5 + 5 | 7 + 4 | third: 9 + 1
    expected = 18 + 4 + 10 + 7 + 9 + 10 + 11 + 10
    assert whole.num_packed == packed_tokens(rows()) == expected
    assert whole.position_ids.eq(0).sum() == 8
    assert [each.num_trained for each in whole.rows] == [7, 5, 7, 5, 3, 2]
    assert torch.equal(whole.target, torch.cat([each.response[each.sampled] for each in rows()]))
    apart = [5 + 4 + 6 + 3, 5 + 7, 5 + 2 + 5 + 5 + 9 + 1, 3 + 1 + 7 + 4, 7 + 3, 4 + 3]
    assert [packed_tokens([each]) for each in rows()] == apart
    assert packed_tokens(rows(), share_prompts=False) == sum(apart)


def test_later_pieces_of_neighbours_share_an_equal_prompt() -> None:
    torch.manual_seed(0)
    first, later = ids(3), ids(7)
    two = [row(first, (0, "+"), (later, "++")), row(first, (0, "++"), (later, "+"))]
    [both] = pack(two, WHOLE, CPU)
    assert both.num_packed == packed_tokens(two) == (3 + 1 + 2) + (7 + 2 + 1)
    assert packed_tokens(two[1:], behind=two[0]) == 2 + 1
    [apart] = pack(two, WHOLE, CPU, share_prompts=False)
    assert apart.num_packed == 26


def test_a_row_is_never_split_and_microbatches_keep_to_their_budget() -> None:
    for share_prompts in (True, False):
        for tokens in (1, 20, 33, 45):
            parts = list(pack(rows(), tokens, CPU, share_prompts=share_prompts))
            assert sum(len(part.rows) for part in parts) == 6
            for part in parts:
                assert part.num_packed == packed_tokens(part.rows, share_prompts=share_prompts)
                assert part.num_packed <= tokens or len(part.rows) == 1
    assert len(list(pack(rows(), 1, CPU))) == 6


def test_groups_and_shares_count_all_pieces() -> None:
    assert largest_group(rows()) == 18 + 9 + 10 + 10  # the first three rows
    # 47 tokens of the first group, 3 + 1 + 7 + 4 + 7 + 3 = 25 of the second, 7 of the last row
    assert shares_of(rows(), 2) == [[0, 1, 2], [3, 4, 5]]
    [one] = pack([filler(CPU).rows[0]], 1, CPU)
    assert one.num_packed == 2


def test_restarts_cross_a_pipe() -> None:
    made = rows()[2]
    assert as_tensors(as_arrays([made]))[0].restarts == made.restarts == (2, 12)


def test_a_sample_becomes_a_row_whose_restarts_count_behind_its_prompt() -> None:
    # pieces [0 1 2 3], [4 5], [6 7 8 9]; trained are 3, 8 and 9
    sample = Sample("", list(range(10)), [place in (3, 8, 9) for place in range(10)], restarts=[4, 6])
    made = row_of(sample)
    assert (made.prompt.tolist(), made.response.tolist(), made.restarts) == ([0, 1, 2], [3, 4, 5, 6, 7, 8, 9], (1, 3))
    assert [(p.prompt.tolist(), p.response.tolist()) for p in made.pieces] == [([0, 1, 2], [3]), ([6, 7], [8, 9])]
    assert (sample.num_read, sample.longest) == (10, 4)
    assert sample.content != Sample("", sample.ids, sample.mask).content
    # nothing is trained before the last piece: its prompt is the row's
    sample = Sample("", list(range(10)), [place > 7 for place in range(10)], restarts=[4, 6])
    made = row_of(sample)
    assert (made.prompt.tolist(), made.response.tolist(), made.restarts) == ([6, 7], [8, 9], ())


def test_the_prompt_of_a_pair_ends_where_one_of_the_two_begins_anew() -> None:
    mask = [False, False, False, False, True]
    alike = Pair("", Sample("", [1, 2, 3, 4, 5], mask, restarts=[2]), Sample("", [1, 2, 3, 4, 6], mask, restarts=[2]))
    assert alike.prompt_length == 4
    assert [each.prompt.tolist() for each in rows_of_pair(alike)] == [[3, 4], [3, 4]]
    apart = Pair("", Sample("", [1, 2, 3, 4, 5], mask, restarts=[2]), Sample("", [1, 2, 3, 4, 6], mask))
    assert apart.prompt_length == 2
    chosen, rejected = rows_of_pair(apart)
    assert torch.equal(chosen.prompt, rejected.prompt)  # so that both go to one rank
    assert [(p.prompt.tolist(), p.response.tolist()) for p in chosen.pieces] == [([3, 4], [5])]
    assert [(p.prompt.tolist(), p.response.tolist()) for p in rejected.pieces] == [([1, 2], [3, 4, 6])]


# From a conversation to a row


def two_turns() -> Conversation:
    """Prompt [1, 2], sampled [3, 4]; a new prompt [5, 6, 7], sampled [8]; [9] went on from it, and sampled is [10]."""
    conversation = Conversation(task={}, messages=[{"role": "user", "content": "start"}], prompt_ids=[1, 2])
    conversation.add_completion(Completion([3, 4], [-0.5, -0.25], "a", "stop", 0))
    conversation.begin_anew([5, 6, 7])
    conversation.add_completion(Completion([8], [-1.0], "b", "stop", 0))
    conversation.add_observation([9])
    conversation.add_completion(Completion([10], [-2.0], "c", "stop", 1))
    conversation.reward, conversation.terminated = 1.0, True
    return conversation


def test_the_context_is_what_the_model_reads_before_its_next_turn() -> None:
    conversation = Conversation(task={}, messages=[], prompt_ids=[1, 2])
    conversation.add_completion(Completion([3, 4], [-0.5, -0.25], "a", "stop", 0))
    copied = conversation.copy()
    conversation.begin_anew([5, 6])
    assert conversation.context == [5, 6]
    assert (copied.context, copied.restarts) == ([1, 2, 3, 4], [])
    assert two_turns().context == [5, 6, 7, 8, 9, 10]


def test_a_conversation_stays_one_row_with_its_masks() -> None:
    batch = batch_from_conversations([two_turns()])
    assert batch["tokens", "full"][0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert batch["tokens", "restarts"][0].tolist() == [2]
    assert batch["masks", "all_assistant_mask"][0].int().tolist() == [0, 0, 1, 1, 0, 0, 0, 1, 0, 1]
    assert batch["token_versions"][0].tolist() == [0, 0, -1, -1, -1, 0, -1, 1]
    [made] = packed_rows(batch)
    assert (made.restarts, made.num_trained, made.last_turn) == ((2,), 4, 1)
    assert [(p.prompt.tolist(), p.response.tolist()) for p in made.pieces] == [
        ([1, 2], [3, 4]),
        ([5, 6, 7], [8, 9, 10]),
    ]


def restarts(batch: TensorDictBase) -> list[list[int]]:
    return [row.tolist() for row in batch["tokens", "restarts"].unbind()]


def test_restarts_stay_with_their_rows(conversation: Callable[..., Conversation]) -> None:
    batch = batch_from_conversations([conversation(0, 0), two_turns(), conversation(0, 1)])
    assert restarts(batch) == [[], [2], []]
    plain = batch_from_conversations([conversation(1, 0)])
    assert restarts(concat_rows([batch, plain])) == [[], [2], [], []]
    assert restarts(concat_rows([plain, plain])) == [[], []]
    assert restarts(select_rows(batch, [1, 0])) == [[2], []]
    assert restarts(pickle.loads(pickle.dumps(batch))) == [[], [2], []]
    saved = Conversation(**json.loads(json.dumps(asdict(two_turns()))))
    assert saved.context == two_turns().context
    buffer = ReplayBuffer()
    buffer.extend(batch)
    resumed = ReplayBuffer()
    resumed.load_state_dict(pickle.loads(pickle.dumps(buffer.state_dict())))
    assert restarts(buffer.take(1)) == restarts(resumed.take(1)) == [[], [2], []]


def test_a_batch_of_someone_else_lacks_them(conversation: Callable[..., Conversation]) -> None:
    batch = batch_from_conversations([conversation()])
    del batch["tokens", "restarts"]
    assert [made.restarts for made in packed_rows(batch)] == [()]


def test_a_loss_that_reads_a_row_as_one_sequence_refuses_restarts() -> None:
    with pytest.raises(DataError, match="rendered anew"):
        GRPOLoss(small_model(tied=True))(batch_from_conversations([two_turns()]))


def test_rollouts_hold_restarts_and_a_replay_reads_them(
    conversation: Callable[..., Conversation], tmp_path: Path
) -> None:
    batch = batch_from_conversations([two_turns(), conversation(0, 1)])
    write_rollouts(tmp_path / "rollouts" / "step-000001.parquet", 1, batch)
    table = read_rollouts(tmp_path, 1)
    assert [each["restarts"] for each in table] == [[2], []]
    assert [made.restarts for made in packed_rows(batch_of(table))] == [(2,), ()]
    file = tmp_path / "rollouts" / "step-000002.parquet"
    pq.write_table(pq.read_table(tmp_path / "rollouts" / "step-000001.parquet").drop_columns("restarts"), file)
    chosen, _ = read_chosen(tmp_path, 1, lambda light: range(len(light))[::-1])
    assert [each["restarts"] for each in chosen] == [[], [2]]
    older = read_rollouts(tmp_path, 2)
    assert [each["restarts"] for each in older] == [[], []]
    assert [made.restarts for made in packed_rows(batch_of(older))] == [(), ()]


def test_pairs_of_rollouts_hold_restarts(
    conversation: Callable[..., Conversation], tiny_tokenizer: Any, tmp_path: Path
) -> None:
    """Prompt "Q", then the answer "ab" that follows "a?" and a prompt "Q?" of its own; the wrong one is "c"."""
    encode = tiny_tokenizer.encode
    right = Conversation(task={}, messages=[{"role": "user", "content": "Q"}], prompt_ids=encode("Q"), prompt_text="Q")
    right.add_completion(Completion(encode("a?"), [-1.0, -1.0], "a?", "stop", 0))
    right.begin_anew(encode("Q?"))
    right.add_completion(Completion(encode("ab"), [-1.0, -1.0], "ab", "stop", 0))
    wrong = right.copy()
    wrong.response_ids, wrong.mask, wrong.log_probs, wrong.restarts = encode("c"), [1], [-1.0], []
    wrong.messages[1:], wrong.policy_versions, wrong.response_text = [{"role": "assistant", "content": "c"}], [0], "c"
    for sample, (each, reward) in enumerate(((right, 1.0), (wrong, 0.0))):
        each.sample, each.reward, each.accuracy_lenient = sample, reward, reward
    write_rollouts(tmp_path / "rollouts" / "step-000001.parquet", 1, batch_from_conversations([right, wrong]))
    found = write_pairs(tmp_path / "pairs.jsonl", groups_of_run(tmp_path, [1]), margin=None, most=1)
    assert found.pairs == 1
    row = json.loads((tmp_path / "pairs.jsonl").read_text())
    assert (row["chosen_restarts"], "rejected_restarts" in row) == ([2], False)
    shown = RowReader(DatasetSettings(path="x", reward=[]), Wanted.pair).read("", row)
    pair = PairEncoder(tiny_tokenizer, 5).encode(shown)  # no piece has more than 5 tokens
    assert (pair.fault, pair.chosen.restarts, pair.rejected.restarts) == (None, [3], [])
    assert pair.chosen.ids == encode("Qa?Q?ab")
    chosen, _ = rows_of_pair(pair)
    assert [tiny_tokenizer.decode(torch.cat([p.prompt, p.response])) for p in chosen.pieces] == ["Qa?", "Q?ab"]
