"""Environments of an OpenEnv server, spoken to over its WebSocket: one conversation an episode."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit, urlunsplit
from urllib.request import ProxyHandler, build_opener

from rlpost.data.conversation import CUT, Conversation, Message
from rlpost.envs.base import ToolCall, ToolResult, ToolTransform
from rlpost.envs.chat import Task
from rlpost.envs.endless import EndlessEnv, EndlessProblems
from rlpost.envs.openenv_actions import INVALID, ActionForm, is_of_tools, observation_text, tool_failure, tools_of
from rlpost.envs.openenv_sessions import LARGEST_FRAME, LOCAL, UNLIKE, Answer, Episode, Rules, Sessions
from rlpost.envs.text_game import Starts, score_of_episode, text_of_action
from rlpost.envs.tool_calls import together
from rlpost.errors import ConfigError, DataError, ToolError
from rlpost.imports import require
from rlpost.rewards.score import Score
from rlpost.settings import EnvSettings
from rlpost.settings.foreign import RESET_EXAMPLE
from rlpost.settings.model import mapping_in
from rlpost.text import first_line

PROMPT = "{form} Write your next action between <action> and </action>.\n\n{observation}"
TOOLS_PROMPT = "You act by calling tools.\n\n{observation}"


class OpenEnv(EndlessEnv):
    """An episode of an OpenEnv environment a conversation: the first observation is the prompt, each reply an action.

    A task has `start`, the seed of `reset`, and once its conversation begins also `observation` and `form`, how an
    action is written. The actions of an MCP environment are calls of its tools, which are offered as rlpost's tools
    are. The reward is the sum of what all steps earn, and `invalid_reward` for each reply that is not an action; an
    episode whose steps all have no reward is invalid. With `success_return` one that earns so much counts as accurate.

    The episodes of a group begin alike, and no seed is in both splits. A failure of the server makes the conversation
    invalid. A saved conversation goes on by playing its actions again in a fresh session; if the server then shows
    another text than the model has read, the conversation is invalid. `sessions` is how many sessions are open at once
    (None: as many as conversations). Other arguments are `DatasetChatEnv`'s.
    """

    max_reward = None
    has_accuracy = False
    tool_role_follows = True

    def __init__(
        self,
        url: str,
        *,
        reset: Mapping[str, Any] | None = None,
        sessions: int | None = None,
        success_return: float | None = None,
        invalid_reward: float = 0.0,
        start_seconds: float = 60.0,
        step_seconds: float = 30.0,
        max_steps: int | None = 10,
        **chat: Any,
    ) -> None:
        super().__init__(max_steps=max_steps, **chat)
        parts = urlsplit(url)
        path = parts.path.rstrip("/").removesuffix("/ws")
        secure = parts.scheme in ("wss", "https")
        self.url = urlunsplit(("wss" if secure else "ws", parts.netloc, f"{path}/ws", "", ""))
        self._schema_url = urlunsplit(("https" if secure else "http", parts.netloc, f"{path}/schema", "", ""))
        self.max_sessions = sessions
        self.success_return = success_return
        self.invalid_reward = invalid_reward
        self.rules = Rules(dict(reset or {}), start_seconds, step_seconds, observation_text)
        self.form: ActionForm | None = None  # of actions; None for tools, and before the server is asked
        self.server_tools: ServerTools | None = None
        self.sessions: Sessions | None = None
        self.episodes: dict[tuple[int, int], Episode] = {}  # in progress, by the keys of their conversations
        self._first: Task = {}  # a task whose observation is known

    @classmethod
    def arguments_of(cls, settings: EnvSettings) -> dict[str, Any]:
        """See `DatasetChatEnv.arguments_of`."""
        own = super().arguments_of(settings)
        return {**own, "reset": mapping_in("env.reset", own["reset"], RESET_EXAMPLE)}

    # Beginning

    def start(self) -> None:
        """See `DatasetChatEnv.start`; asks the server for its actions, and begins one seed twice.

        Raises MissingExtraError without websockets, ToolError for a server that does not answer, DataError for one
        whose seeds do not hold.
        """
        try:
            if self.sessions is None:
                require("websockets", "openenv", "env=openenv")
                self.sessions = Sessions.of(self.url, self.max_sessions)
                self._learn_actions()
                self.look()
            super().start()
        except BaseException:
            self.close()
            raise

    def open_rows(self, seed: int) -> Seeds:
        """See `DatasetChatEnv.open_rows`."""
        return Seeds(self, seed)

    def close(self) -> None:
        """See `EnvBase.close`: the sessions are closed unless another environment of this process uses them."""
        super().close()
        if self.sessions is not None:
            self.abandon()
            self.sessions.leave()
            self.sessions = None

    def abandon(self, conversations: Sequence[Conversation] | None = None) -> None:
        """See `EnvBase.abandon`."""
        super().abandon(conversations)
        self._end(list(self.episodes) if conversations is None else [each.key for each in conversations])

    def _learn_actions(self) -> None:
        """Read from the server how actions are written, or which tools it has."""
        self.form = self._form()
        if self.form is not None:
            self.rules = replace(self.rules, refusal=self.form.refusal)
            if self.tools is not None:
                raise ConfigError(f"{self.url} takes actions and not calls of tools: leave out tools.use")
        elif self.server_tools is None:
            self.server_tools = ServerTools(self, self._listed())
            self.append_transform(self.server_tools)
        self.prompt_template = self.prompt_template or (PROMPT if self.form else TOOLS_PROMPT)

    def _form(self) -> ActionForm | None:
        """How the server's actions are written; None if they are calls of tools. Raises ToolError without a schema."""
        near = urlsplit(self._schema_url).hostname in LOCAL
        opener = build_opener(*([ProxyHandler({})] if near else []))
        try:
            with opener.open(self._schema_url, timeout=self.rules.start_seconds) as answer:
                schema = json.loads(answer.read(LARGEST_FRAME))["action"]
            return None if is_of_tools(schema) else ActionForm.of(schema)
        except (OSError, HTTPException, ValueError, TypeError, LookupError, AttributeError) as error:
            why = f"GET {self._schema_url} gives no schema of actions ({first_line(error)})"
            raise ToolError(f"{why}: start the OpenEnv server, or correct env.url") from error

    def _listed(self) -> list[dict[str, Any]]:
        """The tools that an MCP environment lists. Raises DataError if there are none."""
        episode = Episode(self.rules, 0)
        [answer] = self._sessions.run(self._sessions.look(episode, {"type": "list_tools"}))
        try:
            tools = tools_of(answer.observation)
        except (LookupError, TypeError):
            tools = []
        if not tools:
            raise DataError(f"{self.url} takes calls of tools and lists none: {episode.text[:200]}")
        return tools

    # Looking at a server

    def look(self) -> None:
        """Begin one seed in two sessions. Raises DataError if they begin differently, ToolError if one cannot."""
        start = EndlessProblems.at(Seeds(self, self.seed), 0)["start"]
        text, again = self._begin_at(start), self._begin_at(start)
        if text != again:
            raise DataError(
                f"{self.url}: two sessions that were reset with the seed {start} begin differently ({text[:80]!r} and "
                f"{again[:80]!r}), so no group has one task: let the environment's reset use its seed"
            )
        self._first = {"start": start, "observation": text, "form": self.form.text if self.form else ""}

    def _begin_at(self, start: int) -> str:
        """The first observation of a seed. Raises ToolError."""
        episode = Episode(self.rules, start)
        self._sessions.run(self._sessions.look(episode))
        return episode.text

    def rehearse(self) -> list[str]:
        """See `EnvBase.rehearse`: begins episodes, and acts once where the schema gives an action."""
        self.start()
        [conversation] = self.draw(1)
        task, prompt = conversation.task, conversation.messages[-1]["content"]
        lines = [f"{self.url} begins alike in two sessions with the seed {task['start']}"]
        lines += ["the first prompt:", *(f"  {line}" for line in prompt.splitlines())]
        episode = self.episodes[conversation.key]
        if self.form is None:
            names = [schema["function"]["name"] for schema in conversation.tools]
            return [*lines, f"the actions are calls of {', '.join(names)}"]
        if (action := self.form.example()) is None:
            return [*lines, "its schema gives no example of an action: none is played"]
        [answer] = self.play((episode, action))
        if episode.error is not None:
            raise DataError(f"the action {self.form.written(action)} fits the schema and fails: {episode.error}")
        earned = "null" if answer is None or answer.reward is None else f"{answer.reward:g}"
        return [*lines, f"the action {self.form.written(action)} earns {earned} and shows:", f"  {episode.text}"]

    @property
    def _sessions(self) -> Sessions:
        assert self.sessions is not None, "the environment has not been started"
        return self.sessions

    # Conversations

    def opening_messages(self, task: Mapping[str, Any]) -> list[Message]:
        """See `ChatEnv.opening_messages`; asks the server for the observation of a task that has not begun."""
        return super().opening_messages(self._seen(task))

    def hint_about(self, task: Mapping[str, Any]) -> str | None:
        """See `ChatEnv.hint_about`."""
        return super().hint_about(self._seen(task))

    def begun(self, task: Mapping[str, Any]) -> Conversation:
        """See `ChatEnv.begun`; its episode begins with the first reply."""
        return super()._opened([self._conversation(self._seen(task), 0, 0)])[0]

    def _seen(self, task: Mapping[str, Any]) -> Mapping[str, Any]:
        if "observation" in task:
            return task
        if self._first["start"] != task["start"]:
            self._first = {**self._first, "start": task["start"], "observation": self._begin_at(task["start"])}
        return self._first

    def _conversation(self, task: Mapping[str, Any], group: int, sample: int) -> Conversation:
        # written again by `_opened`, which begins the episodes of all draws at the same time
        return super()._conversation({"observation": "", "form": "", **task}, group, sample)

    def _opened(self, conversations: list[Conversation]) -> list[Conversation]:
        """Begin the episodes, all at the same time, and write their first messages; those of a group begin alike.

        A group whose episodes all fail has an empty observation. Raises ToolError if no episode of any group begins.
        """
        self._end([conversation.key for conversation in conversations])
        begun = [Episode(self.rules, conversation.task["start"]) for conversation in conversations]
        self.episodes |= {each.key: episode for each, episode in zip(conversations, begun, strict=True)}
        self.play(*((episode, None) for episode in begun))
        texts: dict[int, str] = {}  # of groups
        for conversation, episode in zip(conversations, begun, strict=True):
            if episode.done and episode.error is None:
                episode.error = f"{self.url}: reset begins an episode that is over"
            if episode.error is None and texts.setdefault(conversation.group_id, episode.text) != episode.text:
                episode.error = f"{self.url}: reset does not always begin alike with the seed {episode.seed}"
        if begun and not texts:
            self._end([conversation.key for conversation in conversations])
            raise ToolError(f"no episode can be begun: {begun[0].error}")
        for conversation, episode in zip(conversations, begun, strict=True):
            observation = texts.get(conversation.group_id, "")
            conversation.task = {**self._first, "start": episode.seed, "observation": observation}
            conversation.messages = self.opening_messages(conversation.task)
            conversation.hint = self.hint_about(conversation.task)
        return super()._opened(conversations)

    def _end(self, keys: Sequence[tuple[int, int]]) -> None:
        ended = [self.episodes.pop(key) for key in keys if key in self.episodes]
        if ended and self.sessions is not None:
            self.sessions.free(ended)

    # Going on

    def play(self, *moves: tuple[Episode, dict[str, Any] | None]) -> list[Answer | None]:
        """Play an action in each episode, all at the same time; see `Sessions.play`."""
        return self._sessions.run(*(self._sessions.play(episode, action) for episode, action in moves))

    def respond(self, conversations: Sequence[Conversation]) -> None:
        """See `EnvBase.respond`: all episodes move at the same time."""
        together(self._play_again, [each for each in conversations if not self._in_progress(each)])
        moves: list[tuple[Episode, dict[str, Any] | None]] = []
        for conversation in conversations:
            episode = self.episodes[conversation.key]
            episode.turns = conversation.turns
            if self.form is not None and conversation.finish_reason not in CUT and episode.error is None:
                moves += self._moves(self.form, episode, conversation.reply)
        self.play(*moves)
        if self.tools is not None:  # a call of the last turn earns, though its answer is not read
            self.tools.answer([each for each in conversations if self._was_last(each)])
        super().respond(conversations)

    def _moves(self, form: ActionForm, episode: Episode, reply: str) -> list[tuple[Episode, dict[str, Any] | None]]:
        """The reply's action, to be played in the episode; none if it is not an action, which the episode then says."""
        try:
            return [(episode, form.parse(text_of_action(reply)))]
        except ValueError as error:
            episode.text, episode.invalid = f"{INVALID}: {error}", episode.invalid + 1
            return []

    def _in_progress(self, conversation: Conversation) -> bool:
        """Whether the conversation has an episode that is at its turn."""
        turns = conversation.turns - (conversation.finish_reason != "context")  # for which there was no reply
        episode = self.episodes.get(conversation.key)
        return episode is not None and (episode.seed, episode.turns) == (conversation.task["start"], turns)

    def _play_again(self, conversation: Conversation) -> None:
        """Begin an episode for the conversation, and play its earlier turns; the model has to have read the same."""
        self._end([conversation.key])
        episode = Episode(self.rules, conversation.task["start"], shown=[conversation.task["observation"]])
        self.episodes[conversation.key] = episode
        for alike in self._turns_again(conversation, episode):
            if episode.error is None and (episode.done or not alike):
                episode.error = f"{self.url}: {UNLIKE}"
            if episode.error is not None:
                return

    def _turns_again(self, conversation: Conversation, episode: Episode) -> Iterator[bool]:
        """Play each earlier action or call in the episode: whether it is answered as it was."""
        if self.form is not None:
            messages = conversation.messages[conversation.opening :]
            replies = [message["content"] for message in messages if message["role"] == self.policy_role]
            answers = [message["content"] for message in messages if message["role"] == self.user_role]
            for reply, answer in zip(replies, answers, strict=False):
                self.play(*self._moves(self.form, episode, reply))
                yield episode.text == answer
        else:
            assert self.tools is not None
            assert self.server_tools is not None
            for number, call, answer in self.tools.answered_calls(conversation):
                if self.server_tools.takes(call.name):
                    result = self.server_tools.call(conversation, call)
                    yield self.tools.differs(answer, self.server_tools, number, call, result) is None

    def conclude(self, conversations: Sequence[Conversation]) -> None:
        """See `EnvBase.conclude`: the sessions are free for other episodes."""
        super().conclude(conversations)
        self._end([conversation.key for conversation in conversations])

    def _answer(self, conversation: Conversation) -> None:
        """End the conversation if its episode is over, else show the server's text."""
        episode = self.episodes[conversation.key]
        if episode.error is not None:
            conversation.truncated = True
        elif episode.done:
            conversation.terminated = True
        elif self.form is None:
            super()._answer(conversation)
        elif self._was_last(conversation):
            conversation.truncated = True
        else:
            conversation.messages.append({"role": self.user_role, "content": episode.text})

    def score(self, conversation: Conversation) -> Score:
        """The sum of the steps' rewards; an error if the server failed, or gave no step a reward."""
        episode = self.episodes[conversation.key]
        error, steps = episode.error, len(episode.actions)
        if error is None and steps and not episode.rewarded:
            error = f"{self.url}: none of the episode's {steps} steps has a reward (reward is null)"
        if error is not None:
            return Score(math.nan, valid=False, error=error)
        total = episode.total + self.invalid_reward * episode.invalid
        unset = steps - episode.rewarded
        return score_of_episode(total, self.success_return, invalid_actions=episode.invalid, unset_rewards=unset)


class ServerTools(ToolTransform):
    """The tools that a server lists; a call is a step of the conversation's own episode."""

    def __init__(self, env: OpenEnv, listed: list[dict[str, Any]]) -> None:
        self.env, self.listed = env, listed

    def schemas(self) -> list[dict[str, Any]]:
        """See `ToolTransform.schemas`."""
        return self.listed

    def call(self, conversation: Conversation, call: ToolCall) -> ToolResult:
        """See `ToolTransform.call`; a failure of the server becomes the episode's error, which ends it."""
        episode = self.env.episodes[conversation.key]
        if episode.done:
            return ToolResult("the episode is over", ok=False)
        action = {"type": "call_tool", "tool_name": call.name, "arguments": dict(call.arguments)}
        [answer] = self.env.play((episode, action)) if episode.error is None else [None]
        failure = None if answer is None else tool_failure(answer.observation)
        if failure == "transport_error":
            episode.error = f"the tool {call.name} failed: {episode.text}"
        return ToolResult(episode.error or episode.text, ok=answer is not None and failure is None)


class Seeds(Starts):
    """The seeds of episodes; the server is not asked."""

    def at(self, position: int) -> Task:
        """See `EndlessProblems.at`."""
        return EndlessProblems.at(self, position)

    def describe(self) -> str:
        """See `EndlessProblems.describe`; a server may have another address the next time."""
        return json.dumps(["openenv", dict(self.env.rules.reset)], sort_keys=True, default=str)
