"""What stays on the terminal after the picture."""

from __future__ import annotations

from rlpost.screen.screen import Record


def texts(record: Record) -> list[str]:
    return [text for text, _ in record.lines()]


def test_few_lines_all_stay_in_their_order() -> None:
    record = Record()
    record.add("before", "")
    record.add_step("1")
    record.add("between", "yellow")
    record.add_step("2")
    assert record.lines() == [("before", ""), ("1", ""), ("between", "yellow"), ("2", "")]


def test_of_many_steps_every_nth_stays_and_the_last() -> None:
    record = Record()
    for step in range(1, 61):
        record.add_step(str(step))
    assert texts(record) == ["1", "9", "17", "25", "33", "41", "49", "57", "60"]


def test_of_very_many_other_lines_the_first_and_last_stay_and_the_rest_is_counted() -> None:
    record = Record()
    for number in range(1, 151):
        record.add(str(number), "")
    kept = [*range(1, 21), *range(71, 151)]
    assert texts(record) == [*map(str, kept), "50 more lines are in the run's log.txt"]
