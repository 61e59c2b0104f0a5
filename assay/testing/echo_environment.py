"""Echo environment: every turn is answered with its length and paid for it; loads nothing, for the zoo and the tests."""

from collections.abc import Mapping

TURNS = 3


class Echo:
    """An episode of three turns."""

    tools = ()

    def reset(self, seed: int) -> list[dict[str, str]]:
        self.turns = 0
        return [{"role": "user", "content": f"say {seed}"}]

    def step(self, message: Mapping[str, str]) -> tuple[list[dict[str, str]], float, bool]:
        self.turns += 1
        length = len(message["content"])
        return [{"role": "user", "content": f"{length} letters"}], length / 10, self.turns == TURNS


class FailingEcho(Echo):
    """A turn of a third of all lengths is an error."""

    def step(self, message: Mapping[str, str]) -> tuple[list[dict[str, str]], float, bool]:
        if len(message["content"]) % 3 == 0:
            raise RuntimeError("the service did not answer")
        return super().step(message)
