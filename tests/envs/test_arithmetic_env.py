from itertools import islice

import pytest

from rlpost.envs import ArithmeticEnv
from rlpost.envs.arithmetic import Problems, is_held_out, permuted, problem
from rlpost.envs.proof import prove
from rlpost.errors import DataError

ALL = ("add", "subtract", "multiply")


def pairs(problems: Problems) -> list[tuple[int, int]]:
    return [(task["a"], task["b"]) for task in problems.epoch(0)]


def test_answers_are_worked_out_by_operation() -> None:
    assert problem("add", 34, 57) == {"question": "34 + 57", "answer": "91", "a": 34, "b": 57, "operation": "add"}
    assert (problem("subtract", 34, 57)["question"], problem("subtract", 34, 57)["answer"]) == ("34 - 57", "-23")
    assert (problem("multiply", 12, 11)["question"], problem("multiply", 12, 11)["answer"]) == ("12 * 11", "132")


def test_the_question_is_asked_without_a_system_message() -> None:
    conversation = ArithmeticEnv().draw()[0]
    assert conversation.messages == [{"role": "user", "content": f"What is {conversation.task['question']}?"}]
    assert conversation.max_completion_tokens == 48


def test_every_problem_is_in_one_split_once_an_epoch() -> None:
    train, test = pairs(Problems(("add",), 2, "train", seed=0)), pairs(Problems(("add",), 2, "test", seed=0))
    assert len(train) + len(test) == 8100
    assert set(train) | set(test) == {(a, b) for a in range(10, 100) for b in range(10, 100)}
    assert len(test) == pytest.approx(8100 / 5, rel=0.1)


def test_a_pair_and_its_mirror_are_on_the_same_side_under_every_operation() -> None:
    train, test = (set(pairs(Problems(ALL, 2, split, seed=0))) for split in ("train", "test"))
    assert not train & test
    assert not train & {(b, a) for a, b in test}
    assert is_held_out(12, 34) == is_held_out(34, 12)


def test_with_nothing_held_out_both_splits_are_all_problems_and_that_is_known() -> None:
    train, test = (ArithmeticEnv(digits=1, held_out=0, split=split) for split in ("train", "test"))
    both = [set(pairs(Problems(("add",), 1, split, seed=0, held_out=0))) for split in ("train", "test")]
    assert both[0] == both[1] == {(a, b) for a in range(10) for b in range(10)}
    assert train.num_tasks == test.num_tasks == test.prompts_shared_with(train) == 100
    assert test.prompts_shared_with(ArithmeticEnv(digits=1, held_out=0, limit=30)) == 30
    assert ArithmeticEnv(digits=1, split="test").prompts_shared_with(ArithmeticEnv(digits=1)) == 0


def test_a_share_that_leaves_a_split_empty_says_what_to_change() -> None:
    with pytest.raises(DataError, match=r"env.held_out=0.0001 leaves the test split of these problems empty"):
        ArithmeticEnv(digits=1, held_out=0.0001, split="test").start()


def test_a_saved_position_belongs_to_one_share() -> None:
    with pytest.raises(DataError, match=r"0\.2 held out"):
        ArithmeticEnv(held_out=0.5).load_state_dict(ArithmeticEnv().state_dict())


def test_the_split_is_the_same_for_every_seed_and_the_order_is_not() -> None:
    one, two = pairs(Problems(("add",), 2, "test", seed=1)), pairs(Problems(("add",), 2, "test", seed=2))
    assert sorted(one) == sorted(two)
    assert one != two


def test_epochs_differ_in_order_and_resume_anywhere() -> None:
    problems = Problems(("add",), 1, "test", seed=0)
    size = problems.count()
    drawn = list(islice(problems.iter_from(0), 3 * size))
    assert drawn[:size] != drawn[size : 2 * size]
    assert list(islice(problems.iter_from(size + 3), 5)) == drawn[size + 3 : size + 8]


def test_a_limit_repeats_the_first_problems() -> None:
    drawn = [task["question"] for task in islice(Problems(ALL, 4, "train", seed=0, limit=3).iter_from(0), 9)]
    assert drawn[:3] == drawn[3:6] == drawn[6:]
    assert len(set(drawn)) == 3


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("operations", [("add",), ALL])
def test_counting_is_exact_where_it_can_be_checked(split: str, operations: tuple[str, ...]) -> None:
    problems = Problems(operations, 2, split, seed=0)
    assert problems.count() == sum(1 for _ in problems.epoch(0))


def test_large_operands_need_no_list_of_all_problems() -> None:
    test = list(islice(Problems(ALL, 9, "test", seed=0).iter_from(0), 500))
    assert len({task["question"] for task in test}) == 500


@pytest.mark.parametrize("size", [1, 2, 3, 100, 1000])
def test_permuting_hits_every_number_once(size: int) -> None:
    assert sorted(permuted(i, size, key=5) for i in range(size)) == list(range(size))


def test_a_run_resumes_at_the_same_problem() -> None:
    env = ArithmeticEnv(num_envs=2, repeats=4, group_repeats=True, seed=5)
    env.draw()
    resumed = ArithmeticEnv(num_envs=2, repeats=4, group_repeats=True, seed=5)
    resumed.load_state_dict(env.state_dict())
    assert env.draw() == resumed.draw()


@pytest.mark.parametrize("digits", [1, 4])
def test_gold_answers_score_full_marks_and_corrupted_ones_do_not(digits: int) -> None:
    proof = prove(ArithmeticEnv(operations=ALL, digits=digits, split="test", limit=200))
    assert proof.holds, proof.lines()
    assert proof.replies == 7 * proof.checked
