"""Detokenizing as ids arrive: they become characters once these can no longer change, and a stop string ends the text."""

from collections.abc import Sequence

from assay.model.tokenizer import Tokenizer

INCOMPLETE = "\ufffd"  # what a tokenizer shows for bytes that are not yet a character


class Detokenizer:
    """The text of one completion, special tokens left out. What might still become a stop string is held back."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]):
        self.tokenizer, self.stops = tokenizer, tuple(stops)
        self.ids: list[int] = []
        self.text, self.shown = "", 0
        self._anchor = self._read = 0  # ids before `_read` are in the text; decoding begins at `_anchor`, for spaces between tokens

    def feed(self, ids: Sequence[int]) -> int | None:
        """Detokenize more ids; returns None, or how many of them there are up to the one that completed a stop string, before which the
        text then ends."""
        old = len(self.ids)
        self.ids += ids
        before = self._decoded(self._anchor, self._read)
        new = self._decoded(self._anchor, len(self.ids))[len(before) :]
        if (at := self._found(self.text + new.rstrip(INCOMPLETE))) is not None:
            self.text = (self.text + new)[:at]
            return self._completed_by(old, at)
        if new and not new.endswith(INCOMPLETE):
            self.text += new
            self._anchor, self._read = self._read, len(self.ids)
        return None

    def take(self) -> str:
        """New text that can be shown now because it can no longer change."""
        held = max((n for stop in self.stops for n in range(1, len(stop)) if self.text.endswith(stop[:n])), default=0)
        return self._show(len(self.text) - held)

    def finish(self, stopped: bool) -> str:
        """The rest of the text. Without a stop string the text is exactly what the ids decode to."""
        if not stopped:
            self.text = self._decoded(0, len(self.ids))
        return self._show(len(self.text))

    def _found(self, text: str) -> int | None:
        """Place where the first stop string begins; all before this was searched earlier, but for what one may reach back into."""
        start = max(0, len(self.text) - max(map(len, self.stops), default=1) + 1)
        return min((at for stop in self.stops if (at := text.find(stop, start)) >= 0), default=None)

    def _show(self, end: int) -> str:
        new = self.text[self.shown : end]
        self.shown = max(end, self.shown)
        return new

    def _completed_by(self, old: int, at: int) -> int:
        """The fewest new ids whose text holds a stop string at `at`."""
        for count in range(1, len(self.ids) - old):
            text = self._decoded(0, old + count)
            if any(text.startswith(stop, at) for stop in self.stops):
                return count
        return len(self.ids) - old

    def _decoded(self, start: int, end: int) -> str:
        return self.tokenizer.decode(self.ids[start:end], special=False)
