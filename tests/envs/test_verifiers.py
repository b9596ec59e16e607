"""The door to verifiers' tasksets, with stub packages of both interfaces in a child of this interpreter."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from rlpost.catalog import TRAIN_GRPO
from rlpost.config.compose import compose
from rlpost.data.conversation import Conversation
from rlpost.envs.build import build_env
from rlpost.envs.proof import prove
from rlpost.envs.verifiers import VerifiersEnv
from rlpost.errors import ConfigError, DataError, MissingExtraError
from rlpost.remote.lines import ChildError
from rlpost.remote.process import WorkerProcess
from rlpost.settings import VerifiersSettings
from tests.envs import verifiers_stubs
from tests.envs.episodes import answered, error_of, say
from tests.processes import children as all_children
from tests.processes import is_gone
from tests.says import Says
from tests.trainings import metrics, train_in

pytestmark = pytest.mark.thorough

SUMS = (verifiers_stubs.STUBS / "sums.py").read_text()
OLD = (verifiers_stubs.STUBS / "old.py").read_text()


Make = Callable[..., VerifiersEnv]


def children() -> list[str]:
    """The commands of the processes that hold a taskset, and of what they have started."""
    return [each for each in all_children().values() if "verifiers_child" in each or "time.sleep(600)" in each]


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages that the child imports, with verifiers 0.4 and the taskset sums."""
    folder = verifiers_stubs.v1(tmp_path / "packages")
    (folder / "sums.py").write_text(SUMS)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


@pytest.fixture
def old(packages: Path) -> Path:
    """The same with verifiers 0.3.1 and the environment old."""
    (packages / "old.py").write_text(OLD)
    return verifiers_stubs.v0(packages)


@pytest.fixture
def made(packages: Path) -> Iterator[Make]:
    """Makes environments, and closes them at the end: nothing runs afterwards."""
    with ExitStack() as opened:
        yield lambda id="sums", **given: opened.enter_context(closing(VerifiersEnv(id, **given)))
    assert not children()


def change(packages: Path, *changes: tuple[str, str], file: str = "sums.py") -> None:
    """Write the taskset with some of its code replaced."""
    code = SUMS
    for before, after in changes:
        assert before in code
        code = code.replace(before, after)
    (packages / file).write_text(code)


def first_do(packages: Path, code: str) -> None:
    """Let the reward `right` run this code at first."""
    change(packages, ('if reply == "raise":', f"{code}\n        if False:"))


def replied(env: VerifiersEnv, *replies: str) -> list[Conversation]:
    """Scored replies to the first task in the package's order; {gold} stands for its answer."""
    env.start()
    return answered(env, min(env.rows, key=lambda row: int(row["answer"])), *replies)


def rewards(conversations: list[Conversation]) -> list[float | None]:
    return [conversation.reward for conversation in conversations]


# Rows and rewards


def test_the_rows_are_the_tasks_with_their_prompts_and_fields(made: Make) -> None:
    train, test = made(shuffle=False), made(split="test")
    assert len(train.load("train")) + len(test.load("test")) == 12
    assert not train.prompts_shared_with(test)
    task = train.rows[0]
    assert task["answer"] == str(task["idx"] + 1)
    [conversation] = train.draw(1)
    assert conversation.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"What is {task['idx']} + 1?"},
    ]


def test_a_reward_is_the_sum_of_its_parts_times_their_weights(made: Make) -> None:
    scored = replied(made(), "{gold}", "{gold} or so", "999")
    assert rewards(scored) == [2.0, 0.0, 0.5]
    assert scored[0].reward_parts == {"right": 1.0, "mean_": 1.0, "digits": 1.0}
    assert scored[0].part_weights == {"right": 1.0, "mean_": 0.5, "digits": 0.5}


def test_what_cannot_be_scored_is_an_error_and_never_0(made: Make, says: Says) -> None:
    scored = replied(made(), "raise", "{gold}", "nan", "none")
    assert rewards(scored) == [None, 2.0, None, None]
    says("env", "\n".join(error_of(each) for each in scored if not each.valid))


def test_the_system_prompt_and_the_template_can_be_others(made: Make) -> None:
    env = made(system_prompt="Think.", prompt_template="{prompt} Not {idx}.", shuffle=False)
    env.start()
    assert env.opening_messages({**env.rows[0], "idx": 7})[0]["content"] == "Think."
    assert env.opening_messages(env.rows[0])[1]["content"].endswith(f"+ 1? Not {env.rows[0]['idx']}.")


def test_a_prompt_from_outside_has_no_score(made: Make) -> None:
    env = made()
    with pytest.raises(DataError, match=r"env\.id=sums"):
        say(env, env.begin([{"query": "Who are you?"}]), "A model.")


def test_tasks_of_an_endless_taskset_are_taken_up_to_a_number(packages: Path, made: Make) -> None:
    endless = ("range(self.config.count)", "__import__('itertools').count()")
    change(packages, endless, ("ARGUMENTS = {", "INFINITE = True; ARGUMENTS = {"))
    assert [len(made(tasks=tasks).taskset.rows) for tasks in (5, None)] == [5, 1000]


# Version 0


@pytest.mark.usefixtures("old")
def test_an_environment_of_v0_is_scored_by_its_rubrics(made: Make) -> None:
    scored = replied(made("old"), "{gold}", "999", "999 or so", "raise")
    assert rewards(scored) == [1.25, 0.0, 0.0, None]
    assert scored[0].reward_parts == {"right": 1.0, "short": 1.0}
    assert scored[0].part_weights == {"right": 1.0, "short": 0.25}
    assert "RuntimeError" in error_of(scored[3])  # though its rubric counts 0


@pytest.mark.usefixtures("old")
def test_the_rows_for_evaluation_of_v0_are_the_split_test(made: Make) -> None:
    env = made("old", args={"own_test": True})
    assert [len(env.load("train")), [task["answer"] for task in env.load("test")]] == [12, ["51"]]
    same = made("old", args={"own_test": "same"})  # the rows for training again: they are divided
    assert len(same.load("train")) + len(same.load("test")) == 12


@pytest.mark.usefixtures("old")
def test_a_rubric_of_v0_that_lost_its_processes_gives_no_0(made: Make) -> None:
    scored = replied(made("old"), "break", "{gold}", "{gold}")
    assert rewards(scored) == [None, 1.25, 1.25]
    assert "broken-pool" in error_of(scored[0])


@pytest.mark.usefixtures("old")
def test_a_rollout_of_v0_without_a_reply_is_not_0(made: Make) -> None:
    assert rewards(replied(made("old", args={"kind": "Slow", "timeout_seconds": 0.05}), "{gold}")) == [1.25]
    [scored] = replied(made("old", args={"kind": "Silent"}), "{gold}")
    assert "TimeoutError" in error_of(scored)


@pytest.mark.usefixtures("old")
def test_a_taskset_of_v1_is_scored_by_0_3_1_as_well(made: Make) -> None:
    assert rewards(replied(made("sums"), "{gold}")) == [2.0]


@pytest.mark.usefixtures("old")
@pytest.mark.parametrize(
    "old_args",
    [{"kind": "ToolEnv"}, {"function": "completions"}, {"function": "state"}, {"wrong": 1}],
    ids=["tools", "several replies", "no weight", "wrong argument"],
)
def test_what_cannot_work_of_v0_is_refused(made: Make, old_args: dict[str, Any], says: Says) -> None:
    with says.refused("env", ConfigError, "env.id=old: "):
        made("old", args=old_args).start()


@pytest.mark.parametrize("code", [OLD, "import verifiers\nverifiers.SingleTurnEnv\n", "from verifiers import Rubric\n"])
def test_a_package_of_v0_beside_0_4_names_the_version_needed(packages: Path, made: Make, code: str) -> None:
    (packages / "old.py").write_text(code)
    with pytest.raises(ConfigError, match=r"0\.4\.0 .*verifiers==0\.3\.1"):
        made("old").start()


def test_missing_and_old_verifiers_are_named(packages: Path, made: Make) -> None:
    shutil.rmtree(packages / "verifiers" / "v1")
    with pytest.raises(ConfigError, match=r"verifiers==0\.4\.0, .*==0\.3\.1"):
        made().start()
    for each in packages.glob("verifiers*"):
        shutil.rmtree(each)
    with pytest.raises(MissingExtraError, match=rf"{sys.executable} .*env\.python"):
        made().start()


# Refusals of v1


REWARD = "    @vf.reward\n"
LAMBDA = "(type('Other', (SumTask,), {'f': vf.reward(lambda self: 1)}) if n else SumTask)(data"
REFUSED = {
    "plain def": ("async def form(self, trace, task):", "def form(self, trace, task):"),
    "runtime of a reward": ("async def right(self, trace):", "async def right(self, trace, runtime):"),
    "runtime of setup": (REWARD, f"    async def setup(self, trace, runtime): pass\n{REWARD}"),
    "container of all": (REWARD, f"    NEEDS_CONTAINER = True\n{REWARD}"),
    "container of one": ("vf.TaskData(", "vf.TaskData(image='ubuntu' if n else None, "),
    "second class": ("SumTask(data", LAMBDA),
    "tools of a task": (REWARD, f"    toolsets = lambda config: ['search']\n{REWARD}"),
    "tools of all": ("class Sums(vf.Taskset):", "class Sums(vf.Taskset):\n    toolsets = lambda config: [1]\n"),
    "intercepts": (REWARD, f"    @vf.intercept\n    def edit(self): pass\n{REWARD}"),
    "stops": (REWARD, f"    @vf.stop\n    def end(self, reply: int): pass\n{REWARD}"),
    "no reward": ("@vf.reward", "@vf.metric"),
    "no prompt": ('prompt=f"What is {n} + 1?"', "prompt=None"),
    "image": ('f"What is {n} + 1?"', "[{'role': 'user', 'content': [{'type': 'image_url'}]}]"),
    "end": ('f"What is {n} + 1?"', "[{'role': 'assistant', 'content': 'Hi'}]"),
    "own run": ("class Sums(", "class Game(vf.SingleAgentEnv):\n    async def run(self): pass\nclass Sums("),
    "error": ("def load(self):", "def load(self):\n        raise OSError('no network')"),
    "wrong argument": ('"count": 12', '"cout": 12'),
}


@pytest.mark.parametrize("changed", REFUSED.values(), ids=REFUSED)
def test_a_taskset_that_cannot_work_is_refused_by_name(
    packages: Path, made: Make, changed: tuple[str, str], says: Says
) -> None:
    change(packages, changed)
    with says.refused("env", ConfigError, "env.id=sums: "):
        made(args={"count": 5}).start()


@pytest.mark.parametrize(("id", "missing"), [("sums", "not_there"), ("owner/reverse-text", "reverse_text")])
def test_a_missing_module_is_named_with_the_interpreter(packages: Path, made: Make, id: str, missing: str) -> None:
    change(packages, ("import verifiers.v1", "import not_there, verifiers.v1"))
    with pytest.raises(ConfigError, match=f"env.id={id}: {sys.executable} .* {missing}: "):
        made(id).start()


def test_a_taskset_without_tasks_is_not_an_empty_split(packages: Path, made: Make) -> None:
    with pytest.raises(DataError, match=r"12 tasks.* test: .*env\.held_out=0"):
        made(split="test", held_out=0.0).start()
    change(packages, ('"count": 12', '"count": 0'))
    with pytest.raises(DataError, match="no tasks"):
        made(args={}, tasks=3).start()


# A child that fails


def test_a_hanging_reward_is_late_and_costs_no_other(made: Make) -> None:
    env = made(score_seconds=0.2)
    scored = replied(env, "hang", "{gold}")
    assert rewards(scored) == [None, 2.0]
    assert error_of(scored[0]).endswith(" env.score_seconds=0.2")


def test_a_thread_that_hangs_costs_no_later_reply(packages: Path, made: Make) -> None:
    in_thread = "(await asyncio.get_running_loop().run_in_executor(POOL, check, reply, self.data.answer))"
    check = "POOL = __import__('concurrent.futures').futures.ThreadPoolExecutor(1)\n"
    check += "def check(reply, answer):\n    return time.sleep(600) if reply == 'thread' else reply == answer\n"
    change(packages, ("reply == self.data.answer", in_thread), ("class SumTask", f"{check}\nclass SumTask"))
    env = made(score_seconds=0.3)
    assert rewards(replied(env, "thread", "{gold}", "{gold}")) == [None, 2.0, 2.0]
    assert rewards(replied(env, "{gold}")) == [2.0]


def test_rewards_that_wait_for_nothing_have_the_whole_time_each(
    packages: Path, made: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlpost.envs.verifiers.GRACE_SECONDS", 0.1)
    first_do(packages, "time.sleep(0.1)")
    env = made(score_seconds=0.4)
    env.start()
    pid = env.taskset.pid
    assert rewards(replied(env, *["{gold}"] * 8)) == [2.0] * 8
    assert env.taskset.pid == pid


def test_rewards_that_wait_do_so_at_the_same_time(packages: Path, made: Make) -> None:
    first_do(packages, "vf.all = getattr(vf, 'all', None) or asyncio.Barrier(4)\n        await vf.all.wait()")
    assert rewards(replied(made(score_seconds=5.0), *["{gold}"] * 4)) == [2.0] * 4


def test_answers_after_an_interruption_are_not_read_as_the_next(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    env = made()
    env.start()
    with monkeypatch.context() as patched:
        patched.setattr("rlpost.remote.lines.Lines.receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            replied(env, "{gold}", "{gold}")
    assert rewards(replied(env, "999", "{gold}")) == [0.5, 2.0]


def test_a_reward_that_blocks_is_killed_with_all_it_has_started(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlpost.envs.verifiers.GRACE_SECONDS", 0.2)
    env = made(score_seconds=0.2)
    env.start()
    pid = env.taskset.pid
    assert pid is not None
    scored = replied(env, "block", "{gold}")
    assert rewards(scored) == [None, 2.0]
    assert "within 0.4 s" in error_of(scored[0])
    assert is_gone(pid)
    assert len(children()) == 1  # the child that took its place


def test_a_child_that_dies_is_named_and_started_again(made: Make) -> None:
    env = made()
    scored = replied(env, "die", "{gold}")
    assert rewards(scored) == [None, 2.0]
    assert "exit code 9" in error_of(scored[0])
    assert error_of(scored[0]).endswith("memory")  # the end of its stderr
    assert rewards(replied(env, "{gold}")) == [2.0]
    pid = env.taskset.pid  # another dies between two steps
    assert pid is not None
    os.kill(pid, 9)
    assert is_gone(pid)
    assert rewards(replied(env, "{gold}")) == [2.0]


def test_a_single_reply_whose_child_died_is_scored_again(packages: Path, made: Make) -> None:
    (packages / "alive").touch()
    alive = str(packages / "alive")
    first_do(packages, f"if os.path.exists({alive!r}):\n            os.remove({alive!r}), os._exit(9)")
    assert rewards(replied(made(), "{gold}")) == [2.0]


def test_tasks_that_are_others_after_a_restart_are_an_error(packages: Path, made: Make) -> None:
    env = made()
    env.start()
    change(packages, ("{n} + 1", "{n or 'No'} plus 1"))
    for reply in ("die", "{gold}"):
        with pytest.raises(DataError, match=r"env\.id=sums .*12 of 12"):
            replied(env, reply)


def test_a_taskset_that_does_not_load_in_time_is_killed(packages: Path, made: Make) -> None:
    (packages / "sums.py").write_text("import time\ntime.sleep(600)\n")
    with pytest.raises(ChildError, match=r"env\.start_seconds=0\.3"):
        made(start_seconds=0.3).start()


@pytest.mark.parametrize(
    "line",
    [
        '{"item": 99, "error": ""}',
        '{"item": 0}',
        '{"item": 0, "result": 3}',
        '{"item": 0, "result": {"a": [1]}}',
        "[1, 2]",
        '{"end": true}',
    ],
)
def test_a_package_that_writes_into_the_answers_is_an_error(packages: Path, made: Make, line: str, says: Says) -> None:
    first_do(packages, f"os.write(4, {line.encode()!r} + b'\\n')")
    [scored] = replied(made(), "7")
    says("env", error_of(scored).partition("; its stderr")[0])


def test_a_flood_of_answers_ends(packages: Path, made: Make) -> None:
    first_do(packages, """while reply == 'flood': os.write(4, b'{"item": 0, "result": {"right": [1, 1]}}\\n')""")
    assert rewards(replied(made(), "flood", "{gold}"))[1] == 2.0


def test_environments_of_one_taskset_share_a_child(made: Make) -> None:
    train, test = made(), made(split="test")
    train.start()
    test.start()
    assert train.taskset is test.taskset
    assert len(children()) == 1
    train.close()
    assert rewards(replied(test, "{gold}")) == [2.0]


def lister() -> Any:
    """What is built in a player's process: made in a function, so that it goes over by value."""
    import sys

    from rlpost.envs.verifiers import Taskset

    class Lister:
        def rows(self) -> list[dict[str, Any]]:
            return Taskset("sums", "{}", 1, sys.executable, 60.0).rows

    return Lister()


def test_in_a_player_the_package_sees_the_user_s_own_path(packages: Path) -> None:
    change(packages, ("answer=str(n + 1)", "answer=os.environ['PYTHONPATH']"))
    with closing(WorkerProcess(lister)) as player:
        player.start()
        [row] = player.call("rows", seconds=60.0)
    assert row["fields"]["answer"] == str(packages)


# What `rlpost env test` does, and training


def test_the_answers_of_the_tasks_are_proved(made: Make) -> None:
    env = made()
    proof = prove(env)
    assert proof.holds
    assert (proof.checked, set(proof.gold), set(proof.corrupted)) == (env.num_tasks, {2.0}, {0.5})


def test_an_answer_is_tried_in_the_tags_of_the_prompt(packages: Path, made: Make) -> None:
    tagged = ("== self.data.answer", '== f"<sum>{self.data.answer}</sum>"')
    change(packages, ("Be brief.", "Write <sum> and </sum>."), tagged, ("weight=0.5", "weight=0"))
    assert made().gold_reply({"answer": "3"}) == "<sum>3</sum>"


def test_without_right_replies_an_empty_one_is_scored(packages: Path, made: Make, says: Says) -> None:
    change(packages, ("== self.data.answer", "== ''"))
    env = made(shuffle=False)
    says("env", "\n".join(env.rehearse() or []))
    with pytest.raises(DataError, match=r"env\.id=sums"):
        env.gold_reply(env.rows[0])


def test_no_answer_is_imitated_that_earns_less(packages: Path, made: Make) -> None:
    env = made(held_out=0.0, shuffle=False)
    assert [each.messages[-1]["content"] for each in env.demonstrations() if each.messages][:2] == ["1", "2"]
    change(packages, ("self.data.answer)", "self.data.answer and reply != '7')"), file="partly.py")
    with pytest.raises(DataError, match=r"1 of 12 .*: {'right': \[0"):
        list(made("partly", held_out=0.0, shuffle=False).demonstrations())


def test_an_empty_reply_that_cannot_be_scored_is_named(packages: Path, made: Make) -> None:
    first_do(packages, "raise RuntimeError")
    with pytest.raises(DataError, match=r"\d+ of \d+ .*RuntimeError"):
        made().rehearse()


@pytest.mark.parametrize(
    "check",
    [
        "self.data.answer != '3'",
        "await asyncio.sleep(600 * (self.data.answer == '3'))",
        "self.data.answer != '3' or os._exit(9)",
    ],
)
def test_tasks_that_fail_their_own_check_are_named(packages: Path, made: Make, check: str, says: Says) -> None:
    change(packages, (REWARD, f"    async def validate(self):\n        return {check}\n\n{REWARD}"))
    env = made(held_out=0.0, score_seconds=0.3, shuffle=False)
    with says.refused("env", DataError, "1 of 12 tasks"):
        env.rehearse()


@pytest.mark.parametrize(
    ("given", "part"),
    [({"args": "[1]"}, "env.args=[1]"), ({"split": "validation"}, "env.split"), ({"max_turns": 2}, "env.max_turns=2")],
)
def test_settings_that_cannot_work_are_refused(given: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(part)):
        VerifiersSettings(id="sums", **given)


@pytest.mark.usefixtures("packages")
def test_the_settings_reach_the_package() -> None:
    words = ["env=verifiers", "env.id=sums", "env.args={count: 4}", f"env.python={sys.executable}", "env.tasks=3"]
    with closing(build_env(compose(TRAIN_GRPO, words).settings.env)) as env:
        assert isinstance(env, VerifiersEnv)
        assert len(env.taskset.rows) == 3


def test_a_training_resumes_where_it_stopped_and_leaves_nothing(packages: Path, tmp_path: Path) -> None:
    change(packages, ("reply == self.data.answer", "sum(map(ord, reply)) % 101"))
    words = ["model=tiny", "model.autocast=none", "policy=transformers", "env=verifiers", "env.id=sums"]
    words += ["prompts_per_step=2", "group_size=2", "env.max_completion_tokens=4", "eval.every=0", "optim.lr=1e-4"]
    for folder, steps, resume in (("whole", 3, None), ("parts", 2, None), ("parts", 3, "auto")):
        assert train_in(TRAIN_GRPO, tmp_path / folder, [*words, f"steps={steps}"], resume) == 0
        assert not children()
    lines = [metrics(tmp_path / folder) for folder in ("whole", "parts")]
    whole, parts = ([line["reward/mean"] for line in each if "reward/mean" in line] for each in lines)
    assert whole == parts
    assert len(set(whole)) == 3  # rewards of different replies to different tasks
