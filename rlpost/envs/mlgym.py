"""MLGym: machine learning tasks solved at the shell of a container, a command a turn.

MLGym is https://github.com/facebookresearch/MLGym, which is on no package index.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rlpost.envs.text_game import TextGameEnv
from rlpost.errors import MissingExtraError

INSTALL = "pip install git+https://github.com/facebookresearch/MLGym"
SYSTEM_PROMPT = (
    "You solve a machine learning task at the shell of a Linux machine. In each turn you may think first; then write "
    "the one command to run, alone in a block that begins and ends with a line of three backticks. You are shown what "
    "it prints."
)
START_SECONDS = 3600.0  # a container is made, and its baseline may be trained
STEP_SECONDS = 3900.0  # MLGym ends a command after an hour by itself

_BLOCK = re.compile(r"^```[^\n`]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
_SCORE = r"{} Score: *\{{ *['\"][^'\"]*['\"] *: *([-+0-9.eE]+|[-+]?inf|nan) *[,}}]"
_BASELINE, _EVALUATION = (re.compile(_SCORE.format(name)) for name in ("Baseline", "Evaluation"))


class MLGymWrapper(TextGameEnv):
    """Conversations with environments of MLGym's interface, each made by `make`.

    That is `reset(seed=)` -> (observation, info) and `step(command)` -> (observation, reward, done, info).
    A move is what stands in the reply's last block of three backticks; a reply without one earns
    `reward_wrong_format` and runs nothing. A move whose output tells both scores earns the evaluation's minus
    the baseline's, on top of what the step itself rewards. Other arguments are `TextGameEnv`'s, with the values below
    unless they are given.
    """

    def __init__(self, make: Callable[[], Any], *, reward_wrong_format: float | None = None, **game: Any) -> None:
        own = {
            "name": "MLGym",
            "system_prompt": SYSTEM_PROMPT,
            "prompt_template": "{observation}",
            "start_seconds": START_SECONDS,
            "step_seconds": STEP_SECONDS,
            "replays": False,
        }
        super().__init__(
            make,
            show=_shown,
            parse=_command,
            earned=score_above_baseline,
            invalid_reward=reward_wrong_format or 0.0,
            **{**own, **game},
        )


def make_mlgym(
    *,
    task: str | None = None,
    tasks: Sequence[str] | None = None,
    tokenizer: Any = None,
    reward_wrong_format: float | None = None,
    max_steps: int = 10,
    device: str = "cpu_0",
    container_type: str = "docker",
    **game: Any,
) -> MLGymWrapper:
    """MLGym's `task`, or one of `tasks` each episode, chosen by the seed of its start.

    `device` and `container_type` (docker or podman) are MLGym's. Other arguments are `MLGymWrapper`'s. Raises
    MissingExtraError without MLGym.
    """
    names = [task] if task is not None else list(tasks or [])
    require_mlgym()
    makers = [partial(_made, name, max_steps, device, container_type) for name in names]
    return MLGymWrapper(
        partial(_OneOf, makers),
        reward_wrong_format=reward_wrong_format,
        tokenizer=tokenizer,
        max_steps=max_steps,
        name=f"MLGym {', '.join(names)}",
        **game,
    )


def require_mlgym() -> None:
    """Raise MissingExtraError unless MLGym is there; says so where another project of that name is instead."""
    if importlib.util.find_spec("mlgym") is not None and importlib.util.find_spec("mlgym.environment") is not None:
        return
    raise MissingExtraError(f"make_mlgym needs facebookresearch's MLGym, not the package mlgym of the index: {INSTALL}")


def score_above_baseline(observation: Any, reward: float) -> float:
    """`reward`, and the evaluation's score minus the baseline's where an observation tells both."""
    text = observation if isinstance(observation, str) else ""
    baseline, evaluation = _BASELINE.search(text), _EVALUATION.search(text)
    if baseline is None or evaluation is None:
        return float(reward)
    return float(reward) + float(evaluation.group(1)) - float(baseline.group(1))


def _shown(game: Any, observation: Any, info: Any) -> str:
    """The output of a command; before the first one, the description of the task."""
    if isinstance(observation, dict):
        observation = observation.get("observation")
    if observation is not None:
        return str(observation).strip() or "(It printed nothing.)"
    arguments = getattr(game, "task_args", None)
    return str(getattr(arguments, "description", None) or "Begin.").strip()


def _command(game: Any, text: str) -> str:
    blocks = [block.strip() for block in _BLOCK.findall(text + "\n")]
    if not blocks or not blocks[-1]:
        raise ValueError("write the command to run in a block that begins and ends with a line of three backticks")
    return blocks[-1]


def _made(task: str, max_steps: int, device: str, container_type: str) -> Any:
    """MLGym's environment of a task, which is registered with it first."""
    import gymnasium
    from mlgym import CONFIG_DIR  # type: ignore[import-not-found]
    from mlgym.environment.env import EnvironmentArguments  # type: ignore[import-not-found]
    from mlgym.environment.registration import register_task  # type: ignore[import-not-found]

    arguments = EnvironmentArguments(
        task_config_path=f"tasks/{task}.yaml",
        max_steps=max_steps,
        seed=42,
        container_type=container_type,
        verbose=False,
        aliases_file=str(Path(CONFIG_DIR).parent / "docker" / "aliases.sh"),
    )
    if f"mlgym/{arguments.task.id}" not in gymnasium.registry:
        register_task(arguments)
    return gymnasium.make(f"mlgym/{arguments.task.id}", devices=[device]).unwrapped  # its step gives four values


class _OneOf:
    """An environment of one of several tasks, the one that the seed of `reset` falls on."""

    env: Any = None

    def __init__(self, makers: Sequence[Callable[[], Any]]) -> None:
        self._makers = makers

    @property
    def task_args(self) -> Any:
        """The description of the task."""
        return getattr(self.env, "task_args", None)

    def reset(self, *, seed: int) -> Any:
        self.env = self._makers[seed % len(self._makers)]()
        return self.env.reset(seed=seed)

    def step(self, action: str) -> Any:
        return self.env.step(action)

    def close(self) -> None:
        if self.env is not None:
            self.env.close()
