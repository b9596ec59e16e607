"""Frames without groups: kept, drawn, split, summed."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from rlpost.data import FrameBuffer, LazyTensorStorage, MultiStep, split_trajectories


def frames(first: int, *shape: int) -> TensorDict:
    numbers = first + torch.arange(torch.Size(shape).numel()).reshape(shape)
    return TensorDict({"number": numbers, "next": {"number": numbers + 1}}, batch_size=shape)


def buffer(size: int = 5, **options: Any) -> FrameBuffer:
    return FrameBuffer(storage=LazyTensorStorage(size), **options)


def kept(of: FrameBuffer) -> set[int]:
    return set(of.sample(200)["number"].tolist())


def test_the_oldest_frames_make_room() -> None:
    store = buffer()
    store.extend(frames(0, 3))
    assert (len(store), store.write_count, kept(store)) == (3, 3, {0, 1, 2})
    store.extend(frames(3, 2, 2))  # of places and steps: four frames
    assert (len(store), store.write_count, kept(store)) == (5, 7, {2, 3, 4, 5, 6})
    store.extend(frames(7, 12))  # more than there is room for
    assert (len(store), store.write_count, kept(store)) == (5, 19, {14, 15, 16, 17, 18})
    store.extend(frames(0, 0))
    assert store.write_count == 19
    drawn = store.sample(3)
    assert torch.equal(drawn["next", "number"], drawn["number"] + 1)


def test_frames_lie_on_the_storages_device() -> None:
    store = FrameBuffer(storage=LazyTensorStorage(2, device="meta"))
    store.extend(frames(0, 3))
    assert store.sample(4)["next", "number"].device == torch.device("meta")


def test_drawing_is_even_and_repeats_with_its_seed() -> None:
    one, same, other = buffer(batch_size=4000), buffer(batch_size=4000), buffer(seed=1)
    for store in (one, same, other):
        store.extend(frames(0, 4))
    counts = one.sample()["number"].bincount() / 4000
    assert torch.allclose(counts, torch.tensor(0.25), atol=0.03)  # 4 standard deviations
    one.sample()
    saved = one.state_dict()
    same.load_state_dict(saved)
    assert torch.equal(one.sample()["number"], same.sample()["number"])
    assert not torch.equal(one.sample(50)["number"], other.sample(50)["number"])
    assert (same.write_count, len(same)) == (4, 4)


def test_a_buffer_that_was_full_goes_on_writing_where_it_was() -> None:
    store = buffer()
    store.extend(frames(0, 7))
    again = buffer()
    again.load_state_dict(store.state_dict())
    again.extend(frames(7, 1))
    assert kept(again) == {3, 4, 5, 6, 7}
    empty = buffer()
    empty.load_state_dict(buffer().state_dict())
    assert len(empty) == 0


def test_trajectories_are_told_apart_by_their_numbers() -> None:
    batch = frames(1, 2, 3).set(("collector", "traj_ids"), torch.tensor([[0, 0, 2], [1, 1, 1]]))
    split = split_trajectories(batch)
    assert split["number"].tolist() == [[1, 2, 0], [4, 5, 6], [3, 0, 0]]
    assert split["collector", "mask"].tolist() == [[True, True, False], [True] * 3, [True, False, False]]


def test_rewards_are_summed_up_to_the_end_of_a_trajectory_or_batch() -> None:
    reward = torch.tensor([[1.0, 2, 4, 8, 16], [1, 1, 1, 1, 1]]).unsqueeze(-1)
    done = torch.tensor([[0, 0, 1, 0, 0], [0, 0, 0, 0, 0]]).bool().unsqueeze(-1)
    batch = TensorDict({"next": {"reward": reward, "done": done, "place": torch.arange(10).reshape(2, 5)}}, [2, 5])
    summed = MultiStep(0.5, 3)(batch)
    by_hand = [[1 + 1 + 1, 2 + 2, 4, 8 + 8, 16], [1.75, 1.75, 1.75, 1.5, 1]]
    assert summed["next", "reward"].squeeze(-1).tolist() == by_hand
    assert summed["next", "place"].tolist() == [[2, 2, 2, 4, 4], [7, 8, 9, 9, 9]]
    assert summed["next", "done"].squeeze(-1).tolist() == [[True, True, True, False, False], [False] * 5]
    assert summed["steps_to_next_obs"].squeeze(-1).tolist() == [[3, 2, 1, 2, 1], [3, 3, 3, 2, 1]]
    assert summed["gamma"].squeeze(-1)[0].tolist() == [0.125, 0.25, 0.5, 0.25, 0.5]
    assert torch.equal(summed["next", "original_reward"], reward)
    assert torch.equal(batch["next", "reward"], reward)  # as it was
