"""The ways of running vLLM, each with the same few methods.

vLLM is imported when an engine starts, never before.

What stands around vLLM's own process: its environment and sockets, waits that end, and what is handed over.
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
from rlpost.model.weights import EMBEDDINGS, save_one_by_one
from rlpost.remote.exchange import MORE_SHARED, exchange_folder, memory_folder, with_room
from rlpost.remote.loop import LoopThread
from rlpost.remote.orphans import guard
from rlpost.settings import Engine, VLLMSettings
from rlpost.text import readable

ENGINE_SHARES = 160 << 20  # bytes of shared memory that vLLM takes for an engine in its own process
SOCKETS = "VLLM_RPC_BASE_PATH"  # the folder that vLLM makes its sockets in

HEAD = "lm_head.weight"  # in a checkpoint; left out of most whose head is tied

_setting = threading.RLock()  # held while variables are set: again by the thread that sets several

NamedWeights = Iterable[tuple[str, torch.Tensor]]


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


def set_environment(*, in_process: bool) -> None:
    """The variables that vLLM reads when an engine starts."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # in whole GiB, and it would replace what the arguments say
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if in_process else "1"


def first_line(error: Any) -> str:
    """Why vLLM failed; of pydantic's errors, whose own first line is the number of them, what the first one says."""
    text = str(error.errors()[0]["msg"] if hasattr(error, "errors") else error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def tokenizer_of(folder: Path) -> Any:
    """The tokenizer in a model's folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def small_memory() -> str:
    """What to add to an error where too little memory is left to share with an engine's process; else empty."""
    shared = memory_folder()
    free = shutil.disk_usage(shared).free
    if free >= ENGINE_SHARES:
        return ""
    takes = f"an engine in its own process takes {readable(ENGINE_SHARES)} there"
    return f"; {shared} has {readable(free)} free, and {takes}: {MORE_SHARED}"


@contextlib.contextmanager
def with_head(folder: Path, weights: Mapping[str, torch.Tensor]) -> Iterator[Path]:
    """`folder`, whose tensors are `weights`; or links to its files, and the tied head that they leave out.

    An engine may keep the head apart from the embedding (vLLM does on a CPU), and what no file holds stays as it was.
    Raises PolicyError where no embedding is told by its name.
    """
    if HEAD in weights:
        yield folder
        return
    embeddings = [name for name in weights if name.endswith(EMBEDDINGS)]
    if len(embeddings) != 1:
        raise PolicyError(f"{folder} holds no {HEAD}, and no one tensor that it could be tied to: write it there too")
    with exchange_folder() as whole:
        for file in folder.glob("*.safetensors"):
            (whole / file.name).symlink_to(file.resolve())
        head = weights[embeddings[0]]
        save_file({HEAD: head}, with_room(whole / "tied-head.safetensors", head.nbytes))
        yield whole


TELL_EVERY = 0.5  # seconds


class VLLMEngine(ABC):
    """What `vLLMWrapper` asks of every way of running vLLM."""

    continuous = False  # whether requests can be submitted one by one, and be under way while weights change
    llm: Any  # vLLM's own class
    adapter: Any | None = None  # vLLM's request for the one that completions are sampled with
    told: Callable[[int, int], None] | None = None  # the completions that have ended, and the tokens of all so far
    asleep = False  # whether its weights wait in the machine's memory, and its cache is given back
    _waking = threading.Lock()

    @abstractmethod
    def generate(self, prompts: list[list[int]], params: list[Any]) -> list[Any]:
        """vLLM's output for each prompt, in their order; tells how far it is."""

    def submit(self, prompt: list[int], params: Any) -> concurrent.futures.Future[Any]:
        """vLLM's output for a prompt beside others, where `continuous`; a request that is cancelled is aborted."""
        raise NotImplementedError(f"{type(self).__name__} takes whole batches")

    @property
    def weights_label(self) -> str:
        """What the spans of an output call the weights that sample now, where `continuous`."""
        return "default"  # vLLM's own name for those it has begun with

    def progress(self) -> tuple[Any, ...]:
        """Something else whenever anything came of what was submitted."""
        return ()

    def died(self) -> bool:
        """Whether the engine's process is known to be dead."""
        return False

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Weights, or the adapter, change in the block: what begins later reads no keys and values of earlier ones."""
        yield
        self.reset_prefix_cache()

    def load_weights(self, weights: NamedWeights) -> None:
        """Replace every weight, inside `changing`; ends when that is done."""
        with exchange_folder() as folder:
            save_one_by_one(weights, folder)
            self.load_folder(folder)

    def load_folder(self, folder: Path) -> None:
        """Replace every weight by those in the *.safetensors of `folder`, inside `changing`."""
        path = {"weights_path": str(folder)}
        self._do("the weight push", lambda: self.llm.collective_rpc("reload_weights", kwargs=path))

    def load_adapter(self, adapter: Any) -> None:
        """Load an adapter, inside `changing`, and sample with it from now on."""
        if not self._do("the adapter to be loaded", lambda: self._add_lora(adapter)):
            raise RuntimeError("it was not loaded")
        # its folder may go; a request that said load_inplace would read it again
        self.adapter = type(adapter)(adapter.lora_name, adapter.lora_int_id, adapter.lora_path)

    def call_workers(self, method: str, *args: Any) -> list[Any]:
        """Call `method` of each of the engine's workers; what each of them returned."""
        return self._do(f"the workers' {method}", lambda: self.llm.collective_rpc(method, args=args))

    def reset_prefix_cache(self) -> None:
        """Forget the keys and values of earlier weights."""
        if not self._do("the prefix cache to be reset", lambda: self.llm.reset_prefix_cache()):
            raise RuntimeError("the prefix cache could not be reset")

    def rest(self, *, sleeps: bool) -> None:
        """Give memory back until `wake`, while nothing is under way: on a CPU the pages of the KV cache.

        `sleeps`: on a GPU the cache and the weights, which wait in the machine's memory, as vLLM does where it was
        started with `enable_sleep_mode`.
        """
        if not torch.cuda.is_available():
            self.reset_prefix_cache()
            self.call_workers("give_back_kv_cache")
        elif sleeps and not self.asleep:
            self.reset_prefix_cache()
            self._do("the engine to sleep", lambda: self.llm.sleep(level=1))
            self.asleep = True

    def wake(self) -> None:
        """Be as before `rest`; a CPU's pages come back by themselves."""
        with self._waking:  # requests may come from several threads
            if self.asleep:
                self._do("the engine to wake", lambda: self.llm.wake_up())
                self.asleep = False

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

    def generate(self, prompts: list[list[int]], params: list[Any]) -> list[Any]:
        """See `VLLMEngine`."""
        work = f"{len(prompts)} completions"
        return self._do(work, lambda: generate_telling(self.llm, prompts, params, self.adapter, self.told))

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

    It is stopped by `close`, and else when nobody holds it any more or when Python ends.
    """

    continuous = True

    def __init__(self, arguments: dict[str, Any], timeout_seconds: float) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._timeout = timeout_seconds
        self._names = itertools.count()  # of requests
        self._changes = 0  # of weights, so far
        self._paused = False
        self._again: set[str] = set()  # names of requests that were aborted to begin anew
        self._ended = 0  # requests
        self._running: list[Any] = []  # the AsyncLLM, while it runs
        self._thread = LoopThread("rlpost-vllm")
        sockets = socket_folder()
        self._stop = weakref.finalize(self, stop_async_engine, self._running, self._thread, sockets)

        async def start() -> AsyncLLM:
            unreached_by_the_terminal()
            llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
            await llm.get_supported_tasks()  # which it keeps: see `_one`
            return llm

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

    def generate(self, prompts: list[list[int]], params: list[Any]) -> list[Any]:
        """See `VLLMEngine`."""

        ended = tokens = 0

        async def one(ids: list[int], how: Any) -> Any:
            nonlocal ended, tokens
            final = await self._one(ids, how)
            ended += 1
            tokens += len(final.outputs[0].token_ids)
            if self.told is not None:
                self.told(ended, tokens)
            return final

        async def all_of_them() -> list[Any]:
            return await asyncio.gather(*map(one, prompts, params))

        return self._do(f"{len(prompts)} completions", all_of_them)

    def submit(self, prompt: list[int], params: Any) -> concurrent.futures.Future[Any]:
        """See `VLLMEngine`."""
        assert self.llm  # raises once it is closed
        return self._thread.submit(self._one(prompt, params))

    async def _one(self, ids: list[int], how: Any) -> Any:
        """vLLM's output for a prompt, whose request begins anew where `_go_on` says so; aborted when cancelled."""
        from vllm.inputs.engine import tokens_input

        while True:
            name = str(next(self._names))
            # salted, so that no keys and values of other weights are read; an input that is made here is vLLM's to
            # know before anything else runs in the loop, so `_go_on` finds every request that has the old salt
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
        """See `VLLMEngine`; the changes of weights have limits of their own."""
        under_way = sum(tokens_under_way(llm) for llm in self._running[:1])
        return self._ended, under_way, time.monotonic() if self._paused else 0.0

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """See `VLLMEngine`; requests under way are kept, and go on with the new weights after the block.

        They do not where the block fails: the engine, which may hold a mixture of weights, is to be closed.
        """
        self._paused = True
        self._do("generation to be paused", lambda: self.llm.pause_generation(mode="keep", clear_cache=False))
        yield
        self._do("generation to go on", self._go_on)
        self._paused = False

    async def _go_on(self) -> None:
        """Let requests go on, and those of which nothing was sampled yet begin anew, with another salt.

        The label is exact: the engine writes it into what each of its steps gives, and it is changed here
        alone, when every step that was under way at the pause has ended. Nothing is counted in this process,
        which some of those tokens may not have reached yet; a request whose first one is among them begins
        anew too, and what was on its way is of no request any more.
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
    states = list(engine.output_processor.request_states.values())  # which another thread may be adding to
    return sum(state.detokenizer.num_output_tokens() for state in states if state.detokenizer is not None)


def start_engine(arguments: dict[str, Any], settings: VLLMSettings) -> VLLMEngine:
    """Start vLLM as `settings.engine` says, but in a process of its own where it runs transformers' own classes.

    It rewrites such a class for torch.compile, and models of that class that are in this process, the trained one
    first, can then not be called any more.
    """
    guard()
    if settings.engine is Engine.in_process:
        set_environment(in_process=True)
        from vllm import LLM, EngineArgs

        if not EngineArgs(**arguments).create_model_config().using_transformers_backend():
            return InProcessEngine(LLM(**arguments))
    set_environment(in_process=False)
    return OwnProcessEngine(arguments, settings.timeout_seconds)


def engine_around(llm: Any, timeout_seconds: float) -> InProcessEngine | SeparateEngine:
    """The engine of a `vllm.LLM` that somebody else built and closes."""
    from vllm.v1.engine.core_client import InprocClient

    in_process = isinstance(llm.llm_engine.engine_core, InprocClient)
    return InProcessEngine(llm) if in_process else SeparateEngine(llm, timeout_seconds)
