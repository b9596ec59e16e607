"""A game of TextArena behind the general adapter; skipped where TextArena is not installed."""

from __future__ import annotations

from typing import Any

import pytest

from rlpost.data.conversation import Completion, Conversation
from rlpost.envs import TextGameEnv

textarena = pytest.importorskip("textarena")


class OnePlayer:
    """A one-player game of TextArena with gymnasium's methods; it shows what is new since the last move alone."""

    def __init__(self, game: str) -> None:
        self.game = textarena.make(game)
        self.seen = ""

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.game.reset(num_players=1, seed=seed)
        return self._news(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        done, info = self.game.step(action=action)
        if not done:
            return self._news(), 0.0, False, False, info
        rewards, _ = self.game.close()
        return "", float(rewards[0]), True, False, info

    def _news(self) -> str:
        _, shown = self.game.get_observation()
        news, self.seen = shown[len(self.seen) :], shown
        return news.strip()


def guess_the_number() -> OnePlayer:
    return OnePlayer("GuessTheNumber-v0")


def search(env: TextGameEnv, conversation: Conversation) -> None:
    """Play by halving what is left of 1 to 20."""
    low, high = 1, 20
    while not conversation.done:
        guess = (low + high) // 2
        conversation.add_completion(Completion([1], [0.0], f"I try [{guess}].", "stop", 0))
        env.advance([conversation])
        told = conversation.messages[-1]["content"]
        low, high = (guess + 1, high) if "higher" in told else (low, guess - 1)


def test_a_number_is_guessed_in_conversation_with_the_game() -> None:
    env = TextGameEnv(
        guess_the_number, name="GuessTheNumber", success_return=1.0, num_envs=8, prompt_template="{observation}"
    )
    conversations = env.draw()
    assert all("between 1 and 20 within 10 turns" in conversation.query for conversation in conversations)
    for conversation in conversations:
        search(env, conversation)
    assert [c.reward for c in conversations] == [1.0] * 8
    assert all(c.terminated and c.valid and c.accuracy_strict == 1.0 for c in conversations)
    assert len({c.turns for c in conversations}) > 1  # their numbers differ
    answered = [message["content"] for message in conversations[0].messages[2::2]]
    assert all("The target number is" in text and "You are Player" not in text for text in answered)
    env.close()


def test_a_game_under_way_goes_on_after_it_was_saved() -> None:
    env = TextGameEnv(guess_the_number, seed=1)
    conversation = env.draw()[0]
    conversation.add_completion(Completion([1], [0.0], "[1]", "stop", 0))
    env.advance([conversation])
    resumed = TextGameEnv(guess_the_number, seed=1)
    search(resumed, conversation)
    assert (conversation.reward, conversation.valid) == (1.0, True)
