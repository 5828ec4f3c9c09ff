"""What of a run's history its model is shown, where its window does not hold all of it."""

from __future__ import annotations

from collections.abc import Iterable

from chaz.entries import cut_mark, fair_share
from chaz.runtime.context import Conversation
from chaz.runtime.delimiting import redelimited, undelimited
from chaz.runtime.models import AssistantMessage, HistoryMessage, ToolMessage, UserMessage
from chaz.runtime.tokens import Count, frame_tokens

OLD_RESULT = 150
"""Tokens that are left of an older result of a tool, once it is cut."""


class Window:
    """The history of a run, made to fit into ``room`` tokens, step by step.

    What does not fit is made to fit into three quarters, so that the next steps only add to its end: providers keep
    what they have read of an unchanged beginning. The oldest of the conversation goes first, each message whole; then
    the older results of the run's own tools are cut, oldest first; and if that is not enough, the longest of all other
    texts: what the run is asked, the summary, the newest results. No message of these is ever left out, and the
    model's own turns stay as they are, so that each call keeps its result.

    It only depends on what it is given, so that a replay, which goes through the same steps, shows the same.
    """

    def __init__(self, conversation: Conversation, count: Count, room: int) -> None:
        self._count = count
        self._room = room
        summary = [] if conversation.summary is None else [conversation.summary]
        self._summary = [_Shown(message, count) for message in summary]
        self._earlier = [_Shown(message, count) for message in conversation.earlier]
        self._asked = [_Shown(message, count) for message in conversation.asked]
        self._steps: list[_Shown] = []

    @property
    def tokens(self) -> int:
        """Of all that is shown."""
        return sum(each.tokens for each in self._all())

    def add(self, messages: Iterable[HistoryMessage]) -> None:
        """Add what came: turns, results, and what was said meanwhile."""
        self._steps += [_Shown(message, self._count) for message in messages]

    def show(self) -> list[HistoryMessage]:
        """The history as the model is shown it now."""
        if self.tokens > self._room:
            self._fit(self._room * 3 // 4)
        if not self._summary:
            # A history begins with somebody else's words.
            while self._earlier and isinstance(self._earlier[0].message, AssistantMessage):
                del self._earlier[0]
        return [each.message for each in self._all()]

    def _all(self) -> list[_Shown]:
        return [*self._summary, *self._earlier, *self._asked, *self._steps]

    def _fit(self, target: int) -> None:
        over = self.tokens - target
        dropped = 0
        while over > 0 and dropped < len(self._earlier):
            over -= self._earlier[dropped].tokens
            dropped += 1
        del self._earlier[:dropped]
        if self.tokens <= self._room:
            return
        newest = max((n for n, each in enumerate(self._steps) if isinstance(each.message, AssistantMessage)), default=0)
        for each in self._steps[:newest]:
            if isinstance(each.message, ToolMessage):
                each.cut(OLD_RESULT)
                if self.tokens <= target:
                    return
        if self.tokens <= self._room:
            return
        left = self._all()
        most = fair_share([each.text_tokens for each in left], target - sum(each.frame_tokens for each in left))
        for each in left:
            each.cut(most)


class _Shown:
    """A message as it is shown, and its tokens: those of its frame, and those of the text that may be cut."""

    def __init__(self, message: HistoryMessage, count: Count) -> None:
        self.message = message
        self._whole = _text(message)
        self._count = count
        self.frame_tokens = frame_tokens(message, count)
        if isinstance(message, ToolMessage):
            self.frame_tokens += count(redelimited(message.content, ""))
        self.text_tokens = count(self._whole)

    @property
    def tokens(self) -> int:
        return self.frame_tokens + self.text_tokens

    def cut(self, most: int) -> None:
        """Cut its text to so many tokens, with a mark; a shorter one stays as it is."""
        if self.text_tokens <= most:
            return
        text = _cut(self._whole, most, self._count)
        self.text_tokens = self._count(text)
        if isinstance(self.message, UserMessage):
            self.message = UserMessage(text=text)
        elif isinstance(self.message, ToolMessage):
            content = redelimited(self.message.content, text)
            self.message = self.message.model_copy(update={"content": content})


def _text(message: HistoryMessage) -> str:
    if isinstance(message, UserMessage):
        return message.text
    return undelimited(message.content) if isinstance(message, ToolMessage) else ""


def _cut(text: str, most: int, count: Count) -> str:
    kept = len(text) * most // max(1, count(text))
    while kept > 0:
        found = text[:kept] + cut_mark(len(text), kept)
        if count(found) <= most:
            return found
        kept = kept * 9 // 10
    return cut_mark(len(text), 0)
