"""The tools a model may use while it answers."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum

from rlpost.errors import ConfigError
from rlpost.nearest import did_you_mean, nearest
from rlpost.settings.checks import Settings, limited
from rlpost.settings.code import PROGRAM, SANDBOX
from rlpost.settings.env import EnvSettings
from rlpost.settings.registered import TOOLS

BUILT_IN_TOOLS = ("python", "mcp", "browser")


class ToolRole(Enum):
    """The role of the message that answers a call."""

    user = "user"
    tool = "tool"  # for models whose chat template has it


class PythonSandbox(Enum):
    """How the model's Python programs are kept apart from this machine."""

    bubblewrap = "bubblewrap"  # no network, none of its files, another user
    limits = "limits"  # memory, time and processes alone: a program can read and write what you can


@dataclass
class ToolsSettings(Settings, group="tools"):
    """Tools for environments of several turns: `tools.use=python env.max_turns=2`.

    Names are `python`, `mcp`, `browser` and those that a plugin registers.
    """

    use: list[str] = field(default_factory=list)  # python, mcp, browser, or what a plugin registers
    describe: bool = True  # show the functions as the chat template does; false: env.system_prompt says what to call
    role: ToolRole = ToolRole.user  # of the messages that answer calls
    max_calls: int | None = limited(None, at_least=1)  # in a conversation; null: as many as its turns hold
    max_calls_per_turn: int | None = limited(8, at_least=1)  # further ones in a reply are refused; null: no limit
    max_output_chars: int = limited(2000, at_least=100)  # shown of an answer; the middle of a longer one is left out
    timeout_seconds: float = limited(10.0, above=0)  # of each call
    python_sandbox: PythonSandbox = field(default=PythonSandbox.bubblewrap, metadata=SANDBOX)  # limits: weaker
    python_persistent: bool = False  # true: variables last from turn to turn
    python_memory_mb: int = limited(512, at_least=64)  # of one program
    mcp_file: str | None = field(
        default=None, metadata=PROGRAM
    )  # JSON file with the servers, {"mcpServers": {name: {"command": ..., "args": [...]}}}
    allowed_domains: list[str] = field(default_factory=list)  # that the browser may visit, with all below them

    def __post_init__(self) -> None:
        super().__post_init__()
        known = [*BUILT_IN_TOOLS, *TOOLS]
        for name in self.use:
            if name not in known:
                hint = did_you_mean(nearest(name, known), f"there are {', '.join(known)}")
                raise ConfigError(f"tools.use names {name}, which is no tool{hint}")
        if len(set(self.use)) < len(self.use):
            raise ConfigError(f"tools.use={self.use} names a tool twice: name each once")
        if "mcp" in self.use and self.mcp_file is None:
            raise ConfigError("tools.use=mcp needs tools.mcp_file, the JSON file that names the servers")
        if "browser" in self.use and not self.allowed_domains:
            raise ConfigError("tools.use=browser may visit nothing: name tools.allowed_domains=example.org")
        self._check_unused()

    def _check_unused(self) -> None:
        """Raise ConfigError for a setting of a tool that is not used."""
        belongs = {"mcp_file": "mcp", "allowed_domains": "browser"}
        for each in fields(self):
            if each.name == "use":
                continue
            tool = belongs.get(each.name, "python" if each.name.startswith("python_") else None)
            changed = getattr(self, each.name) != (each.default_factory() if each.name in LISTS else each.default)  # type: ignore[misc]
            if changed and (tool not in self.use if tool else not self.use):
                needed = tool or "python, for example"
                raise ConfigError(f"tools.{each.name} means nothing without its tool: add tools.use={needed}")

    def told(self, env: EnvSettings) -> list[str]:
        """A line of a plan where a conversation has several turns: how many, and with which tools."""
        if env.max_turns == 1:
            return []
        using = f", tools {', '.join(self.use)}" if self.use else ""
        return [f"turns   at most {env.max_turns} a conversation{using}"]


LISTS = ("allowed_domains",)


def check_turns(env: EnvSettings, tools: ToolsSettings) -> None:
    """Raise ConfigError for tools in an environment of one turn: their answers would never be read."""
    if isinstance(env, EnvSettings) and tools.use and env.max_turns < 2:
        raise ConfigError(
            f"tools.use=[{', '.join(tools.use)}] with env.max_turns={env.max_turns} leaves no turn in which an answer "
            "is read: add env.max_turns=2 or more"
        )
