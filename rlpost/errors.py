"""Every error rlpost raises on purpose.

RlpostError                     the base the command line catches
├── ConfigError(ValueError)     exit 2  visible in the command or the configuration
├── DataError(ValueError)       exit 3  found in a dataset, a file or a row
├── MissingExtraError(ImportError)  exit 3  an optional dependency is not installed
├── CheckpointError(RuntimeError)   exit 3  a run folder or checkpoint cannot be read or written
├── ResourceError(RuntimeError)     exit 3  the machine has too little memory or disk for what was asked
├── RewardError                 exit 3  a reward raised, hung or returned something other than a number
├── WatcherError                exit 3  a plugin's watcher raised
├── SandboxError(RuntimeError)  exit 3  programs cannot be isolated from this machine
├── DivergedError               exit 4  a guard stopped the run: a loss or gradient is not finite
├── PolicyError(RuntimeError)   exit 5  the sampling engine failed, or its weights could not be pushed
├── ToolError(RuntimeError)     exit 5  a tool's server or browser cannot be started or does not respond
└── RankError(RuntimeError)     exit 5  another rank of the training did not respond or was lost

Anything else that reaches the terminal is a bug and keeps its traceback.
A message says what is wrong, where, and the one thing to do.
"""

from __future__ import annotations

import signal

STOPPED_BY = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}  # exit codes after a signal


class RlpostError(Exception):
    """Base of every deliberate error; `exit_code` is what the process ends with."""

    exit_code = 1


class ConfigError(RlpostError, ValueError):
    """A setting, option or combination that cannot work."""

    exit_code = 2


class DataError(RlpostError, ValueError):
    """A dataset, file or row that cannot be used; the message names file, row and field."""

    exit_code = 3


class MissingExtraError(RlpostError, ImportError):
    """An optional dependency that this command needs and that is not installed."""

    exit_code = 3

    @classmethod
    def of(cls, package: str, extra: str, needed_for: str) -> MissingExtraError:
        """The error for a missing `package`, with the command that installs it."""
        return cls(f"{needed_for} needs {package}, which is not installed: pip install 'rlpost[{extra}]'")


class CheckpointError(RlpostError, RuntimeError):
    """A run folder or checkpoint that cannot be read or written."""

    exit_code = 3


class ResourceError(RlpostError, RuntimeError):
    """The machine has less memory or disk than the work needs at least; nothing was loaded."""

    exit_code = 3


class RewardError(RlpostError):
    """A reward function that raised, hung or returned something other than a finite number."""

    exit_code = 3


class WatcherError(RlpostError):
    """A watcher of a plugin that raised, and is not registered as optional."""

    exit_code = 3


class SandboxError(RlpostError, RuntimeError):
    """A model's programs cannot be isolated from this machine, so they are not run."""

    exit_code = 3


class DivergedError(RlpostError):
    """A guard stopped training: going on would only destroy the weights."""

    exit_code = 4


class PolicyError(RlpostError, RuntimeError):
    """The sampling engine failed, or a weight push did not wholly succeed."""

    exit_code = 5


class ToolError(RlpostError, RuntimeError):
    """A tool's server or browser cannot be started or does not respond."""

    exit_code = 5


class RankError(RlpostError, RuntimeError):
    """Another rank of the training did not reach a collective operation in time, or was lost."""

    exit_code = 5


def named(error: BaseException) -> str:
    """An exception on one line, such as `KeyError: 'x'`; a ConfigError without its class."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ConfigError) else f"{type(error).__name__}: {text}".removesuffix(": ")
