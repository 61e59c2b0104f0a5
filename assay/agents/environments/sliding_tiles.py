"""Sliding tiles environment: 2048 on a small board. A move a turn, by a tool or in a word; the reward is how far the tiles grew."""

import math
import random
from collections.abc import Sequence

from assay.agents.environment import Answer, answer_tool_calls, call, tool
from assay.agents.tool_calls import ChatMessage, ToolCall
from assay.errors import UsageError

MOVES = ("left", "right", "up", "down")
Board = list[list[int]]


class SlidingTiles:
    """`size` squared places; the game ends at the tile `goal`, or where no move is left."""

    tools = (tool("move", "Slides all tiles.", direction={"type": "string", "enum": list(MOVES)}),)

    def __init__(self, size: int = 3, goal: int = 32):
        if not 2 <= size <= 6 or goal < 8 or goal & (goal - 1):
            raise UsageError(f"game: size {size} and goal {goal}; expected 2 to 6, and a power of two from 8 on")
        self.size, self.goal = size, goal

    def reset(self, seed: int) -> Sequence[ChatMessage]:
        self.chance, self.board = random.Random(seed), [[0] * self.size for _ in range(self.size)]
        self.best = 2
        for _ in range(2):
            self._drop()
        return [{"role": "user", "content": f"Slide the tiles until one is {self.goal}. Say left, right, up or down.\n"
                                            f"{drawn_board(self.board)}"}]

    def step(self, message: ChatMessage) -> Answer:
        if message.get("faults"):
            return answer_tool_calls(message, self.tools, {"move": self._move}), 0.0, self._over()
        if message.get("tool_calls"):
            answers = answer_tool_calls(message, self.tools, {"move": self._move})
        else:
            word = message["content"].strip().casefold()
            answers = [{"role": "user", "content": self._move(word) if word in MOVES else "Say left, right, up or down."}]
        return answers, self._grown(), self._over()

    def solution(self) -> Sequence[ToolCall | str]:
        return [call("move", direction=move) for move in MOVES]

    def _move(self, direction: str) -> str:
        moved = slid(self.board, direction)
        if moved == self.board:
            return f"nothing moves {direction}\n{drawn_board(self.board)}"
        self.board = moved
        self._drop()
        return drawn_board(self.board)

    def _grown(self) -> float:
        """The share of the way from 2 to the goal, in doublings, that the largest tile has gone since the turn before."""
        largest = max(map(max, self.board))
        gained = math.log2(largest / self.best) / math.log2(self.goal / 2) if largest > self.best else 0.0
        self.best = max(self.best, largest)
        return gained

    def _over(self) -> bool:
        return self.best >= self.goal or all(slid(self.board, move) == self.board for move in MOVES)

    def _drop(self) -> None:
        free = [(row, column) for row in range(self.size) for column in range(self.size) if not self.board[row][column]]
        row, column = self.chance.choice(free)
        self.board[row][column] = 2


def slid(board: Board, direction: str) -> Board:
    """Board with all tiles moved to one side, two equal neighbours becoming their sum once."""
    if direction in ("up", "down"):
        turned = slid([list(column) for column in zip(*board, strict=True)], "left" if direction == "up" else "right")
        return [list(row) for row in zip(*turned, strict=True)]
    if direction == "right":
        return [row[::-1] for row in slid([row[::-1] for row in board], "left")]
    return [_merged(row) for row in board]


def _merged(row: list[int]) -> list[int]:
    tiles, found = [tile for tile in row if tile], list[int]()
    while tiles:
        tile = tiles.pop(0)
        if tiles and tiles[0] == tile:
            tile += tiles.pop(0)
        found.append(tile)
    return found + [0] * (len(row) - len(found))


def drawn_board(board: Board) -> str:
    return "\n".join(" ".join(str(tile or ".") for tile in row) for row in board)
