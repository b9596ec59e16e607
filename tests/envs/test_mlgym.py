import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlpost.data.conversation import Completion, Conversation
from rlpost.envs import MLGymWrapper, make_mlgym
from rlpost.envs.mlgym import score_above_baseline

BASELINE = 0.25
TASK = "Find the slope that fits the points (1, 3) and (2, 6)."


class Fitting:
    """A small task with MLGym's interface: choose the slope that fits y = 3x, by commands.

    `set N` writes a slope down, `show` prints it, `validate` tells the scores and `submit` ends the episode.
    """

    def __init__(self) -> None:
        self.task_args = SimpleNamespace(description=TASK)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, None], dict[str, Any]]:
        assert seed is not None
        self.slope = 0.0
        return {"observation": None}, {}

    def step(self, action: str) -> tuple[str | None, int, bool, dict[str, Any]]:
        verb, _, argument = action.partition(" ")
        if verb == "set":
            self.slope = float(argument)
            return "", 0, False, {}
        if verb == "show":
            return f"slope = {self.slope:g}", 0, False, {}
        if verb == "validate":
            score = 1.0 - abs(self.slope - 3) / 3
            told = f"Baseline Score: {{'Score': {BASELINE}}}\nEvaluation Score: {{'Score': {score}}}"
            return f"Your code produced a valid submission artefact.\n{told}", 0, False, {}
        if verb == "submit":
            return "Exited (submit)", 0, True, {"exit_status": "submitted"}
        return f"{verb}: command not found", 0, False, {}

    def close(self) -> None:
        """Nothing is held."""


def say(env: MLGymWrapper, conversations: Sequence[Conversation], *replies: str) -> None:
    for conversation, reply in zip(conversations, replies, strict=True):
        conversation.add_completion(Completion([1], [0.0], reply, "stop", 0))
    env.advance(conversations)


def block(command: str) -> str:
    return f"I run this.\n```bash\n{command}\n```"


def test_commands_are_answered_by_what_they_print() -> None:
    env = MLGymWrapper(Fitting)
    conversation = env.draw()[0]
    assert [message["role"] for message in conversation.messages] == ["system", "user"]
    assert conversation.query == TASK
    say(env, [conversation], block("set 2"))
    assert "nothing" in conversation.messages[-1]["content"]
    say(env, [conversation], f"First ```ls```.\n{block('ls')}\nNo:\n{block('show')}")  # the last block
    assert conversation.messages[-1]["content"] == "slope = 2"


def test_an_evaluation_earns_what_it_is_above_the_baseline() -> None:
    env = MLGymWrapper(Fitting)
    conversation = env.draw()[0]
    for command in ("set 1.5", "validate", "submit"):
        say(env, [conversation], block(command))
    assert conversation.terminated
    assert conversation.reward == pytest.approx(0.5 - BASELINE)
    assert conversation.reward_parts == {"earned": pytest.approx(0.25), "invalid_actions": 0.0}


@pytest.mark.parametrize(
    ("observation", "earned"),
    [
        ("Baseline Score: {'Score': 0.5}\nEvaluation Score: {'Score': 0.75}", 1.25),
        ("Baseline Score: {'accuracy': 50.0, 'f1': 1}\nEvaluation Score: {'accuracy': -1e1, 'f1': 1}", -59.0),
        ("Baseline Score: {'Score': 0.5}", 1.0),  # a baseline alone says nothing of the model's work
        ("Evaluation Score: {'Score': 0.5}", 1.0),
        (None, 1.0),
    ],
)
def test_scores_are_read_out_of_what_is_printed(observation: str | None, earned: float) -> None:
    assert score_above_baseline(observation, 1) == earned


def test_a_reply_without_a_block_runs_nothing() -> None:
    env = MLGymWrapper(Fitting, reward_wrong_format=-0.5)
    conversation = env.draw()[0]
    say(env, [conversation], "set 3")
    assert "backticks" in conversation.messages[-1]["content"]
    say(env, [conversation], "```\n\n```")
    for command in ("show", "submit"):
        say(env, [conversation], block(command))
    assert conversation.messages[-2]["content"] == "slope = 0"
    assert (conversation.reward, conversation.reward_parts["invalid_actions"]) == (-1.0, 2.0)


def test_several_tasks_are_chosen_from_by_the_seed_of_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: dict[str, Any] = {}

    def arguments(task_config_path: str, **given: Any) -> Any:
        return SimpleNamespace(task=SimpleNamespace(id=Path(task_config_path).stem), given=given)

    def make(name: str, devices: list[str]) -> Any:
        assert devices == ["cpu_0"]
        given = registered[name].given
        assert (given["max_steps"], given["container_type"]) == (4, "podman")
        fitting = Fitting()
        fitting.task_args = SimpleNamespace(description=f"This is {name.removeprefix('mlgym/')}.")
        return SimpleNamespace(unwrapped=fitting)

    modules = {
        "gymnasium": SimpleNamespace(registry=registered, make=make),
        "mlgym": SimpleNamespace(CONFIG_DIR="mlgym/configs"),
        "mlgym.environment": SimpleNamespace(),
        "mlgym.environment.env": SimpleNamespace(EnvironmentArguments=arguments),
        "mlgym.environment.registration": SimpleNamespace(
            register_task=lambda made: registered.setdefault(f"mlgym/{made.task.id}", made)
        ),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("rlpost.envs.mlgym.require_mlgym", lambda: None)
    env = make_mlgym(tasks=["one", "two"], max_steps=4, container_type="podman", num_envs=20)
    conversations = env.draw()
    told = ["This is one.", "This is two."]
    assert [c.query for c in conversations] == [told[c.task["start"] % 2] for c in conversations]
    assert len({c.query for c in conversations}) == 2
