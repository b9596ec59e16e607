"""Whether an environment fits a model, checked before the model is loaded: rewards, template, prompt lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlpost.data.chat import Continuation
from rlpost.data.conversation import Conversation, Message
from rlpost.data.faults import ALL_UP_TO, SAMPLE, SHOWN
from rlpost.data.template_choice import not_read
from rlpost.envs.chat import DatasetChatEnv
from rlpost.errors import ConfigError, DataError
from rlpost.settings import EnvSettings, LongPrompts
from rlpost.settings.env import Turns
from rlpost.text import counted

COMPLETION = "env.max_completion_tokens"


def check_rewards(env: DatasetChatEnv) -> None:
    """Raise ConfigError for an environment with a reward per token: a step needs one per completion."""
    transforms = [transform for part in (env, *env.parts) for transform in part.transforms]
    if changing := [type(transform).__name__ for transform in transforms if transform.reward_per_token]:
        raise ConfigError(
            f"the environment has a {changing[0]}, which makes a reward a token, and a training takes one a "
            "completion: leave it out and let the loss hold the penalty, with loss.kl_coef"
        )


def check_template(env: DatasetChatEnv, tokenizer: Any) -> list[str]:
    """Choose how calls are read and what the model reads of its earlier turns, where settings leave it open.

    Returns notes about both. Raises DataError where the model's chat template cannot write a conversation: its
    beginning, or several turns.
    """
    return [note for part in env.parts for note in _fit_to_template(part, tokenizer)]


def _fit_to_template(env: DatasetChatEnv, tokenizer: Any) -> list[str]:
    continuation = Continuation(tokenizer)
    task = next(env.order.iter_from(0))
    opening = env.opening_messages(task)
    notes = not_read(tokenizer, env.variables_of(task))
    if env.tools is not None:
        notes += env.tools.follow(tokenizer)
    if env.max_steps is not None and env.max_steps == 1:
        continuation.begin(Conversation(task={}, messages=opening))
        return notes
    schemas, role, calling = [], env.user_role, False
    if env.tools is not None:
        schemas = [schema for tool in env.tools.transforms if tool.described for schema in tool.schemas()]
        role, calling = env.tools.role, env.tools.keeps_calls
    if env.hint is not None and env.history is Turns.as_template:
        raise ConfigError("env.history=as_template renders each prompt anew, without reference_hint: leave out one")
    if env.hint is None and env.history is None:
        env.as_template = continuation.rewrites(role, schemas, opening=opening, calling=calling)
    else:
        env.as_template = env.history is Turns.as_template
    continuation.check(role, schemas, opening=opening, calling=calling, as_template=env.as_template)
    if not env.as_template:
        return notes
    return [
        *notes,
        f"{continuation.habits.name} changes earlier turns, and each turn is trained with the prompt that it then "
        "renders (env.history=as_template); env.history=keep reads them as they were sampled",
    ]


def look_at_lengths(env: DatasetChatEnv, settings: EnvSettings, tokenizer: Any, context: int | None) -> str | None:
    """Find prompts that are too long, before a model is loaded, and leave them out if `settings` says so.

    Returns a message about those left out, or None. A prompt is too long above `max_prompt_tokens`, or where the
    model's `context` (None: unknown) has no room for a completion behind it. Raises DataError with file, row and
    length of the first of them, and how many there are.
    """
    reports = [_look_at(part, part.source_settings or settings, tokenizer, context) for part in env.parts]
    return "; ".join(filter(None, reports)) or None


def _look_at(env: DatasetChatEnv, settings: EnvSettings, tokenizer: Any, context: int | None) -> str | None:
    policy = getattr(settings, "long_prompts", None)
    rows = env.rows
    continuation = Continuation(tokenizer)
    if policy is None or not len(rows):
        return _look_at_first(env, settings, continuation)
    most, reason = settings.max_prompt_tokens, f"env.max_prompt_tokens={settings.max_prompt_tokens}"
    completion, by_context = settings.max_completion_tokens, False
    if context is not None and context - completion < most:
        most, by_context = context - completion, True
        reason = f"the {max(0, most)} that the model's context of {context} leaves beside {COMPLETION}={completion}"
    suspects = _may_be_longer(env, rows, continuation, most)
    if policy is LongPrompts.error and len(rows) > ALL_UP_TO and len(suspects) > SAMPLE:
        suspects = suspects[:: -(-len(suspects) // SAMPLE)]
    long = {number: length for number in suspects if (length := _length(env, rows[number], continuation)) > most}
    if not long:
        return None
    of = f" of {env.source_name}" if env.source_name else ""
    finding = (
        f"{len(long):,} of {counted(len(rows), 'prompt')} of the split {env.split}{of} have more tokens than {reason}"
    )
    if policy is LongPrompts.skip:
        env.drop_rows(list(long), finding)
        return f"{finding}: left out"
    first = [f"  {env.where(number)}: {length:,} tokens" for number, length in list(long.items())[:SHOWN]]
    more = [f"  and {len(long) - SHOWN:,} more"] if len(long) > SHOWN else []
    skipping = "long_prompts=skip to this source" if env.source_name else "env.long_prompts=skip"
    limit = "raise the limit"
    if by_context and (room := completion + most - max(long.values())) > 0:
        limit = f"type {COMPLETION}={room} or less"
    advice = f"{limit}, shorten the rows, or add {skipping}"
    raise DataError("\n".join([f"{finding}: {advice}", *first, *more]))


def _look_at_first(env: DatasetChatEnv, settings: EnvSettings, continuation: Continuation) -> None:
    """Raise DataError where the first prompt of an environment that makes its own is too long, tools included."""
    task, most = next(env.order.iter_from(0)), settings.max_prompt_tokens
    if (length := _length(env, task, continuation)) > most:
        tools = " with the descriptions of its tools" if env.tools is not None else ""
        raise DataError(
            f"the first prompt has {length:,} tokens{tools}, more than env.max_prompt_tokens={most}: type "
            f"env.max_prompt_tokens={2 * length}"
        )


def _may_be_longer(env: DatasetChatEnv, rows: Sequence[Any], continuation: Continuation, most: int) -> list[int]:
    """The numbers of rows whose prompt may have more than `most` tokens: a token stands for a byte or more.

    What a template adds to the messages is measured on the first row.
    """
    first = env.opening_messages(rows[0])
    conversation = env.begun(rows[0])
    continuation.begin(conversation)
    added = len(conversation.prompt_text.encode()) - _bytes(first)
    each = max(added, 0) / len(first)
    suspects = []
    for number, row in enumerate(rows):
        messages = env.opening_messages(row)
        if _bytes(messages) + each * max(len(messages), len(first)) > most:
            suspects.append(number)
    return suspects


def _bytes(messages: Sequence[Message]) -> int:
    return sum(len(message["content"].encode()) for message in messages)


def _length(env: DatasetChatEnv, row: Any, continuation: Continuation) -> int:
    conversation = env.begun(row)
    continuation.begin(conversation)
    return len(conversation.prompt_ids)
