"""The door to verifiers' tasksets, with stub packages of both interfaces in a child of this interpreter."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rlpost.catalog import TRAIN_GRPO
from rlpost.config.compose import compose
from rlpost.data.conversation import Completion, Conversation
from rlpost.envs.build import build_env
from rlpost.envs.proof import prove
from rlpost.envs.verifiers import VerifiersEnv
from rlpost.errors import ConfigError, DataError, MissingExtraError
from rlpost.remote.lines import ChildError
from rlpost.remote.process import WorkerProcess
from rlpost.settings import VerifiersSettings
from tests.envs import verifiers_stubs
from tests.processes import children as all_children
from tests.processes import is_gone
from tests.trainings import metrics, train_in

SUMS = """
import asyncio, os, subprocess, sys, threading, time
import verifiers.v1 as vf

class SumTask(vf.Task):
    @vf.reward
    async def right(self, trace):
        reply = trace.last_reply
        if reply == "raise":
            raise RuntimeError("a fault of the reward")
        if reply == "hang":
            await asyncio.sleep(600)
        if reply == "block":
            subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"])
            time.sleep(600)
        if reply == "die":
            print("no more memory", file=sys.stderr, flush=True)
            os._exit(9)
        if reply == "none":
            return {}
        if reply == "nan":
            return float("nan")
        print("a line on stdout that is no answer")
        return float(reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def form(self, trace, task):
        assert threading.current_thread() is threading.main_thread()
        return {"mean": float(trace.num_output_tokens < 3), "digits": float(trace.last_reply.isdigit())}

class Sums(vf.Taskset):
    ARGUMENTS = {"count": 12}

    def load(self):
        for n in range(self.config.count):
            data = vf.TaskData(idx=n, prompt=f"What is {n} + 1?", system_prompt="Be brief.", answer=str(n + 1))
            yield SumTask(data, self.config.task)
"""
OLD = """
import asyncio, types
import verifiers as vf

POOL = types.SimpleNamespace(_broken=False)

def right(completion, answer):
    if completion and completion[-1].content == "raise":
        raise RuntimeError("a fault of the reward")
    if completion and completion[-1].content == "break":
        POOL._broken = "a process of the pool was ended"
    return float(not POOL._broken and completion[-1].content == answer)

async def short(completion):
    return float(len(completion[-1].content) < 3)

def shown(completion):
    raise RuntimeError("a figure of weight 0")

class Slow(vf.SingleTurnEnv):
    async def setup_state(self, state):
        await asyncio.sleep(0.2)

class Silent(vf.SingleTurnEnv):
    async def rollout(self, *given):
        return {**await super().rollout(*given), "trajectory": [], "completion": []}

vf.Slow, vf.Silent = Slow, Silent

def load_environment(count=12, own_test=False, kind="SingleTurnEnv", function=None, timeout_seconds=None):
    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(count)]
    test = [{"question": "What is 50 + 1?", "answer": "51"}] if own_test else None
    test = rows[:5] if own_test == "same" else test
    rubrics = [vf.Rubric([right, shown], [1.0, 0.0]), vf.Rubric([short], [0.25])]
    if function:
        exec(f"def judge({function}): return 1.0", globals())
        rubrics = [vf.Rubric([judge], [0.0 if function == "state" else 1.0])]
    rubrics[0].executor = POOL
    return getattr(vf, kind)(rows, test, vf.RubricGroup(rubrics), "Be brief.", timeout_seconds)
"""


def children() -> list[str]:
    """The commands of the processes that hold a taskset, and of what they have started."""
    return [
        command for command in all_children().values() if "verifiers_child" in command or "time.sleep(600)" in command
    ]


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
def made() -> Iterator[Callable[..., VerifiersEnv]]:
    """Makes environments, and closes them at the end: nothing runs afterwards."""
    envs: list[VerifiersEnv] = []

    def make(id: str = "sums", **given: Any) -> VerifiersEnv:
        envs.append(VerifiersEnv(id, **given))
        return envs[-1]

    yield make
    for env in envs:
        env.close()
    assert not children()


def replied(env: VerifiersEnv, *replies: str) -> list[Conversation]:
    """Scored replies to the first task in the package's order, whose right answer is {answer}."""
    env.start()
    task = min(env.rows, key=lambda row: int(row["answer"]))
    conversations = [Conversation(task, env.opening_messages(task)) for _ in replies]
    for conversation, reply in zip(conversations, replies, strict=True):
        text = reply.format(answer=task["answer"])
        conversation.add_completion(Completion([1] * len(text), [0.0] * len(text), text, "stop", 0))
    env.advance(conversations)
    return conversations


def rewards(conversations: list[Conversation]) -> list[float | None]:
    return [conversation.reward for conversation in conversations]


# Rows and rewards


@pytest.mark.usefixtures("packages")
def test_the_rows_are_the_tasks_with_their_prompts_and_fields(made: Callable[..., VerifiersEnv]) -> None:
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


@pytest.mark.usefixtures("packages")
def test_a_reward_is_the_sum_of_its_parts_times_their_weights(made: Callable[..., VerifiersEnv]) -> None:
    scored = replied(made(), "{answer}", "{answer} or so", "999")
    assert rewards(scored) == [2.0, 0.0, 0.5]
    assert scored[0].reward_parts == {"right": 1.0, "mean_": 1.0, "digits": 1.0}
    assert scored[0].part_weights == {"right": 1.0, "mean_": 0.5, "digits": 0.5}


@pytest.mark.usefixtures("packages")
def test_what_cannot_be_scored_is_an_error_by_name_and_never_0(made: Callable[..., VerifiersEnv]) -> None:
    scored = replied(made(), "raise", "{answer}", "nan")
    assert rewards(scored) == [None, 2.0, None]
    assert scored[0].error == "env.id=sums: RuntimeError: a fault of the reward"
    assert scored[2].error is not None
    assert "not a finite number" in scored[2].error


def test_a_reply_without_any_reward_is_an_error(packages: Path, made: Callable[..., VerifiersEnv]) -> None:
    (packages / "sums.py").write_text(SUMS.replace('return {"mean"', 'return {} if True else {"mean"'))
    assert [each.error for each in replied(made(), "none")] == ["env.id=sums: ValueError: verifiers gave no reward"]


@pytest.mark.usefixtures("packages")
def test_the_system_prompt_and_the_template_can_be_others(made: Callable[..., VerifiersEnv]) -> None:
    env = made(system_prompt="Think.", prompt_template="{prompt} It is not {idx}.", shuffle=False)
    env.start()
    assert env.opening_messages({**env.rows[0], "idx": 7})[0]["content"] == "Think."
    assert env.opening_messages(env.rows[0])[1]["content"].endswith(f"+ 1? It is not {env.rows[0]['idx']}.")


@pytest.mark.usefixtures("packages")
def test_a_prompt_from_outside_has_no_score(made: Callable[..., VerifiersEnv]) -> None:
    env = made()
    [conversation] = env.begin([{"query": "Who are you?"}])
    conversation.add_completion(Completion([], [], "A model.", "stop", 0))
    with pytest.raises(DataError, match="to its own tasks alone"):
        env.advance([conversation])


def test_tasks_of_a_taskset_without_end_are_taken_up_to_a_number(
    packages: Path, made: Callable[..., VerifiersEnv]
) -> None:
    endless = SUMS.replace("range(self.config.count)", "__import__('itertools').count()")
    (packages / "sums.py").write_text(endless.replace("ARGUMENTS = {", "INFINITE = True; ARGUMENTS = {"))
    assert [len(made(tasks=tasks).taskset.rows) for tasks in (5, None)] == [5, 1000]


# Version 0


@pytest.mark.usefixtures("old")
def test_an_environment_of_v0_is_scored_by_its_rubrics(made: Callable[..., VerifiersEnv]) -> None:
    scored = replied(made("old"), "{answer}", "999", "999 or so")
    assert rewards(scored) == [1.25, 0.0, 0.0]
    assert scored[0].reward_parts == {"right": 1.0, "short": 1.0}
    assert scored[0].part_weights == {"right": 1.0, "short": 0.25}


@pytest.mark.usefixtures("old")
def test_what_a_reward_of_v0_raises_is_an_error_though_its_rubric_counts_0(made: Callable[..., VerifiersEnv]) -> None:
    scored = replied(made("old"), "raise", "{answer}")
    assert rewards(scored) == [None, 1.25]
    assert scored[0].error == "env.id=old: RuntimeError: a fault of the reward"


@pytest.mark.usefixtures("old")
def test_the_rows_for_evaluation_of_v0_are_the_split_test(made: Callable[..., VerifiersEnv]) -> None:
    env = made("old", args={"own_test": True})
    assert [len(env.load("train")), [task["answer"] for task in env.load("test")]] == [12, ["51"]]


@pytest.mark.usefixtures("old")
def test_rows_for_evaluation_that_are_those_for_training_are_divided(made: Callable[..., VerifiersEnv]) -> None:
    env = made("old", args={"own_test": "same"})
    assert len(env.load("train")) + len(env.load("test")) == 12


@pytest.mark.usefixtures("old")
def test_a_rubric_of_v0_that_lost_its_processes_gives_no_right_answer_0(made: Callable[..., VerifiersEnv]) -> None:
    scored = replied(made("old"), "break", "{answer}", "{answer}")
    assert rewards(scored) == [None, 1.25, 1.25]
    assert scored[0].error is not None
    assert "Rubric has lost its processes: a process of the pool was ended" in scored[0].error


@pytest.mark.usefixtures("old")
def test_a_rollout_of_v0_without_a_reply_is_not_0(made: Callable[..., VerifiersEnv]) -> None:
    assert rewards(replied(made("old", args={"kind": "Slow", "timeout_seconds": 0.05}), "{answer}")) == [1.25]
    [scored] = replied(made("old", args={"kind": "Silent"}), "{answer}")
    assert scored.error == "env.id=old: TimeoutError: the rollout ended without the reply"


@pytest.mark.usefixtures("old")
def test_a_taskset_of_v1_is_scored_by_0_3_1_as_well(made: Callable[..., VerifiersEnv]) -> None:
    assert rewards(replied(made("sums"), "{answer}")) == [2.0]


@pytest.mark.parametrize(
    ("old_args", "why"),
    [
        ({"kind": "ToolEnv"}, "ToolEnv is not a SingleTurnEnv: it has several turns, tools or environments"),
        ({"function": "completions"}, "compares several replies to a prompt"),
        ({"function": "state"}, "no reward with a weight"),
        ({"wrong": 1}, "unexpected keyword argument 'wrong'"),
    ],
)
@pytest.mark.usefixtures("old")
def test_what_cannot_work_of_v0_is_refused(
    made: Callable[..., VerifiersEnv], old_args: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=f"^env.id=old: .*{why}"):
        made("old", args=old_args).start()


@pytest.mark.parametrize("code", [OLD, "import verifiers\nverifiers.SingleTurnEnv\n", "from verifiers import Rubric\n"])
def test_a_package_of_v0_beside_0_4_names_the_version_to_install(
    packages: Path, made: Callable[..., VerifiersEnv], code: str
) -> None:
    (packages / "old.py").write_text(code)
    with pytest.raises(ConfigError, match=r"written for verifiers' v0 .* 0\.4\.0 is installed: .* verifiers==0\.3\.1"):
        made("old").start()


def test_a_verifiers_of_before_0_3_names_the_versions_to_install(
    packages: Path, made: Callable[..., VerifiersEnv]
) -> None:
    shutil.rmtree(packages / "verifiers" / "v1")
    with pytest.raises(ConfigError, match=r"is too old: install verifiers==0\.4\.0, or ==0\.3\.1"):
        made().start()


# Refusals of v1


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("async def form(self, trace, task):", "def form(self, trace, task):"), "SumTask.form is a plain def"),
        (("async def right(self, trace):", "async def right(self, trace, runtime):"), "SumTask.right needs a runtime"),
        (
            ("    @vf.reward\n", "    async def setup(self, trace, runtime): pass\n    @vf.reward\n"),
            "SumTask.setup nee",
        ),
        (("    @vf.reward\n", "    NEEDS_CONTAINER = True\n    @vf.reward\n"), "run in a container"),
        (("vf.TaskData(", "vf.TaskData(image='ubuntu' if n else None, "), "run in a container"),
        (
            ("SumTask(data", "(type('Other', (SumTask,), {'f': vf.reward(lambda self: 1)}) if n else SumTask)(data"),
            "Other.<l",
        ),
        (("    @vf.reward\n", "    toolsets = lambda config: ['search']\n    @vf.reward\n"), "tools .SumTask.toolsets"),
        (("class Sums(vf.Taskset):", "class Sums(vf.Taskset):\n    toolsets = lambda config: [1]\n"), "Sums.toolsets"),
        (("    @vf.reward\n", "    @vf.intercept\n    def edit(self): pass\n    @vf.reward\n"), "SumTask intercepts"),
        (
            ("    @vf.reward\n", "    @vf.stop\n    def end(self, reply: int): pass\n    @vf.reward\n"),
            "SumTask interce",
        ),
        (("@vf.reward", "@vf.metric"), "SumTask has no reward"),
        (('prompt=f"What is {n} + 1?"', "prompt=None"), "task 0 has no prompt: a user opens the conversation"),
        (('f"What is {n} + 1?"', "[{'role': 'user', 'content': [{'type': 'image_url'}]}]"), "task 0 has images"),
        (('f"What is {n} + 1?"', "[{'role': 'assistant', 'content': 'Hi'}]"), "does not end with a message of the u"),
        (
            ("class Sums(", "class Game(vf.SingleAgentEnv):\n    async def run(self): pass\nclass Sums("),
            r"Game has a run\(",
        ),
        (("def load(self):", "def load(self):\n        raise OSError('no network')"), "OSError: no network"),
        (("import verifiers.v1", "import not_there, verifiers.v1"), "has no module not_there"),
    ],
)
def test_a_taskset_that_cannot_work_is_refused_by_name(
    packages: Path, made: Callable[..., VerifiersEnv], change: tuple[str, str], why: str
) -> None:
    assert change[0] in SUMS
    (packages / "sums.py").write_text(SUMS.replace(*change))
    with pytest.raises(ConfigError, match=f"^env.id=sums: .*{why}"):
        made().start()


@pytest.mark.usefixtures("packages")
def test_a_wrong_argument_of_the_taskset_is_a_wrong_setting(made: Callable[..., VerifiersEnv]) -> None:
    with pytest.raises(ConfigError, match=r"env\.id=sums: ValueError: cout: Extra inputs"):
        made(args={"cout": 3}).start()


@pytest.mark.usefixtures("packages")
def test_a_taskset_that_is_not_there_names_the_interpreter(made: Callable[..., VerifiersEnv]) -> None:
    with pytest.raises(ConfigError, match=f"{sys.executable} has no module reverse_text: install"):
        made("owner/reverse-text").start()


def test_an_interpreter_without_verifiers_is_named(
    packages: Path, made: Callable[..., VerifiersEnv], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(packages / "nothing"))
    with pytest.raises(MissingExtraError, match=f"{sys.executable} has no verifiers: .* env.python"):
        made().start()


def test_a_taskset_without_tasks_and_an_empty_split_are_told_apart(
    packages: Path, made: Callable[..., VerifiersEnv]
) -> None:
    with pytest.raises(DataError, match=r"has 12 tasks, and none .* split test: change env.held_out=0"):
        made(split="test", held_out=0.0).start()
    (packages / "sums.py").write_text(SUMS.replace('"count": 12', '"count": 0'))
    with pytest.raises(DataError, match="has no tasks"):
        made(args={}, tasks=3).start()


# A child that fails


@pytest.mark.usefixtures("packages")
def test_a_hanging_reward_is_an_error_within_its_deadline_and_costs_no_other(made: Callable[..., VerifiersEnv]) -> None:
    env = made(score_seconds=0.2)
    env.start()
    scored = replied(env, "hang", "{answer}")
    assert rewards(scored) == [None, 2.0]
    assert scored[0].error == "env.id=sums: it took longer than env.score_seconds=0.2"


def test_a_thread_that_hangs_costs_no_later_reply(packages: Path, made: Callable[..., VerifiersEnv]) -> None:
    in_thread = "(await asyncio.get_running_loop().run_in_executor(POOL, check, reply, self.data.answer))"
    pool = "POOL = __import__('concurrent.futures').futures.ThreadPoolExecutor(1)"
    check = "def check(reply, answer):\n    return time.sleep(600) if reply == 'thread' else reply == answer"
    code = SUMS.replace("reply == self.data.answer", in_thread)
    (packages / "sums.py").write_text(f"{code}\n{pool}\n{check}\n")
    env = made(score_seconds=0.3)
    assert rewards(replied(env, "thread", "{answer}", "{answer}")) == [None, 2.0, 2.0]
    assert rewards(replied(env, "{answer}")) == [2.0]


def test_rewards_that_wait_for_nothing_have_the_whole_time_each(
    packages: Path, made: Callable[..., VerifiersEnv], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlpost.envs.verifiers.GRACE_SECONDS", 0.1)
    (packages / "sums.py").write_text(SUMS.replace('if reply == "raise":', "time.sleep(0.1)\n        if False:"))
    env = made(score_seconds=0.4)
    env.start()
    pid = env.taskset.pid
    assert rewards(replied(env, *["{answer}"] * 8)) == [2.0] * 8
    assert env.taskset.pid == pid


def test_rewards_that_wait_do_so_at_the_same_time(packages: Path, made: Callable[..., VerifiersEnv]) -> None:
    meet = "if not hasattr(vf, 'all'):\n            vf.all = asyncio.Barrier(4)\n        await vf.all.wait()\n        "
    (packages / "sums.py").write_text(SUMS.replace('if reply == "raise":', meet + "if False:"))
    assert rewards(replied(made(score_seconds=5.0), *["{answer}"] * 4)) == [2.0] * 4


@pytest.mark.usefixtures("packages")
def test_answers_after_an_interruption_are_not_those_to_the_next_request(
    made: Callable[..., VerifiersEnv], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    env = made()
    env.start()
    with monkeypatch.context() as patched:
        patched.setattr("rlpost.remote.lines.Lines.receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            replied(env, "{answer}", "{answer}")
    assert rewards(replied(env, "999", "{answer}")) == [0.5, 2.0]


@pytest.mark.usefixtures("packages")
def test_a_reward_that_blocks_is_killed_with_all_it_has_started(
    made: Callable[..., VerifiersEnv], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlpost.envs.verifiers.GRACE_SECONDS", 0.2)
    env = made(score_seconds=0.2)
    env.start()
    pid = env.taskset.pid
    assert pid is not None
    scored = replied(env, "block", "{answer}")
    assert rewards(scored) == [None, 2.0]
    assert scored[0].error is not None
    assert "the process of env.id=sums did not answer within 0.4 s and was killed" in scored[0].error
    assert is_gone(pid)
    assert len(children()) == 1  # the child that took its place


@pytest.mark.usefixtures("packages")
def test_a_child_that_dies_is_named_and_the_other_replies_are_scored(made: Callable[..., VerifiersEnv]) -> None:
    env = made()
    scored = replied(env, "die", "{answer}")
    assert rewards(scored) == [None, 2.0]
    assert scored[0].error is not None
    assert "ended with exit code 9; its stderr ends with: " in scored[0].error
    assert scored[0].error.endswith("no more memory")
    assert rewards(replied(env, "{answer}")) == [2.0]


@pytest.mark.usefixtures("packages")
def test_a_child_that_was_killed_between_two_steps_is_started_again(made: Callable[..., VerifiersEnv]) -> None:
    env = made()
    assert rewards(replied(env, "{answer}")) == [2.0]
    pid = env.taskset.pid
    assert pid is not None
    os.kill(pid, 9)
    assert is_gone(pid)
    assert rewards(replied(env, "{answer}")) == [2.0]


def test_a_single_reply_whose_child_died_is_scored_again(packages: Path, made: Callable[..., VerifiersEnv]) -> None:
    (packages / "alive").touch()
    once = f"if os.path.exists(alive := {str(packages / 'alive')!r}):\n            os.remove(alive), os._exit(9)"
    (packages / "sums.py").write_text(SUMS.replace('if reply == "raise":', f"{once}\n        if False:"))
    assert rewards(replied(made(), "{answer}")) == [2.0]


def test_tasks_that_are_others_after_a_restart_are_an_error(packages: Path, made: Callable[..., VerifiersEnv]) -> None:
    env = made()
    env.start()
    (packages / "sums.py").write_text(SUMS.replace("{n} + 1", "{n or 'No'} plus 1"))
    for reply in ("die", "{answer}"):
        with pytest.raises(DataError, match=r"env\.id=sums lists other tasks each time: 12 of 12 tasks were gone"):
            replied(env, reply)


def test_a_taskset_that_does_not_load_in_time_is_killed(packages: Path, made: Callable[..., VerifiersEnv]) -> None:
    (packages / "sums.py").write_text("import time\ntime.sleep(600)\n")
    with pytest.raises(ChildError, match=r"did not answer within .* and was killed.*env.start_seconds=0.3"):
        made(start_seconds=0.3).start()


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ('os.write(4, b\'{"item": 99, "error": ""}\\n\')', "wrote an unexpected answer and was killed: {'item': 99"),
        ("os.write(4, b'{\"item\": 0}\\n')", "wrote an unexpected answer and was killed: {'item': 0}"),
        ('os.write(4, b\'{"item": 0, "result": 3}\\n\')', "wrote an unexpected answer and was killed"),
        ('os.write(4, b\'{"item": 0, "result": {"a": [1]}}\\n\')', "wrote an unexpected answer and was killed"),
        ("os.write(4, b'[1, 2]\\n')", r"wrote an unexpected answer and was killed: [1, 2]"),
        ("os.write(4, b'{\"end\": true}\\n')", "left items without an answer, and was killed"),
        ("[os.write(4, b'x' * 4096) for _ in iter(int, 1)]", "wrote a line of more than"),
    ],
)
def test_a_package_that_writes_into_the_answers_is_an_error(
    packages: Path, made: Callable[..., VerifiersEnv], monkeypatch: pytest.MonkeyPatch, code: str, why: str
) -> None:
    monkeypatch.setattr("rlpost.remote.lines.LONGEST_LINE", 100_000)
    (packages / "sums.py").write_text(SUMS.replace('if reply == "nan":', f'if reply == "write":\n            {code}'))
    [scored] = replied(made(), "write")
    assert scored.error is not None
    assert why in scored.error


def test_a_flood_of_answers_ends(packages: Path, made: Callable[..., VerifiersEnv]) -> None:
    flood = """while reply == 'flood': os.write(4, b'{"item": 0, "result": {"right": [1, 1]}}\\n')"""
    (packages / "sums.py").write_text(SUMS.replace('if reply == "raise":', f"{flood}\n        if False:"))
    assert rewards(replied(made(), "flood", "{answer}"))[1] == 2.0


@pytest.mark.usefixtures("packages")
def test_environments_of_one_taskset_share_a_child_until_the_last_is_closed() -> None:
    train, test = VerifiersEnv("sums"), VerifiersEnv("sums", split="test")
    with closing(train), closing(test):
        train.start()
        test.start()
        assert train.taskset is test.taskset
        assert len(children()) == 1
        train.close()
        assert rewards(replied(test, "{answer}")) == [2.0]
    assert not children()


def lister() -> Any:
    """What is built in a player's process: made in a function, so that it goes over by value."""
    import sys

    from rlpost.envs.verifiers import Taskset

    class Lister:
        def rows(self) -> list[dict[str, Any]]:
            return Taskset("sums", "{}", 1, sys.executable, 60.0).rows

    return Lister()


def test_in_a_player_the_package_sees_the_user_s_own_path(packages: Path) -> None:
    (packages / "sums.py").write_text(SUMS.replace("answer=str(n + 1)", "answer=os.environ['PYTHONPATH']"))
    with closing(WorkerProcess(lister)) as player:
        player.start()
        [row] = player.call("rows", seconds=60.0)
    assert row["fields"]["answer"] == str(packages)


# What `rlpost env test` does, and training


@pytest.mark.usefixtures("packages")
def test_the_answers_of_the_tasks_are_proved(made: Callable[..., VerifiersEnv]) -> None:
    env = made()
    proof = prove(env)
    assert proof.holds
    assert (proof.checked, set(proof.gold), set(proof.corrupted)) == (env.num_tasks, {2.0}, {0.5})


def test_an_answer_is_tried_in_the_tags_of_the_prompt(packages: Path, made: Callable[..., VerifiersEnv]) -> None:
    tagged = SUMS.replace("Be brief.", "Write <sum> and </sum>.").replace(
        "== self.data.answer", '== f"<sum>{self.data.answer}</sum>"'
    )
    (packages / "sums.py").write_text(tagged.replace("weight=0.5", "weight=0"))
    env = made()
    assert env.gold_reply({"answer": "3"}) == "<sum>3</sum>"


def test_without_right_replies_an_empty_one_is_scored(packages: Path, made: Callable[..., VerifiersEnv]) -> None:
    (packages / "sums.py").write_text(SUMS.replace("== self.data.answer", "== ''"))
    env = made(shuffle=False)
    assert env.rehearse() == [
        f"{env.num_tasks} tasks, no reply is known to be right; an empty one is scored, and earns 1.5",
        "  the first prompt:",
        "    system: Be brief.",
        f"    user: {env.rows[0]['prompt']}",
    ]
    with pytest.raises(DataError, match="no replies known to be right"):
        env.gold_reply(env.rows[0])


def test_no_answer_is_imitated_that_earns_less(packages: Path, made: Callable[..., VerifiersEnv]) -> None:
    env = made(held_out=0.0, shuffle=False)
    assert [each.messages[-1]["content"] for each in env.demonstrations() if each.messages][:2] == ["1", "2"]
    (packages / "partly.py").write_text(SUMS.replace("self.data.answer)", "self.data.answer and reply != '7')"))
    with pytest.raises(DataError, match=r"the answer does not earn full marks in 1 of 12 tasks, .*: {'right': \[0"):
        list(made("partly", held_out=0.0, shuffle=False).demonstrations())


def test_an_empty_reply_that_cannot_be_scored_is_named(packages: Path, made: Callable[..., VerifiersEnv]) -> None:
    (packages / "sums.py").write_text(SUMS.replace('if reply == "raise":', "if True:"))
    with pytest.raises(DataError, match=r"an empty reply cannot be scored in \d+ of \d+ tasks, .* a fault of the rew"):
        made().rehearse()


@pytest.mark.parametrize(
    ("check", "why"),
    [
        ("self.data.answer != '3'", r"validate\(\), fails 1 of 12 tasks, such as train row \d+: it returns False"),
        ("await asyncio.sleep(600 * (self.data.answer == '3'))", r"validate\(\), does not end for 1 of 12 .* longer"),
        ("self.data.answer != '3' or os._exit(9)", r"validate\(\), does not end for 1 of 12 tasks, .* exit code 9"),
    ],
)
def test_tasks_that_fail_their_own_check_are_named(
    packages: Path, made: Callable[..., VerifiersEnv], check: str, why: str
) -> None:
    validate = f"    async def validate(self):\n        return {check}\n\n    @vf.reward\n"
    (packages / "sums.py").write_text(SUMS.replace("    @vf.reward\n", validate))
    env = made(held_out=0.0, score_seconds=0.3)
    assert len(list(env.all_tasks())) == 12
    with pytest.raises(DataError, match=why):
        env.rehearse()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"args": "[1]"}, "env.args=.* is not a mapping: write env.args={num_tasks: 100}"),
        ({"split": "validation"}, "must be train or test"),
        ({"max_turns": 2}, "see one reply a task"),
    ],
)
def test_settings_that_cannot_work_are_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        VerifiersSettings(id="sums", **given)


@pytest.mark.usefixtures("packages")
def test_the_settings_reach_the_package() -> None:
    words = ["env=verifiers", "env.id=sums", "env.args={count: 4}", f"env.python={sys.executable}", "env.tasks=3"]
    with closing(build_env(compose(TRAIN_GRPO, words).settings.env)) as env:
        assert isinstance(env, VerifiersEnv)
        assert len(env.taskset.rows) == 3


def test_a_training_resumes_where_it_stopped_and_leaves_nothing_running(packages: Path, tmp_path: Path) -> None:
    (packages / "sums.py").write_text(SUMS.replace("reply == self.data.answer", "sum(map(ord, reply)) % 101"))
    words = ["model=tiny", "model.autocast=none", "policy=transformers", "env=verifiers", "env.id=sums"]
    words += ["prompts_per_step=2", "group_size=2", "env.max_completion_tokens=4", "eval.every=0", "optim.lr=1e-4"]
    for folder, steps, resume in (("whole", 3, None), ("parts", 2, None), ("parts", 3, "auto")):
        assert train_in(TRAIN_GRPO, tmp_path / folder, [*words, f"steps={steps}"], resume) == 0
        assert not children()
    lines = [metrics(tmp_path / folder) for folder in ("whole", "parts")]
    whole, parts = ([line["reward/mean"] for line in each if "reward/mean" in line] for each in lines)
    assert whole == parts
    assert len(set(whole)) == 3  # rewards of different replies to different tasks
