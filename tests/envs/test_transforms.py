import uuid

import pytest
import torch
from tensordict import TensorDict

from rlpost.envs.transforms import DataLoadingPrimer, PolicyVersion
from rlpost.errors import DataError

ELEMENTS = [{"text": "a", "level": 1}, {"text": "b", "level": 2}, {"text": "c", "level": 3}]


def texts(primer: DataLoadingPrimer, count: int) -> str:
    return "".join(ticket.task["text"] for ticket in primer.take(count) for _ in ticket.samples)


def test_elements_repeat_in_a_row_and_without_end() -> None:
    assert texts(DataLoadingPrimer(ELEMENTS), 7) == "abcabca"
    primer = DataLoadingPrimer(ELEMENTS, repeats=2)
    assert texts(primer, 8) == "aabbccaa"
    assert [(ticket.group, ticket.samples) for ticket in primer.take(2)] == [(4, [0, 1])]


@pytest.mark.parametrize("position", [0, 1, 2, 5, 6, 11])
def test_a_primer_goes_on_from_a_saved_position(position: int) -> None:
    primer = DataLoadingPrimer(ELEMENTS, repeats=2)
    primer.take(position)
    resumed = DataLoadingPrimer(dataloader_factory=lambda: ELEMENTS, repeats=2)
    resumed.load_state_dict(primer.state_dict())
    assert resumed.take(9) == primer.take(9)


@pytest.mark.parametrize("repeats", [1, 2])
def test_rows_of_a_dataloader_of_batches_are_its_elements(repeats: int) -> None:
    loader = torch.utils.data.DataLoader(ELEMENTS, batch_size=2)  # type: ignore[arg-type]
    primer = DataLoadingPrimer(loader, repeats=repeats)
    taken = [ticket.task for ticket in primer.take(4 * repeats)]
    assert [e["text"] for e in taken] == ["a", "b", "c", "a"]
    assert [int(e["level"]) for e in taken] == [1, 2, 3, 1]
    unbatched = torch.utils.data.DataLoader(ELEMENTS, batch_size=None)  # type: ignore[arg-type]
    assert texts(DataLoadingPrimer(unbatched), 4) == "abca"
    stacked = TensorDict({"level": torch.tensor([1, 2])}, batch_size=[2])
    assert [ticket.task["level"].item() for ticket in DataLoadingPrimer([stacked]).take(3)] == [1, 2, 1]


def test_what_is_primed_is_moved_to_the_device() -> None:
    primed = DataLoadingPrimer([{"x": torch.ones(1)}], device="meta")(TensorDict({}, [2]))
    assert primed["x"].device.type == "meta"


def test_a_factory_is_called_only_when_it_is_needed() -> None:
    calls = []
    primer = DataLoadingPrimer(dataloader_factory=lambda: calls.append(1) or ELEMENTS)
    assert not calls
    assert texts(primer, 4) == "abca"
    assert calls == [1]


def test_an_empty_or_spent_loader_is_an_error() -> None:
    with pytest.raises(DataError, match="no element"):
        DataLoadingPrimer([]).take(1)
    once = DataLoadingPrimer(iter(ELEMENTS))
    assert texts(once, 3) == "abc"
    with pytest.raises(DataError, match="again"):
        once.take(1)


def test_integer_versions_count_from_zero() -> None:
    tracker = PolicyVersion()
    assert [tracker.version, tracker.increment_version(), tracker.increment_version()] == [0, 1, 2]
    stamped = tracker(TensorDict({}, batch_size=[3]))["policy_version"]
    assert (stamped.tolist(), stamped.dtype) == ([2, 2, 2], torch.int64)
    resumed = PolicyVersion("int")
    resumed.load_state_dict({"version": 3})
    assert resumed.increment_version() == 4


@pytest.mark.parametrize("version_type", [str, "uuid"])
def test_uuid_versions_are_fresh_each_time(version_type: type | str) -> None:
    tracker = PolicyVersion(version_type)
    first, second = tracker.version, tracker.increment_version()
    assert first != second
    assert uuid.UUID(str(second)).version == 4
    assert tracker(TensorDict({}, batch_size=[2]))["policy_version"] == [second, second]
