"""Conversations as token ids: which tokens of a finished one are the assistant's, and how one goes on turn by turn.

Which tokens of a conversation are the assistant's is read off the template itself, whichever it is. Rendered up to an
assistant's message and with the generation prompt, the conversation ends where that answer begins, which is where the
model takes over when it samples; rendered with the message, it ends behind the answer. Trained is everything from there
on (including what a template strips or adds) up to the end-of-turn token, but not a line break that the template puts
behind it. A template that opens a thought in its generation prompt may leave that out of the answer it renders: the
answer is then put behind the prompt, and ends the thought.

A template may render an answer otherwise once more follows. A conversation is therefore read in pieces: each begins
with the first message, is one rendering as the model meets it when it samples, and is tokenised once, never in parts,
which would merge into other tokens. A piece holds as many answers as stand in that rendering as the model would have
said them. Mostly one piece holds them all.

A token that crosses the beginning of an answer is trained if its part of the template is white space alone, as
`" Four"` after `Assistant: `: the word is the assistant's, and without it no answer would have a first word. With
anything visible of the template in it, or nothing visible of the answer, it is not trained.

A conversation of several turns (`Continuation`) keeps the ids that were sampled and tokenises only new messages.
Tokenising its text anew would give other ids than the model sampled, and a policy gradient of tokens that were never
drawn. What stands between an answer and the next one is found with a stand-in for the answer, so a template may
render earlier answers as it likes; or each prompt is rendered anew, with the ids of the answer to it as they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import Any

from rlpost.data.conversation import Completion, Conversation, Message
from rlpost.data.faults import Fault
from rlpost.data.habits import (
    CALL_ID,
    END_THINK,
    MARKS,
    PREFILL,
    STAND_IN,
    THINK,
    THOUGHTS,
    Habits,
    closing_mark,
    opened_thought,
    part_thoughts,
    probe_call,
    with_system_message,
    with_thoughts_apart,
)
from rlpost.data.rendering import template_messages, tokenizer_name
from rlpost.errors import ConfigError, DataError

# The assistant's tokens


class MaskError(DataError):
    """The mask of a conversation cannot be found: `fault` is the kind, the message the reason."""

    def __init__(self, reason: str, fault: Fault = Fault.template) -> None:
        super().__init__(reason)
        self.fault = fault


@dataclass(slots=True)
class Piece:
    """One rendering of a conversation, and the answers trained in it, by number of the message.

    Its ids and which of them are trained are found once its text is whole.
    """

    text: str = ""
    answers: dict[int, tuple[int, int]] = field(default_factory=dict)  # characters of `text`, end of turn included
    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)

    @property
    def kept(self) -> str:
        """The text up to the end of the last answer, without what the template writes behind that."""
        return self.text[: max(end for _, end in self.answers.values())]


class ChatMask:
    """Renders conversations with a tokenizer's chat template and finds the assistant's tokens in them.

    `template` replaces the tokenizer's own, `variables` are passed to it. Raises ConfigError for a tokenizer
    without character offsets.
    """

    def __init__(self, tokenizer: Any, template: str | None = None, variables: Mapping[str, Any] | None = None) -> None:
        if not tokenizer.is_fast:
            raise ConfigError(
                f"the tokenizer {tokenizer_name(tokenizer)} has no fast form, which alone says where a token stands in "
                "the text: save one as tokenizer.json beside it"
            )
        self.tokenizer = tokenizer
        self.habits = Habits(tokenizer, template, variables)
        added = tokenizer.added_tokens_decoder.items()
        self.special = {*tokenizer.all_special_ids, *(number for number, token in added if token.special)}
        self.special_texts = sorted(tokenizer.convert_ids_to_tokens(sorted(self.special)), key=len, reverse=True)

    def encode(
        self,
        messages: Sequence[Message],
        tools: list[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> tuple[list[int], list[bool]]:
        """The ids of the whole conversation in one rendering, and for each whether it is trained.

        Raises MaskError as `pieces` does, and where it takes several.
        """
        pieces, _ = self.pieces(messages, tools, add_generation_prompt=add_generation_prompt)
        if len(pieces) > 1:
            number = max(pieces[0].answers)
            raise MaskError(
                f"{self.template} renders message {number + 1} differently once more follows, so what the model would "
                "say there is not in one rendering: give it weight 0, or fine-tune with rlpost train sft, which reads "
                "such a conversation in pieces",
                Fault.nesting,
            )
        return pieces[0].ids, pieces[0].mask

    def pieces(
        self,
        messages: Sequence[Message],
        tools: list[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> tuple[list[Piece], list[str]]:
        """The conversation in as few pieces as show each trained answer as the model would say it, and notes.

        Every assistant's message is trained, except those with `weight: 0`; one with `is_complete` False has no end
        of turn to train. Raises MaskError for a conversation that the template refuses, or where it leaves
        something out, and for answers without an end-of-turn token.
        """
        habits = self.habits
        if self.header_left_out:
            raise MaskError(
                f"{self.template} writes {self.header_left_out!r} before an answer but not as its generation prompt: "
                "let it do so under {% if add_generation_prompt %}"
            )
        notes: list[str] = []
        self.check_bare(messages)
        try:
            shown = template_messages(messages, self.tokenizer)
            if habits.thoughts_key is not None:
                shown = [with_thoughts_apart(m) if m["role"] == "assistant" else m for m in shown]
            pieces = self._rendered(shown, tools, notes)
            last = len(shown) - 1
            if not pieces or max(pieces[-1].answers) < last or add_generation_prompt:
                whole = habits.write(shown, tools, asking=add_generation_prompt)
                if not pieces:
                    pieces = [Piece(whole)]
                elif whole.startswith(pieces[-1].kept):
                    pieces[-1].text = whole
        except DataError as error:
            raise error if isinstance(error, MaskError) else MaskError(str(error)) from error
        for piece in pieces:
            self._tokenise_piece(piece)
        self._check_nothing_left_out(shown, pieces)
        return pieces, notes

    def _rendered(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None, notes: list[str]
    ) -> list[Piece]:
        """The pieces as text."""
        pieces: list[Piece] = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or message.get("weight") == 0:
                continue
            if number == 0:
                raise MaskError("message 1 is the assistant's: begin with what it answers")
            prompt = self.habits.write(messages[:number], tools, asking=True)
            through, end = self._through(messages, number, tools, prompt, notes)
            if not pieces or not prompt.startswith(pieces[-1].kept):
                pieces.append(Piece())
            prefill = message.get(PREFILL, "")
            if not through.startswith(prefill, len(prompt)):
                raise MaskError(
                    f"{self.template} does not write the beginning of message {number + 1} that the prompt holds, "
                    f"{prefill[:40]!r}: let the prompt end with the user's message"
                )
            pieces[-1].text = through
            pieces[-1].answers[number] = len(prompt) + len(prefill), end
        return pieces

    def check_bare(self, messages: Sequence[Message]) -> None:
        """Raise MaskError for a message that holds a special token which the template writes around messages."""
        for number, message in enumerate(messages, start=1):
            content = message.get("content")
            held = isinstance(content, str) and next((token for token in self._around if token in content), None)
            if held:
                raise MaskError(
                    f"message {number} holds {held!r}, which {self.template} itself writes around messages: give the "
                    "bare text; text that is rendered already is fine-tuned on as the column text"
                )

    @cached_property
    def _around(self) -> list[str]:
        """The special tokens that the template writes around messages."""
        written, marks = self.habits.around_messages, {mark for pair in MARKS for mark in pair}
        return [token for token in self.special_texts if token in written and token not in marks]

    def _through(
        self,
        messages: Sequence[Message],
        number: int,
        tools: list[dict[str, Any]] | None,
        prompt: str,
        notes: list[str],
    ) -> tuple[str, int]:
        """The prompt `prompt` and behind it message `number` as the model would say it there, and where that ends."""
        message = messages[number]
        text = prompt + self._behind(messages, number, tools, prompt)
        opened, thoughts = opened_thought(prompt), _thoughts_of(message)
        ended = next((end for _, end in MARKS if prompt.rstrip().endswith(end)), None)
        around = text[max(0, len(prompt) - 40) : len(prompt) + 40]
        if thoughts and (_SECOND_THOUGHT.search(around) or (ended and ended in text[len(prompt) :])):
            raise MaskError(
                f"{self.template} ends a thought before message {number + 1}, so its thoughts have no place: let the "
                "template think with model.chat_template_kwargs, or add env.thoughts=drop"
            )
        if opened and not thoughts and closing_mark(opened) in text[len(prompt) :]:
            notes.append(f"an answer ends the thought that {self.template} begins, without a word in it")
        if not message.get("is_complete", True):
            return text, len(text)
        if self._end_left_out and not message.get("tool_calls"):
            text = text.removesuffix(self.habits.behind_an_answer[0]) + self._end_left_out
        end = self._end_in(text, len(prompt), message)
        if end is None:
            raise MaskError(
                f"{self.template} ends message {number + 1} with no special token, so the model would never learn to "
                "stop: let the template write eos_token behind an answer",
                Fault.endless,
            )
        return text, end

    def _behind(self, messages: Sequence[Message], number: int, tools: list[dict[str, Any]] | None, prompt: str) -> str:
        """Message `number`, as the model would say it behind `prompt`, and what the template writes behind it."""
        answered = self.habits.write(messages[: number + 1], tools)
        if answered.startswith(prompt):
            return answered[len(prompt) :]
        plain = self.habits.write([*messages[:number], {"role": "assistant", "content": STAND_IN}], tools)
        shared = _without_part_of_tag(prompt, min(_shared_length(prompt, answered), _shared_length(prompt, plain)))
        if shared < len(self.habits.write(messages[:number], tools).rstrip()):  # what came before is changed too
            begins = _shared_length(answered, plain)
            ending = prompt[-12:]  # enough of the generation prompt to find its end again
            found = answered.rfind(ending, max(0, begins - NEAR), begins + len(ending))
            if found >= 0:
                return answered[found + len(ending) :]
            for token in reversed([*self._any_special.finditer(answered, max(0, begins - NEAR), begins)]):
                if token.end() != begins or token.group() in prompt[-NEAR:]:
                    break
                begins = token.start()  # the answer begins with tokens that the prompt lacks
            return answered[begins:]
        opened, rest = opened_thought(prompt[shared:]), answered[shared:]
        if not opened:
            return rest
        close, thoughts = closing_mark(opened), _thoughts_of(messages[number])
        if rest.startswith(close):
            return f"{thoughts}\n{rest}" if thoughts else rest
        if thoughts and rest.startswith(thoughts) and close in rest:  # only the opening mark is left out
            return rest
        return f"{thoughts}\n{close}\n\n{rest}"

    def _end_in(self, text: str, begin: int, message: Message) -> int | None:
        """The place behind the end of `message`, which begins at `begin` of `text`; None without a special token."""
        end = self.end_of(message)
        end_text = "" if end is None else self.tokenizer.convert_ids_to_tokens(end)
        tail = self.habits.behind_a_call[0] if message.get("tool_calls") else self.habits.behind_an_answer[0]
        if end_text and end_text in tail and text.endswith(tail):
            return len(text) - len(tail) + tail.find(end_text) + len(end_text)
        last: int | None = None
        for found in reversed([*self._any_special.finditer(text, begin)]):
            if self._any_special.sub("", text[found.end() :]).strip():
                break
            if found.group() == end_text:
                return found.end()
            last = last or found.end()
        return last

    @cached_property
    def _any_special(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self.special_texts)) or r"(?!)")

    def _tokenise_piece(self, piece: Piece) -> None:
        """Set the piece's ids, and which of them are trained."""
        piece.ids, spans = self._tokenise(piece.text)
        piece.mask = [False] * len(spans)
        for begin, end in piece.answers.values():
            for place, span in enumerate(spans):
                piece.mask[place] |= _belongs(piece.text, span, begin, end)
        piece.mask[:1] = [False] * len(piece.mask[:1])  # nothing predicts the first token

    def _check_nothing_left_out(self, messages: Sequence[Message], pieces: Sequence[Piece]) -> None:
        """Raise MaskError if the template leaves out something that a message says."""
        everything = _Rendered("\n".join(piece.text for piece in pieces))
        own = {n: _Rendered(piece.text[slice(*place)]) for piece in pieces for n, place in piece.answers.items()}
        for number, message in enumerate(messages):
            rendered = own.get(number, everything)
            content, inside = str(message.get("content") or "").removeprefix(message.get(PREFILL, "")), ""
            if message["role"] == "assistant" and (parted := part_thoughts(content)) is not None:
                inside, content = parted
            if not rendered.holds(content):
                beside = " beside a call" if message.get("tool_calls") else ""
                raise self._left_out(f"the text{beside} of message {number + 1}, of the role {message['role']}")
            if number not in own:
                continue
            for thoughts in filter(None, (inside, message.get(THOUGHTS))):
                if not rendered.holds(str(thoughts)):
                    remedy = "add env.thoughts=drop" if inside else "add env.thoughts=inline or env.thoughts=drop"
                    raise self._left_out(f"the thoughts of message {number + 1}", remedy)
            for call in message.get("tool_calls") or []:
                function = call.get("function", call)
                texts = [str(function.get("name", "")), *_words(function.get("arguments"))]
                if not all(map(rendered.holds, texts)):
                    raise self._left_out(
                        f"the call of {function.get('name')} in message {number + 1}",
                        "add model.chat_template=qwen, write the call as content",
                    )

    def _left_out(self, what: str, remedy: str = "take it out of the row") -> MaskError:
        return MaskError(
            f"{self.template} leaves out {what}: {remedy}, or name a template that writes it with model.chat_template"
        )

    @property
    def template(self) -> str:
        """The name of the template in messages."""
        return self.habits.name

    @cached_property
    def header_left_out(self) -> str:
        """The header before an answer that the template leaves out of its generation prompt; mostly empty.

        A template that ends each question with the header may write more before an answer, as Command A does.
        """
        left_out = self.habits.header_left_out
        if left_out not in self.special_texts:
            return left_out
        ids, _ = self._tokenise(self.habits.write([{"role": "user", "content": "question"}]).rstrip())
        ends_the_question = bool(ids) and ids[-1] in self.special and ids[-1] != self.end_of_turn
        return "" if ends_the_question else left_out

    @cached_property
    def end_of_turn(self) -> int | None:
        """The special token with which the template ends an answer; None if it is unknown.

        Where several follow each other, as in Command R, it is the last that stays once a question follows: the model
        has to write all of them. Phi writes one more behind the last answer alone, which is not part of the turn.
        """
        tail, between = self.habits.behind_an_answer
        ends = self._special_in(tail)
        if not ends:  # the template ends an answer only once a question follows
            return self._ends_before_a_question[-1][0] if self._ends_before_a_question else None
        return self._last_that_stays(ends, _shared_length(between, tail)) or ends[0][0]

    def _last_that_stays(self, ends: list[tuple[int, int]], stays: int) -> int | None:
        """The last of the special tokens `ends` that lies in the first `stays` characters; None if there is none.

        Where eos_token is among them it ends the turn: other tokens may begin the next header.
        """
        always = self.habits.writes_no_prompt
        if any(token == self.tokenizer.eos_token_id and (always or last <= stays) for token, last in ends):
            return self.tokenizer.eos_token_id
        return next((token for token, last in reversed(ends) if last <= stays), None)

    @cached_property
    def _ends_before_a_question(self) -> list[tuple[int, int]]:
        """The special tokens between an answer and the header of a question, and where each of them ends."""
        between = self.habits.behind_an_answer[1]
        (header, _), (found, _) = map(self._tokenise, (self.habits.before_a_question, STAND_IN + between))
        in_header = sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(header[::-1], found[::-1], strict=False))
        )
        special = self._special_in(between)
        return special[: len(special) - sum(token in self.special for token in found[len(found) - in_header :])]

    @cached_property
    def _end_left_out(self) -> str:
        """The end of a turn that the template writes only once a question follows; mostly empty."""
        tail, between = self.habits.behind_an_answer
        ends = [] if self._special_in(tail) else self._ends_before_a_question
        return between[: ends[-1][1]] if ends else ""

    @cached_property
    def end_of_call(self) -> int | None:
        """The last special token behind a call that stays once its result follows; None if there is none."""
        tail, between = self.habits.behind_a_call
        return self._last_that_stays(self._special_in(tail), _shared_length(between, tail))

    def _special_in(self, tail: str) -> list[tuple[int, int]]:
        """The special tokens in a text behind an answer, and where each of them ends."""
        return [
            (token, last - len(STAND_IN))
            for token, (first, last) in zip(*self._tokenise(STAND_IN + tail), strict=True)
            if first >= len(STAND_IN) and token in self.special
        ]

    def end_of(self, message: Message) -> int | None:
        """The special token with which the template ends this message of the assistant's; None if it is unknown."""
        return (self.end_of_call if message.get("tool_calls") else None) or self.end_of_turn

    def _tokenise(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of `text`, and the characters that each covers; without a bos token: the template writes its own."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        spans: list[tuple[int, int]] = []
        reached = 0
        for first, behind in encoded["offset_mapping"]:
            # white space that a tokenizer leaves out of its offsets belongs to the token that follows
            spans.append((min(first, reached), behind))
            reached = max(reached, behind)
        return encoded["input_ids"], spans


class _Rendered:
    """A rendered text, searched for what messages say whatever the template did to white space and quotes."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def _letters(self) -> str:
        return _letters(self.text)

    def holds(self, words: str) -> bool:
        """Whether the text holds `words`, as they are or as JSON writes them."""
        if words.strip() in self.text:
            return True
        escaped = json.dumps(words, ensure_ascii=False)[1:-1]
        return _letters(words) in self._letters or _letters(escaped) in self._letters


_SWITCHES = re.compile(r"/(no_)?think\b")  # which some templates read and take out


def _letters(text: str) -> str:
    return re.sub(r"[\W_]+", "", _SWITCHES.sub("", text))


def _words(value: Any) -> Iterator[str]:
    """The texts and numbers in the arguments of a call."""
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from _words(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _words(inner)
    elif isinstance(value, str | int) and not isinstance(value, bool):
        yield str(value)


def end_of_turn(tokenizer: Any) -> int | None:
    """The token with which the chat template of `tokenizer` ends an answer; None if it is unknown or there is none."""
    return ChatMask(tokenizer).end_of_turn if tokenizer.is_fast else None


def stop_ids(tokenizer: Any) -> list[int]:
    """The ids that end a completion: the end of turn, the tokenizer's eos token and the end of a call, if they differ.

    A base model's eos token ends texts, and its chat template may end turns, and turns that call, with other tokens.
    """
    chat = ChatMask(tokenizer) if tokenizer.is_fast else None
    ends = (chat and chat.end_of_turn, tokenizer.eos_token_id, chat and chat.end_of_call)
    return list(dict.fromkeys(token for token in ends if token is not None))


def _belongs(text: str, span: tuple[int, int], begin: int, end: int) -> bool:
    """Whether a token belongs to the characters [begin, end); the top of this module says when a crossing one does."""
    first, behind = span
    if first >= end or (first < begin and behind <= begin):
        return False
    of_template, of_answer = text[first:begin], text[max(first, begin) : behind]
    begins = first >= begin or (of_template.isspace() and bool(of_answer.strip()))
    return begins and (behind <= end or text[end:behind].isspace())  # an end-of-turn token may swallow a line break


def _without_part_of_tag(text: str, length: int) -> int:
    """`length`, or less where `text[:length]` ends within a tag, as that of `<think>` and `</think>` with `<`."""
    for opening, closing in ("<>", "[]"):
        place = text.rfind(opening, 0, length)
        if place >= 0 and closing not in text[place:length]:
            return place
    return length


NEAR = 80  # characters around the beginning of an answer
_OPENINGS, _CLOSINGS = ("|".join(re.escape(mark) for mark in marks) for marks in zip(*MARKS, strict=True))
_SECOND_THOUGHT = re.compile(rf"({_CLOSINGS})\s*({_OPENINGS})")


def _thoughts_of(message: Message) -> str:
    """The thoughts of a message, under their key or in its content."""
    parted = part_thoughts(str(message.get("content") or ""))
    return str(message.get(THOUGHTS) or "").strip("\n") or (parted[0] if parted else "")


def _shared_length(one: str, other: str) -> int:
    """The length of the longest common prefix."""
    if other.startswith(one):
        return len(one)
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


# Conversations turn by turn

LAST_IDS = 16  # of a prompt, which hold the mark that begins a thought


class Continuation:
    """Renders conversations with a tokenizer's chat template, as ids that are only ever appended to.

    The template describes the tools; if it has no place for tools, the system message describes them.
    """

    def __init__(self, tokenizer: Any, variables: Mapping[str, Any] | None = None) -> None:
        self.tokenizer, self._variables = tokenizer, variables
        self.habits = Habits(tokenizer, variables=variables)
        self._others: dict[str, Continuation] = {}  # by the variables that conversations bring
        # the last opening: its messages, text, ids, and ids with its hint
        self._last: tuple[Any, str, list[int], list[int]] | None = None

    def of(self, conversation: Conversation) -> Continuation:
        """This one, or the one with the conversation's own variables of the chat template."""
        if not conversation.variables:
            return self
        key = json.dumps(conversation.variables, sort_keys=True)
        if key not in self._others:
            self._others[key] = Continuation(self.tokenizer, conversation.variables)
        return self._others[key]

    def begin(self, conversation: Conversation) -> None:
        """Set the text and the ids of the first prompt. Raises DataError where the template refuses the messages."""
        opening, hint = conversation.opening, conversation.hint
        begun = (conversation.messages[:opening], conversation.tools, conversation.chat, hint, conversation.prefill)
        last = self._last
        if last is None or last[0] != begun:  # the samples of a group follow each other and share an opening
            if conversation.chat and self.tokenizer.is_fast:
                self._mask.check_bare(begun[0])
            text = self._render(conversation, conversation.messages[:opening], asking=True) + conversation.prefill
            hinted: list[int] = []
            if hint is not None:
                messages = with_system_message(begun[0], hint) if hint else begun[0]
                hint_text = self._render(conversation, messages, asking=True) + conversation.prefill
                hinted = self._ids(hint_text, conversation)
            self._last = last = (deepcopy(begun), text, self._ids(text, conversation), hinted)
        _, conversation.prompt_text, ids, hinted = last
        conversation.prompt_ids, conversation.hinted_ids = list(ids), list(hinted)

    def _ids(self, text: str, conversation: Conversation) -> list[int]:
        # a template writes the bos token itself; for plain text the tokenizer does
        return self.tokenizer(text, add_special_tokens=not conversation.chat)["input_ids"]

    def next_turn(self, conversation: Conversation) -> tuple[list[int], bool]:
        """The ids that the model reads before its next turn, after the first, and whether they are a whole prompt.

        They are the ids of the messages that have none yet and of the next turn's opening. With `as_template` they
        are a whole prompt where the template renders the conversation otherwise than its ids stand. Raises DataError
        for messages that the template refuses.
        """
        if not (conversation.as_template and conversation.chat):
            return self.observation_ids(conversation), False
        text = self._render(conversation, conversation.messages, asking=True)
        ids, context = self._ids(text, conversation), conversation.context
        if ids[: len(context)] == context:
            return ids[len(context) :], False
        return ids, True

    def observation_ids(self, conversation: Conversation) -> list[int]:
        """The ids of the messages that have none yet, and of the next turn's opening; for turns after the first.

        Raises DataError for messages that the template refuses.
        """
        tokenised = conversation.tokenised or conversation.opening
        if not conversation.chat:
            text = "".join(message["content"] for message in conversation.messages[tokenised:])
        elif conversation.ends_sampled:
            text = self._behind_the_answer(conversation, tokenised)
        else:
            text = self._behind_a_given_turn(conversation, tokenised)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _behind_the_answer(self, conversation: Conversation, tokenised: int) -> str:
        """The text that follows the sampled ids: the end of the turn where they lack it, new messages, an opening."""
        messages = list(conversation.messages)
        answer = messages[tokenised - 1]
        stand_in: Message = {"role": answer["role"], "content": STAND_IN}
        if calls := answer.get("tool_calls"):
            blank = [{**call, "function": {**call["function"], "arguments": {"word": STAND_IN}}} for call in calls]
            stand_in = {**stand_in, "content": "", "tool_calls": blank}
        messages[tokenised - 1] = stand_in
        _, found, behind = self._render(conversation, messages, asking=True).rpartition(STAND_IN)
        if not found:
            raise DataError(
                f"{self.habits.name} leaves out an earlier answer, so nothing can be put behind it: take "
                "env.history=as_template, which renders each prompt anew"
            )
        first = str(messages[tokenised].get("content")).strip()[:20] if len(messages) > tokenised else ""
        between = behind.partition(first)[0] if first else behind  # the end of the turn, and the next header
        last, end = conversation.response_ids[-1], self._mask.end_of(answer) or self.end_of_turn
        ends = [*([last] if last in self._mask.special else []), end]
        texts = [text for text in self.tokenizer.convert_ids_to_tokens(ends) if text in between]
        tail = self.habits.behind_a_call[0] if calls else self.habits.behind_an_answer[0]
        if not texts and not self._first_special(tail):  # the template writes no end of this turn
            return behind[_shared_length(tail, between) :]
        end_text = texts[0] if texts else self._first_special(between)
        place = between.find(end_text)
        # a turn that ended with another stop token, or a stop string, lacks its end
        lacks_end = last not in (end, self.end_of_turn) and end_text != self.tokenizer.convert_ids_to_tokens(last)
        return behind[place:] if lacks_end else behind[place + len(end_text) :]

    def _first_special(self, text: str) -> str:
        """The special token that comes first in `text`; empty if there is none."""
        found = [(place, token) for token in self._mask.special_texts if (place := text.find(token)) >= 0]
        return min(found)[1] if found else ""

    def _behind_a_given_turn(self, conversation: Conversation, tokenised: int) -> str:
        """The text of messages behind a prompt whose answer was given as text."""
        begun = self._render(conversation, conversation.messages[:tokenised], asking=True)
        whole = self._render(conversation, conversation.messages, asking=True)
        if not whole.startswith(begun):
            raise DataError(
                f"{self.habits.name} does not render a conversation as a continuation of its beginning, so a turn "
                "cannot be given as text: let the policy give ids"
            )
        return whole[len(begun) :]

    def opened(self, conversation: Conversation) -> str:
        """The beginning of the model's next turn, held by its prompt: `<think>`, whatever the mark, or the prefill."""
        if not conversation.chat or (not conversation.turns and conversation.prefill):
            return conversation.prefill
        opened = opened_thought(self.tokenizer.decode(conversation.context[-LAST_IDS:]))
        return THINK + opened[len(opened.rstrip()) :] if opened else ""

    def text(self, conversation: Conversation) -> str:
        """The whole conversation and, unless it is over, the opening of the model's turn. May raise DataError."""
        return self._render(conversation, conversation.messages, asking=not conversation.done)

    def check(
        self,
        role: str,
        tools: Sequence[dict[str, Any]] = (),
        *,
        opening: Sequence[Message] = ({"role": "user", "content": "probe"},),
        calling: bool = False,
        as_template: bool = False,
    ) -> None:
        """Raise DataError, naming the template, unless it can go on after a message of `role`, twice.

        The conversation begins with `opening`; with `calling` each answer is a call.
        """
        probe = Conversation(task={}, messages=[dict(m) for m in opening], tools=list(tools), as_template=as_template)
        self.begin(probe)
        for turn in ("one", "two"):
            probe.add_completion(Completion([self.end_of_turn], [0.0], f"reply {turn}", "stop", 0))
            answer: Message = {"role": role, "content": f"answer {turn}"}
            if calling:
                probe.messages[-1] = probe_call({"word": turn})
                answer |= {"tool_call_id": CALL_ID}
            probe.messages.append(answer | ({"name": "probe"} if role == "tool" else {}))
            ids, anew = self.next_turn(probe)
            if f"answer {turn}" not in self.tokenizer.decode(ids):
                raise DataError(f"{self.habits.name} leaves out messages of the role {role}: choose another tool_role")
            probe.begin_anew(ids) if anew else probe.add_observation(ids)

    def rewrites(
        self, role: str, tools: Sequence[dict[str, Any]] = (), *, opening: Sequence[Message], calling: bool = False
    ) -> bool:
        """Whether the template renders an earlier turn otherwise than it was sampled, once a message of `role` follows.

        The answers are plain ones and ones with thoughts, or calls.
        """
        for thoughts in ("", f"{THINK}\nHm.\n{END_THINK}\n\n"):
            probe = Conversation(task={}, messages=[dict(m) for m in opening], tools=list(tools), as_template=True)
            self.begin(probe)
            for turn in ("one", "two"):
                answer = probe_call({"word": turn}) if calling else {"role": "assistant", "content": turn}
                answer["content"] = thoughts + answer["content"]
                ids = self._sampled(probe, answer)
                if not ids:
                    break
                probe.add_completion(Completion(ids, [0.0] * len(ids), "", "stop", 0))
                probe.messages[-1] = answer
                result: Message = {"role": role, "content": "42"}
                probe.messages.append(result | ({"name": "probe", "tool_call_id": CALL_ID} if calling else {}))
                ids, anew = self.next_turn(probe)
                if anew:
                    return True
                probe.add_observation(ids)
        return False

    def _sampled(self, conversation: Conversation, answer: Message) -> list[int]:
        """The ids of `answer` as the model would sample them; none where the template does not write it."""
        try:
            pieces, _ = self._mask.pieces([*conversation.messages, answer], conversation.tools)
        except MaskError:
            return []
        ids, mask = pieces[-1].ids, pieces[-1].mask
        last = len(mask) - mask[::-1].index(True)
        first = last
        while first and mask[first - 1]:
            first -= 1
        return ids[first:last]

    @cached_property
    def end_of_turn(self) -> int:
        """The token that the template puts behind a turn. Raises DataError if there is none."""
        token = self._mask.end_of_turn
        if token is None:
            raise DataError(
                f"{self.habits.name} ends a turn with no special token, so several turns cannot be trained on: use "
                "single-turn tasks with this model"
            )
        return token

    @cached_property
    def _mask(self) -> ChatMask:
        return ChatMask(self.tokenizer, variables=self._variables)

    def _render(self, conversation: Conversation, messages: Sequence[Message], *, asking: bool) -> str:
        """The messages as text, with the opening of the model's turn if `asking`."""
        if not conversation.chat:
            return "".join(message["content"] for message in messages)
        if conversation.as_template and self.habits.thoughts_key is not None:
            messages = [with_thoughts_apart(m) if m["role"] == "assistant" else m for m in messages]
        return self.habits.write(messages, conversation.tools, asking=asking)
