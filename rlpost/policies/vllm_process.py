"""What stands around vLLM's own process: its environment and sockets, waits that end, and what is handed over."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import shutil
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rlpost.errors import PolicyError
from rlpost.loop_thread import LoopThread
from rlpost.model.sums import EMBEDDINGS
from rlpost.policies.vllm_exchange import MORE_SHARED, exchange_folder, memory_folder, with_room
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


def save_one_by_one(weights: NamedWeights, folder: Path) -> None:
    """Write a file a weight: tensors cannot cross to another process, a folder can, and no two are held at once."""
    for number, (name, weight) in enumerate(weights):
        file = with_room(folder / f"{number:05d}.safetensors", weight.nbytes)
        save_file({name: weight.detach().contiguous().cpu()}, file)


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
