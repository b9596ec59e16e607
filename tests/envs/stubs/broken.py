"""A class as TRL takes it, whose methods get other bodies in the tests."""

import threading

GATE = threading.Event()


class Broken:
    def reset(self, **columns):
        return ""  # body of reset

    def use(self, word: str) -> str:
        """Use a word.

        Args:
            word: any word
        """
        return word  # body of use

    def get_reward(self):
        return 1.0  # body of get_reward
