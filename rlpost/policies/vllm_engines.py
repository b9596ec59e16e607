"""The ways of running vLLM, each with the same few methods.

vLLM is imported when an engine starts, never before.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import shutil
import signal
import tempfile
import threading
import time
import uuid
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rlpost.loop_thread import LoopThread
from rlpost.settings import Engine, VLLMSettings

TELL_EVERY = 0.5  # seconds
SOCKETS = "VLLM_RPC_BASE_PATH"  # the folder that vLLM makes its sockets in

_setting = threading.RLock()  # held while variables are set: again by the thread that sets several

NamedWeights = Iterable[tuple[str, torch.Tensor]]


class VLLMEngine(ABC):
    """What `vLLMWrapper` asks of every way of running vLLM."""

    llm: Any  # vLLM's own class
    told: Callable[[int, int], None] | None = None  # the completions that have ended, and the tokens of all so far

    @abstractmethod
    def generate(self, prompts: list[list[int]], params: list[Any], adapter: Any | None) -> list[Any]:
        """vLLM's output for each prompt, in their order; tells how far it is."""

    def load_weights(self, weights: NamedWeights) -> None:
        """Replace every weight and clear the prefix cache; ends when both are done."""
        with exchange_folder() as folder:
            save_one_by_one(weights, folder)
            path = {"weights_path": str(folder)}
            self._do("the weight push", lambda: self.llm.collective_rpc("reload_weights", kwargs=path))
        self.reset_prefix_cache()

    def load_adapter(self, adapter: Any) -> None:
        """Load an adapter and clear the prefix cache; ends when both are done."""
        if not self._do("the adapter to be loaded", lambda: self._add_lora(adapter)):
            raise RuntimeError("it was not loaded")
        self.reset_prefix_cache()

    def call_workers(self, method: str, *args: Any) -> list[Any]:
        """Call `method` of each of the engine's workers; what each of them returned."""
        return self._do(f"the workers' {method}", lambda: self.llm.collective_rpc(method, args=args))

    def reset_prefix_cache(self) -> None:
        """Forget the keys and values of earlier weights."""
        if not self._do("the prefix cache to be reset", lambda: self.llm.reset_prefix_cache()):
            raise RuntimeError("the prefix cache could not be reset")

    @abstractmethod
    def close(self) -> None:
        """Stop what was started."""

    @abstractmethod
    def _do(self, waited_for: str, work: Callable[[], Any]) -> Any:
        """What `work` comes to; a message about a wait that is too long says what was `waited_for`."""

    @abstractmethod
    def _add_lora(self, adapter: Any) -> Any:
        """vLLM's method, in `work` of `_do`."""


class InProcessEngine(VLLMEngine):
    """`vllm.LLM` with its engine in this process; tensors are handed over as they are."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def generate(self, prompts: list[list[int]], params: list[Any], adapter: Any | None) -> list[Any]:
        """See `VLLMEngine`."""
        work = f"{len(prompts)} completions"
        return self._do(work, lambda: generate_telling(self.llm, prompts, params, adapter, self.told))

    def load_weights(self, weights: NamedWeights) -> None:
        """See `VLLMEngine`."""
        self.llm.collective_rpc(
            "reload_weights", kwargs={"weights_iterator": iter(weights), "is_checkpoint_format": True}
        )
        self.reset_prefix_cache()

    def close(self) -> None:
        """See `VLLMEngine`."""
        self.llm.llm_engine.engine_core.shutdown()

    def _do(self, waited_for: str, work: Callable[[], Any]) -> Any:
        return work()

    def _add_lora(self, adapter: Any) -> Any:
        return self.llm.llm_engine.add_lora(adapter)


class SeparateEngine(InProcessEngine):
    """A caller's `vllm.LLM` whose engine runs in a process of its own, as it does by default.

    Its methods wait for ever when that process dies, so they are called from a thread that is not
    waited for longer than the process lives, nor than `timeout_seconds`.
    """

    def __init__(self, llm: Any, timeout_seconds: float) -> None:
        super().__init__(llm)
        self._timeout = timeout_seconds

    load_weights = VLLMEngine.load_weights  # by way of a folder

    def _do(self, waited_for: str, work: Callable[[], Any]) -> Any:
        try:
            return wait_for(in_thread(work), self._timeout, waited_for, self._died)
        except Exception as error:
            if self._died():  # which vLLM may call no more than "cancelled"
                raise RuntimeError(f"the engine's process died during the wait for {waited_for}") from error
            raise

    def _died(self) -> bool:
        core = self.llm.llm_engine.engine_core
        return bool(getattr(getattr(core, "resources", None), "engine_dead", False))


class OwnProcessEngine(VLLMEngine):
    """`AsyncLLM`, driven from an event loop in a thread; every wait has a deadline.

    It is stopped by `close`, and else when nobody holds it any more or when Python ends.
    """

    def __init__(self, arguments: dict[str, Any], timeout_seconds: float) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._timeout = timeout_seconds
        self._requests_sent = 0
        self._running: list[Any] = []  # the AsyncLLM, while it runs
        self._thread = LoopThread("rlpost-vllm")
        sockets = socket_folder()
        self._stop = weakref.finalize(self, stop_async_engine, self._running, self._thread, sockets)

        async def start() -> AsyncLLM:
            unreached_by_the_terminal()
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

        try:
            with environment(SOCKETS, os.environ.get(SOCKETS, str(sockets))):
                self._running.append(self._do("the engine to start", start))
        except BaseException:
            self._stop()
            raise
        atexit.register(self._stop)  # now: before multiprocessing, which was imported earlier, kills what it has begun

    @property
    def llm(self) -> Any:
        """The AsyncLLM. Raises RuntimeError once it is closed."""
        if not self._running:
            raise RuntimeError("the engine is closed")
        return self._running[0]

    @property
    def model_config(self) -> Any:
        """vLLM's configuration of the model that runs."""
        return self.llm.model_config

    def generate(self, prompts: list[list[int]], params: list[Any], adapter: Any | None) -> list[Any]:
        """See `VLLMEngine`."""

        ended = tokens = 0

        async def one(ids: list[int], how: Any, name: str) -> Any:
            nonlocal ended, tokens
            final: Any = None
            async for output in self.llm.generate({"prompt_token_ids": ids}, how, name, lora_request=adapter):
                final = output
            ended += 1
            tokens += len(final.outputs[0].token_ids)
            if self.told is not None:
                self.told(ended, tokens)
            return final

        async def all_of_them() -> list[Any]:
            names = [str(self._requests_sent + i) for i in range(len(prompts))]
            self._requests_sent += len(prompts)
            return await asyncio.gather(*map(one, prompts, params, names))

        return self._do(f"{len(prompts)} completions", all_of_them)

    def close(self) -> None:
        """See `VLLMEngine`."""
        self._stop()
        atexit.unregister(self._stop)

    def _do(self, waited_for: str, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        return wait_for(self._thread.submit(work()), self._timeout, waited_for, self._died)

    def _died(self) -> bool:
        return bool(self._running) and self.llm.errored

    def _add_lora(self, adapter: Any) -> Any:
        return self.llm.add_lora(adapter)


def generate_telling(
    llm: Any, prompts: list[list[int]], params: list[Any], adapter: Any | None, told: Callable[[int, int], None] | None
) -> list[Any]:
    """What `llm.generate` gives; `told` is called about twice a second, as `VLLMEngine.told` says."""
    inputs: list[Any] = [{"prompt_token_ids": ids} for ids in prompts]
    if told is None:
        return llm.generate(inputs, params, use_tqdm=False, lora_request=adapter)
    llm.enqueue(inputs, params, use_tqdm=False, lora_request=adapter)
    engine = llm.llm_engine
    ended: list[Any] = []
    tokens, told_at = 0, time.monotonic()
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                ended.append(output)
                tokens += len(output.outputs[0].token_ids)
        if time.monotonic() - told_at >= TELL_EVERY:
            told(len(ended), tokens + tokens_under_way(engine))
            told_at = time.monotonic()
    told(len(ended), tokens)
    return sorted(ended, key=lambda output: int(output.request_id))


def tokens_under_way(engine: Any) -> int:
    """Tokens of the completions that an LLMEngine has begun and not ended."""
    states = engine.output_processor.request_states.values()
    return sum(state.detokenizer.num_output_tokens() for state in states if state.detokenizer is not None)


def unreached_by_the_terminal() -> None:
    """Let what this thread starts from now on miss Ctrl-C and a closed terminal, which are for the whole program.

    It ends when this process ends it: what is under way can be finished.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGHUP))


def stop_async_engine(running: list[Any], thread: LoopThread, sockets: Path) -> None:
    """Shut the AsyncLLM in `running` down, which is let go of: vLLM's own end fails where it comes with Python's."""
    thread.close()  # first: the tasks in it would take the end of the engine's process for its death
    try:
        if running:
            running.pop().shutdown()
    finally:
        shutil.rmtree(sockets, ignore_errors=True)


def socket_folder() -> Path:
    """A folder for an engine's sockets, which vLLM does not remove; the path of a socket has to be a short one."""
    usual = Path(tempfile.gettempdir())
    room = 107 - len("/rlpost-12345678/") - len(str(uuid.uuid4()))  # 107: Linux's longest path of a socket
    return Path(tempfile.mkdtemp(prefix="rlpost-", dir=usual if len(bytes(usual)) <= room else "/tmp"))


@contextlib.contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """A variable of the environment that is set for a while, for the processes that start meanwhile.

    The environment is that of all threads: another one that sets a variable waits until this one is set back.
    """
    with _setting:
        before = os.environ.get(name)
        os.environ[name] = value
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before


def in_thread(work: Callable[[], Any]) -> concurrent.futures.Future[Any]:
    """`work`, under way in a thread that may never end."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  raised again in the thread that waits
            future.set_exception(error)

    threading.Thread(target=run, name="rlpost-vllm-call", daemon=True).start()
    return future


def wait_for(
    future: concurrent.futures.Future[Any],
    timeout_seconds: float,
    waited_for: str,
    died: Callable[[], bool] = lambda: False,
) -> Any:
    """The future's result. Raises TimeoutError past the limit, RuntimeError once the engine's process has `died`."""
    deadline = time.monotonic() + timeout_seconds
    while not concurrent.futures.wait([future], timeout=1.0).done:
        if died():
            # a request sent to a process that has just died can be forgotten by vLLM, and never ends
            future.cancel()
            raise RuntimeError(f"the engine's process died during the wait for {waited_for}")
        if time.monotonic() > deadline:
            future.cancel()
            raise TimeoutError(
                f"waited {timeout_seconds:.0f} s for {waited_for}; policy.timeout_seconds sets the limit"
            )
    return future.result()


def start_engine(arguments: dict[str, Any], settings: VLLMSettings) -> VLLMEngine:
    """Start vLLM as `settings.engine` says."""
    set_environment(in_process=settings.engine is Engine.in_process)
    if settings.engine is Engine.own_process:
        return OwnProcessEngine(arguments, settings.timeout_seconds)
    from vllm import LLM

    return InProcessEngine(LLM(**arguments))


def set_environment(*, in_process: bool) -> None:
    """The variables that vLLM reads when an engine starts."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # in whole GiB, and it would replace what the arguments say
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if in_process else "1"


def engine_around(llm: Any, timeout_seconds: float) -> InProcessEngine | SeparateEngine:
    """The engine of a `vllm.LLM` that somebody else built and closes."""
    from vllm.v1.engine.core_client import InprocClient

    in_process = isinstance(llm.llm_engine.engine_core, InprocClient)
    return InProcessEngine(llm) if in_process else SeparateEngine(llm, timeout_seconds)


def save_one_by_one(weights: NamedWeights, folder: Path) -> None:
    """Write a file a weight: tensors cannot cross to another process, a folder can, and no two are held at once."""
    for number, (name, weight) in enumerate(weights):
        save_file({name: weight.detach().contiguous().cpu()}, folder / f"{number:05d}.safetensors")


def tokenizer_of(folder: Path) -> Any:
    """The tokenizer in a model's folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


@contextlib.contextmanager
def exchange_folder() -> Iterator[Path]:
    """A folder in memory where there is one, for what goes to an engine; removed afterwards."""
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="rlpost-weights-", dir=shared if shared.is_dir() else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
