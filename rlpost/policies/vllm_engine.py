"""The ways of running vLLM, each an engine with the same few methods, and what surrounds vLLM's own process.

vLLM is imported when an engine starts, never before.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import itertools
import os
import shutil
import signal
import tempfile
import threading
import time
import uuid
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rlpost.errors import PolicyError
from rlpost.files import MORE_SHARED, memory_folder
from rlpost.model.weights import EMBEDDINGS, save_one_by_one
from rlpost.remote.child import guard
from rlpost.remote.exchange import exchange_folder, with_room
from rlpost.remote.loop import LoopThread
from rlpost.settings import Engine, VLLMSettings
from rlpost.text import readable

ENGINE_SHARES = 160 << 20  # bytes of shared memory that an engine in its own process takes
SOCKETS = "VLLM_RPC_BASE_PATH"  # variable that names the folder of vLLM's sockets
PROCESSES = "VLLM_ENABLE_V1_MULTIPROCESSING"  # variable: whether an engine may have processes of its own
SLEEPING = ("weights", "kv_cache")  # vLLM's tags of what it takes off a GPU when it sleeps
HEAD = "lm_head.weight"  # in a checkpoint; most models with a tied head leave it out
TELL_EVERY = 0.5  # seconds between two progress reports

NamedWeights = Iterable[tuple[str, torch.Tensor]]


def start_engine(arguments: dict[str, Any], settings: VLLMSettings) -> VLLMEngine:
    """Start vLLM as `settings.engine` says, but always in its own process if it runs transformers' own classes.

    vLLM rewrites such a class for torch.compile, which would break models of that class in this process, first of all
    the trained one.
    """
    guard()
    set_environment()
    if settings.engine is Engine.in_process:
        with environment(PROCESSES, "0"):
            from vllm import LLM, EngineArgs

            if not EngineArgs(**arguments).create_model_config().using_transformers_backend():
                return InProcessEngine(LLM(**arguments))
    return OwnProcessEngine(arguments, settings.timeout_seconds)


def engine_around(llm: Any, timeout_seconds: float) -> InProcessEngine | SeparateEngine:
    """The engine of a `vllm.LLM` that somebody else built and closes."""
    from vllm.v1.engine.core_client import InprocClient

    in_process = isinstance(llm.llm_engine.engine_core, InprocClient)
    return InProcessEngine(llm) if in_process else SeparateEngine(llm, timeout_seconds)


class VLLMEngine(ABC):
    """The interface through which `vLLMWrapper` runs vLLM."""

    continuous = False  # takes requests one by one, also while weights change
    llm: Any  # vLLM's own class
    adapter: Any | None = None  # vLLM's request for the adapter that completions are sampled with
    on_progress: Callable[[int, int], None] | None = None  # called with completions ended and tokens sampled
    asleep: tuple[str, ...] = ()  # what is off the GPU: of SLEEPING
    _waking = threading.Lock()

    @abstractmethod
    def generate(self, prompts: list[list[int]], params: list[Any]) -> list[Any]:
        """vLLM's output for each prompt, in order; reports progress to `on_progress`."""

    def submit(self, prompt: list[int], params: Any) -> concurrent.futures.Future[Any]:
        """Sample one prompt beside others, if `continuous`; cancelling the future aborts the request."""
        raise NotImplementedError(f"{type(self).__name__} takes whole batches")

    @property
    def core(self) -> Any:
        """vLLM's LLMEngine or AsyncLLM."""
        return self.llm.llm_engine

    @property
    def model_config(self) -> Any:
        """vLLM's configuration of the model that runs."""
        return self.core.model_config

    @property
    def weights_label(self) -> str:
        """The name of the current weights in the spans of an output, if `continuous`."""
        return "default"  # vLLM's own name for its first weights

    def progress(self) -> tuple[Any, ...]:
        """A value that changes whenever submitted requests make progress."""
        return ()

    def died(self) -> bool:
        """Whether the engine's process is known to be dead."""
        return False

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """A block in which weights or the adapter change; later requests read no keys and values of earlier weights."""
        yield
        self.reset_prefix_cache()

    def load_weights(self, weights: NamedWeights) -> None:
        """Replace every weight, inside `changing`; returns when that is done."""
        with exchange_folder() as folder:
            save_one_by_one(weights, folder, self.model_config.dtype)
            self.load_folder(folder)

    def load_folder(self, folder: Path) -> None:
        """Replace every weight by the *.safetensors of `folder`, inside `changing`."""
        path = {"weights_path": str(folder)}
        self._do("the weight push", lambda: self.llm.collective_rpc("reload_weights", kwargs=path))

    def load_adapter(self, adapter: Any) -> None:
        """Load an adapter, inside `changing`, and sample with it from now on."""
        if not self._do("the adapter to be loaded", lambda: self.core.add_lora(adapter)):
            raise RuntimeError("it was not loaded")
        # without load_inplace, which would read the folder again: it may be removed
        self.adapter = type(adapter)(adapter.lora_name, adapter.lora_int_id, adapter.lora_path)

    def call_workers(self, method: str, *args: Any) -> list[Any]:
        """Call `method` of each of the engine's workers and return their results."""
        return self._do(f"the workers' {method}", lambda: self.llm.collective_rpc(method, args=args))

    def reset_prefix_cache(self) -> None:
        """Forget the keys and values of earlier weights."""
        if not self._do("the prefix cache to be reset", lambda: self.llm.reset_prefix_cache()):
            raise RuntimeError("the prefix cache could not be reset")

    def rest(self, *, sleeps: bool, drops_weights: bool = False) -> None:
        """Free memory until `wake`, while nothing is in flight: on a CPU the pages of the KV cache.

        With `sleeps`, on a GPU, free the cache and move the weights to host memory, or drop them if a push will bring
        them before anything is sampled; vLLM must have been started with `enable_sleep_mode`.
        """
        if not torch.cuda.is_available():
            self.reset_prefix_cache()
            self.call_workers("give_back_kv_cache")
        elif sleeps and not self.asleep:
            self.reset_prefix_cache()
            self._do("the engine to sleep", lambda: self.llm.sleep(level=2 if drops_weights else 1))
            self.asleep = SLEEPING

    def wake(self, *parts: str) -> None:
        """Bring back `parts` of what `rest` took off a GPU, or all; a CPU's pages come back by themselves."""
        with self._waking:  # requests may come from several threads
            tags = [part for part in self.asleep if part in (parts or SLEEPING)]
            if tags:
                self._do("the engine to wake", lambda: self.llm.wake_up(tags=tags))
                self.asleep = tuple(part for part in self.asleep if part not in tags)

    @abstractmethod
    def close(self) -> None:
        """Stop the engine."""

    @abstractmethod
    def _do(self, waited_for: str, work: Callable[[], Any]) -> Any:
        """Run `work` with a timeout; `waited_for` names it in the error."""


class InProcessEngine(VLLMEngine):
    """`vllm.LLM` with its engine in this process; tensors are passed to it directly."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def generate(self, prompts: list[list[int]], params: list[Any]) -> list[Any]:
        """See `VLLMEngine`."""
        work = f"{len(prompts)} completions"
        return self._do(work, lambda: _generate_telling(self.llm, prompts, params, self.adapter, self.on_progress))

    def load_weights(self, weights: NamedWeights) -> None:
        """See `VLLMEngine`."""
        self.llm.collective_rpc(
            "reload_weights", kwargs={"weights_iterator": iter(weights), "is_checkpoint_format": True}
        )

    def close(self) -> None:
        """See `VLLMEngine`."""
        self.llm.llm_engine.engine_core.shutdown()

    def _do(self, waited_for: str, work: Callable[[], Any]) -> Any:
        return work()


class SeparateEngine(InProcessEngine):
    """A caller's `vllm.LLM` whose engine runs in a process of its own, as it does by default.

    Its methods wait for ever when that process dies, so a thread calls them, and this one waits for it until the
    process dies or `timeout_seconds` have passed.
    """

    def __init__(self, llm: Any, timeout_seconds: float) -> None:
        super().__init__(llm)
        self._timeout = timeout_seconds

    load_weights = VLLMEngine.load_weights  # by way of a folder

    def _do(self, waited_for: str, work: Callable[[], Any]) -> Any:
        try:
            return wait_for(in_thread(work), self._timeout, waited_for, self.died)
        except Exception as error:
            if self.died():  # which vLLM may call no more than "cancelled"
                raise RuntimeError(f"the engine's process died during the wait for {waited_for}") from error
            raise

    def died(self) -> bool:
        """See `VLLMEngine`."""
        core = self.llm.llm_engine.engine_core
        return bool(getattr(getattr(core, "resources", None), "engine_dead", False))


class OwnProcessEngine(VLLMEngine):
    """`AsyncLLM`, driven from an event loop in a thread; every wait has a deadline.

    `close` stops it; so do its garbage collection and the exit of Python.
    """

    continuous = True

    def __init__(self, arguments: dict[str, Any], timeout_seconds: float) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._timeout = timeout_seconds
        self._names = itertools.count()  # of requests
        self._changes = 0  # of weights so far
        self._paused = False
        self._again: set[str] = set()  # names of requests that were aborted to be restarted
        self._ended = 0  # requests
        self._running: list[Any] = []  # the AsyncLLM, while it runs
        self._thread = LoopThread("rlpost-vllm")
        sockets = _socket_folder()
        self._stop = weakref.finalize(self, _stop_async_engine, self._running, self._thread, sockets)

        async def start() -> AsyncLLM:
            # Ctrl-C and a closed terminal reach no process that this thread starts: this process ends them itself, so
            # that work in flight can be finished
            signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGHUP))
            llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
            await llm.get_supported_tasks()  # cached, so that `_one` need not wait for them
            return llm

        try:
            # on a CPU this keeps vLLM from a second process below AsyncLLM's one, which would import everything again,
            # be bound to the same core as every other engine's, and outlive the signal to end
            with environment(SOCKETS, os.environ.get(SOCKETS, str(sockets))), environment(PROCESSES, "0"):
                self._running.append(self._do("the engine to start", start))
        except BaseException:
            self._stop()
            raise
        atexit.register(self._stop)  # run before the exit function of multiprocessing, which kills its processes

    @property
    def llm(self) -> Any:
        """The AsyncLLM. Raises RuntimeError once it is closed."""
        if not self._running:
            raise RuntimeError("the engine is closed")
        return self._running[0]

    @property
    def core(self) -> Any:
        """See `VLLMEngine`."""
        return self.llm

    def generate(self, prompts: list[list[int]], params: list[Any]) -> list[Any]:
        """See `VLLMEngine`."""

        ended = tokens = 0

        async def one(ids: list[int], how: Any) -> Any:
            nonlocal ended, tokens
            final = await self._one(ids, how)
            ended += 1
            tokens += len(final.outputs[0].token_ids)
            if self.on_progress is not None:
                self.on_progress(ended, tokens)
            return final

        async def all_of_them() -> list[Any]:
            return await asyncio.gather(*map(one, prompts, params))

        return self._do(f"{len(prompts)} completions", all_of_them)

    def submit(self, prompt: list[int], params: Any) -> concurrent.futures.Future[Any]:
        """See `VLLMEngine`."""
        assert self.llm  # raises once it is closed
        return self._thread.submit(self._one(prompt, params))

    async def _one(self, ids: list[int], how: Any) -> Any:
        """Sample one prompt; restarts the request when `_go_on` aborts it, and aborts it when cancelled."""
        from vllm.inputs.engine import tokens_input

        while True:
            name = str(next(self._names))
            # the salt keeps it from keys and values of other weights. vLLM knows the request before anything else runs
            # in the loop, so `_go_on` finds every request that has the old salt
            salted = tokens_input(ids, cache_salt=self.weights_label)
            final: Any = None
            try:
                async for output in self.llm.generate(salted, how, name, lora_request=self.adapter):
                    final = output
            finally:
                again = name in self._again
                self._again.discard(name)
            self._ended += 1
            if not again:
                return final

    @property
    def weights_label(self) -> str:
        """See `VLLMEngine`."""
        return str(self._changes) if self._changes else super().weights_label

    def progress(self) -> tuple[Any, ...]:
        """See `VLLMEngine`; weight changes have deadlines of their own."""
        tokens = sum(tokens_in_flight(llm) for llm in self._running[:1])
        return self._ended, tokens, time.monotonic() if self._paused else 0.0

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """See `VLLMEngine`; requests in flight are kept and continue with the new weights after the block.

        If the block fails they stay paused: the engine may hold a mixture of weights and must be closed.
        """
        self._paused = True
        self._do("generation to be paused", lambda: self.llm.pause_generation(mode="keep", clear_cache=False))
        yield
        self._do("generation to go on", self._go_on)
        self._paused = False

    async def _go_on(self) -> None:
        """Resume requests, and restart those without any sampled token, with another salt.

        The label is exact: the engine writes it into the output of each step, and only this method changes it, after
        every step that was running at the pause has ended. Nothing is counted in this process, which some of those
        tokens may not have reached yet; a request whose first token is among them is restarted too, and the tokens
        on their way belong to no request any more.
        """
        llm = self.llm
        self._changes += 1
        states = llm.output_processor.request_states.values()
        unfit = [state for state in states if self.adapter is not None and state.lora_request is None]
        unbegun = [state for state in states if state.detokenizer is None or not state.detokenizer.num_output_tokens()]
        names = {state.external_req_id for state in (*unfit, *unbegun)}
        self._again |= names
        await llm.update_weight_version(self.weights_label)
        if names:
            await llm.abort(names)
        await llm.resume_generation()

    def close(self) -> None:
        """See `VLLMEngine`."""
        self._stop()
        atexit.unregister(self._stop)

    def _do(self, waited_for: str, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        return wait_for(self._thread.submit(work()), self._timeout, waited_for, self.died)

    def died(self) -> bool:
        """See `VLLMEngine`."""
        return bool(self._running) and self.llm.errored


def _generate_telling(
    llm: Any,
    prompts: list[list[int]],
    params: list[Any],
    adapter: Any | None,
    on_progress: Callable[[int, int], None] | None,
) -> list[Any]:
    """Like `llm.generate`, but calls `on_progress` about twice a second (see `VLLMEngine.on_progress`)."""
    inputs: list[Any] = [{"prompt_token_ids": ids} for ids in prompts]
    if on_progress is None:
        return llm.generate(inputs, params, use_tqdm=False, lora_request=adapter)
    llm.enqueue(inputs, params, use_tqdm=False, lora_request=adapter)
    engine = llm.llm_engine
    ended: list[Any] = []
    tokens, reported_at = 0, time.monotonic()
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                ended.append(output)
                tokens += len(output.outputs[0].token_ids)
        if time.monotonic() - reported_at >= TELL_EVERY:
            on_progress(len(ended), tokens + tokens_in_flight(engine))
            reported_at = time.monotonic()
    on_progress(len(ended), tokens)
    return sorted(ended, key=lambda output: int(output.request_id))


def tokens_in_flight(engine: Any) -> int:
    """Tokens sampled so far of the completions that an LLMEngine has in flight."""
    states = list(engine.output_processor.request_states.values())  # a copy: another thread may be adding to it
    return sum(state.detokenizer.num_output_tokens() for state in states if state.detokenizer is not None)


# Around vLLM's process: its environment, its sockets, waits with a deadline, its errors

_setting = threading.RLock()  # held while `environment` has a variable set


def set_environment() -> None:
    """Set the variables that vLLM reads when an engine starts."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # would override the argument, in whole GiB


@contextlib.contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable inside the block, for processes that start there.

    All threads share the environment, so another thread that calls this waits until the block has ended.
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


def _socket_folder() -> Path:
    """A folder for an engine's sockets, which vLLM does not remove; paths of sockets must be short."""
    usual = Path(tempfile.gettempdir())
    room = 107 - len("/rlpost-12345678/") - len(str(uuid.uuid4()))  # 107: Linux's longest path of a socket
    return Path(tempfile.mkdtemp(prefix="rlpost-", dir=usual if len(bytes(usual)) <= room else "/tmp"))


def _stop_async_engine(running: list[Any], thread: LoopThread, sockets: Path) -> None:
    """Shut down the AsyncLLM in `running` and drop it: its own finalizer fails at the exit of Python."""
    thread.close()  # first: its tasks would report the end of the engine's process as a crash
    try:
        if running:
            running.pop().shutdown()
    finally:
        shutil.rmtree(sockets, ignore_errors=True)


def in_thread(work: Callable[[], Any]) -> concurrent.futures.Future[Any]:
    """Run `work` in a thread, which may never end."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  raised again in the waiting thread
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
            # vLLM can forget a request that it sends to a dying process: that future would never end
            future.cancel()
            raise RuntimeError(f"the engine's process died during the wait for {waited_for}")
        if time.monotonic() > deadline:
            future.cancel()
            raise TimeoutError(
                f"waited {timeout_seconds:.0f} s for {waited_for}; policy.timeout_seconds sets the limit"
            )
    return future.result()


def first_line(error: Any) -> str:
    """Why vLLM failed, in one line; for pydantic, whose first line counts the errors, the first error's message."""
    text = str(error.errors()[0]["msg"] if hasattr(error, "errors") else error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def small_memory() -> str:
    """A hint for an error message if too little shared memory is left for an engine's process; else empty."""
    shared = memory_folder()
    free = shutil.disk_usage(shared).free
    if free >= ENGINE_SHARES:
        return ""
    takes = f"an engine in its own process takes {readable(ENGINE_SHARES)} there"
    return f"; {shared} has {readable(free)} free, and {takes}: {MORE_SHARED}"


@contextlib.contextmanager
def with_head(folder: Path, weights: Mapping[str, torch.Tensor]) -> Iterator[Path]:
    """`folder`, whose tensors are `weights`, or a folder of links to its files plus the tied head they leave out.

    An engine may store the head apart from the embedding (vLLM does on a CPU) and keeps whatever no file holds.
    Raises PolicyError if no tensor has the name of an embedding.
    """
    if HEAD in weights:
        yield folder
        return
    embeddings = [name for name in weights if name.endswith(EMBEDDINGS)]
    if len(embeddings) != 1:
        raise PolicyError(f"{folder} has no {HEAD}, and no single tensor to tie it to: save it too")
    with exchange_folder() as whole:
        for file in folder.glob("*.safetensors"):
            (whole / file.name).symlink_to(file.resolve())
        head = weights[embeddings[0]]
        save_file({HEAD: head}, with_room(whole / "tied-head.safetensors", head.nbytes))
        yield whole
