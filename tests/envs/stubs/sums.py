# type: ignore
"""A taskset of verifiers 0.4: sums, and replies with which the reward fails."""

import asyncio
import os
import subprocess
import sys
import threading
import time

import verifiers.v1 as vf


class SumTask(vf.Task):
    @vf.reward
    async def right(self, trace):
        reply = trace.last_reply
        if reply == "raise":
            raise RuntimeError("a fault of the reward")
        if reply == "hang":
            await asyncio.sleep(600)
        if reply == "block":
            subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"])
            time.sleep(600)
        if reply == "die":
            print("no more memory", file=sys.stderr, flush=True)
            os._exit(9)
        if reply == "none":
            return {}
        if reply == "nan":
            return float("nan")
        print("a line on stdout that is no answer")
        return float(reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def form(self, trace, task):
        assert threading.current_thread() is threading.main_thread()
        parts = {"mean": float(trace.num_output_tokens < 3), "digits": float(trace.last_reply.isdigit())}
        return {} if trace.last_reply == "none" else parts


class Sums(vf.Taskset):
    ARGUMENTS = {"count": 12}  # noqa: RUF012

    def load(self):
        for n in range(self.config.count):
            data = vf.TaskData(idx=n, prompt=f"What is {n} + 1?", system_prompt="Be brief.", answer=str(n + 1))
            yield SumTask(data, self.config.task)
