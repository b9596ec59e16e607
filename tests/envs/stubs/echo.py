"""A class as TRL takes it, with async methods."""


class Echo:
    def reset(self, **columns):
        self.said = []

    async def echo(self, message: str) -> str:
        """Say a message back.

        Args:
            message: the text to repeat
        """
        self.said.append(message)
        return message

    async def get_reward(self):
        return len("".join(self.said)) / 10
