"""A class as TRL takes it."""


class Counter:
    def __init__(self):
        self.value, self.goal = 0, 0

    def reset(self, **columns):
        self.value, self.goal = 0, columns["goal"]
        return f" Counter: {self.value}."

    def increment(self, step: int) -> int:
        """Add to the counter.

        Args:
            step: added
        """
        self.value += step
        return self.value

    def _hidden(self):
        raise AssertionError

    @property
    def never(self):
        raise AssertionError("properties are not looked at")

    def get_reward(self):
        return float(self.value == self.goal)
