"""The rows of a training, and whether its rewards tell a good reply from a bad one."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from itertools import islice
from statistics import fmean
from typing import Any

from rlpost.doctor.findings import Findings
from rlpost.envs.build import build_training_env
from rlpost.envs.cases import cases_of
from rlpost.envs.dataset import DatasetEnv
from rlpost.envs.dataset_chat import DatasetChatEnv
from rlpost.envs.proof import played, prove
from rlpost.errors import DataError
from rlpost.rewards.apart import WorkerReward
from rlpost.rewards.attack import Attack, Verdict, failing_alike
from rlpost.rewards.attacks import NEED_GOLD, attack_reward
from rlpost.rewards.builtin import BUILT_IN
from rlpost.settings.commands import SampledSettings
from rlpost.text import counted

ROWS = 8  # that are tried
PROMPTS_COMPARED = 20_000  # rows among which the same prompt is looked for
ATTACK_SECONDS = 10.0  # for a call of a reward that is attacked


def look_at_rows(findings: Findings, env: DatasetChatEnv, settings: SampledSettings) -> None:
    """How many prompts are there, how many of them different, and are they drawn alike for one seed?"""
    for part in env.parts:
        _count(findings, part, settings)
    drawn = [_first_prompts(settings) for _ in range(2)]
    if drawn[0] != drawn[1]:
        findings.fail(
            "seed", f"seed={settings.seed} draws other prompts each time", "a plugin's environment draws unseeded"
        )
    else:
        findings.ok("seed", f"seed={settings.seed} draws the same prompts each time")


def look_at_held_out(findings: Findings, env: DatasetChatEnv, held_out: DatasetChatEnv) -> None:
    """Is what will be called held out trained on?"""
    count = held_out.num_tasks
    shared = sum(part.prompts_shared_with(part_of) for part, part_of in zip(held_out.parts, env.parts, strict=True))
    if shared:
        text = f"{shared:,} of {counted(count, 'held-out prompt')} are trained on too"
        findings.warn("held out", text, "take them out of one of the two")
    else:
        findings.ok("held out", f"{counted(count, 'prompt')}, none of them trained on")


def look_at_gold(findings: Findings, env: DatasetChatEnv) -> None:
    """Do gold replies earn more than wrong ones, and those of nothing?"""
    for part in env.parts:
        if part.has_gold:
            _prove(findings, part)
        else:
            about = f"gold of {part.source_name}" if part.source_name else "gold"
            findings.ok(
                about, "no reply is right or wrong (the rows have no answer, or env.gold=false): nothing to prove"
            )


def attack_rewards(findings: Findings, env: DatasetChatEnv) -> bool:
    """What do the user's own reward functions pay for that they should not? Returns whether they score at all."""
    scored = True
    for part in env.parts:
        if not isinstance(part, DatasetEnv) or part.rewards is None:
            continue
        for reward in part.rewards.functions:
            if isinstance(reward, WorkerReward) and reward.reference not in BUILT_IN:
                scored = _attack(findings, part, reward) and scored
    return scored


def _count(findings: Findings, env: DatasetChatEnv, settings: SampledSettings) -> None:
    about = f"rows of {env.source_name}" if env.source_name else "rows"
    rows: Sequence[Mapping[str, Any]] = env.rows
    if not len(rows):
        findings.ok(about, "made as they are drawn")
        return
    looked_at = list(islice(rows, PROMPTS_COMPARED))
    different = len({repr(env.opening_messages(row)) for row in looked_at})
    count = counted(len(rows), "prompt")
    if different == 1 and len(looked_at) > 1:
        findings.fail(
            about, f"all {len(looked_at):,} rows ask the same", "name the column of the prompts, or correct it"
        )
    elif different < len(looked_at):
        text = f"{len(looked_at) - different:,} of {counted(len(looked_at), 'row')} ask what another one asks"
        findings.warn(about, text, "remove them, or ignore this if it is intended")
    elif len(rows) < settings.prompts_per_step and len(env.parts) == 1:
        text = f"{count}, and prompts_per_step={settings.prompts_per_step} takes some of them twice a step"
        findings.warn(about, text, "lower prompts_per_step, or give more rows")
    else:
        drawn = settings.prompts_per_step * getattr(settings, "steps", 1)
        findings.ok(about, f"{count}, all different; {drawn:,} are drawn, {drawn / len(rows):.2g} passes")


def _first_prompts(settings: SampledSettings) -> list[str]:
    with contextlib.closing(build_training_env(settings)) as env:
        env.start()
        return [repr(conversation.messages) for conversation in env.draw(1)]


def _prove(findings: Findings, env: DatasetChatEnv) -> None:
    about = f"gold of {env.source_name}" if env.source_name else "gold"
    try:
        proof = prove(env, ROWS)
        tasks = [task for _, task in islice(env.all_tasks(), ROWS)]
        replies = {"gold": [env.gold_reply(task) for task in tasks]}
    except DataError as error:
        findings.warn(about, f"no gold answers to try the rewards with: {error}", "ignore this if it is intended")
        return
    if not tasks:
        findings.warn(about, "no row has a gold answer to try the rewards with", "ignore this if it is intended")
        return
    replies["wrong"] = [env.corrupted_replies(task)[-1] for task in tasks]
    replies["empty"] = ["" for _ in tasks]
    earned = {
        kind: [
            reward
            for task, reply in zip(tasks, said, strict=True)
            if (reward := played(env, task, reply).reward) is not None
        ]
        for kind, said in replies.items()
    }
    means = {kind: fmean(rewards) for kind, rewards in earned.items() if rewards}
    told = ", ".join(f"{kind} {mean:.3g}" for kind, mean in means.items())
    if len(means) > 1 and len(set(means.values())) == 1:
        findings.fail(
            about,
            f"gold, wrong and empty replies earn alike ({told})",
            "correct the reward, or the column of the answers",
        )
    elif proof.failures:
        findings.fail(
            about, f"{len(proof.failures)} of {proof.replies} replies are scored wrongly; {proof.failures[0]}"
        )
    elif not proof.tells_apart:
        findings.fail(about, f"gold replies earn no more than the others ({told})", "correct the reward")
    else:
        findings.ok(about, f"of {counted(len(tasks), 'row')}: {told}")


def _attack(findings: Findings, env: DatasetEnv, reward: WorkerReward) -> bool:
    about = f"reward {reward.reference}"
    try:
        cases = cases_of(env, ROWS)
    except DataError as error:
        findings.warn(about, f"it is not attacked: {error}", "rlpost reward test, with rows that have answers")
        return True
    columns = list(dict.fromkeys(str(column) for case in cases for column in case.columns))
    attacked = reward.served_by("rlpost.rewards.probe:serve")
    seconds = min(ATTACK_SECONDS, env.settings.reward_timeout_seconds)
    checks = attack_reward(Attack(attacked, cases, columns, False, seconds, env.has_gold))
    failing = [check for check in failing_alike(checks) if check.verdict is not Verdict.ok]
    advice = f"rlpost reward test {reward.reference} shows the replies"
    if any(check.name in NEED_GOLD for check in failing):
        advice += "; if no reply is right or wrong (length, style): add env.gold=false"
    for check in failing:
        tell = findings.fail if check.verdict is Verdict.fault else findings.warn
        tell(about, f"{check.name}: {check.reason}", advice)
    if not failing:
        left_out = "" if env.has_gold else "; attacks that need a right answer are left out"
        findings.ok(about, f"it withstands {len(checks)} attacks{left_out}")
    return len(checks) > 1
